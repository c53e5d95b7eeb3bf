"""Plain paged attention, bound to the attribute names of TensorRT-LLM's ``TrtllmAttentionMetadata``."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from specfsm.backends.backend import Backend
from specfsm.backends.resource import Alias, DomainView, Pointer, Resource, Staged, Table
from specfsm.domain import AddressSpace, Batch, RowOrder, Unit
from specfsm.kernels.recipes import GatherTable

__all__ = ["LENGTHS", "SOURCES", "SWITCHED", "Trtllm"]


# How the staged buffers are filled. Each writes the whole host buffer, padding included, and returns it.


def fill_base(view: DomainView, host: torch.Tensor) -> torch.Tensor:
    return host.copy_(arranged(view))


def arranged(view: DomainView) -> torch.Tensor:
    """The manager's own table, put in batch order if its rows follow the batch."""
    if view.geometry.row_order is RowOrder.BATCH and view.batch is not None:
        view.manager.arrange(view.batch.request_ids)
    table: torch.Tensor = view.manager.host_block_offsets
    return table


PATCHED = 1 << 19
"""Bytes from which a table is patched: a smaller one is copied whole in the time it takes to pick rows."""


def patch_base(view: DomainView, host: torch.Tensor, note: tuple[int, int] | None) -> tuple[int, int] | None:
    """The rows that changed since this very buffer was written; where the manager does not tell, `fill_base`."""
    manager: Any = view.manager
    if host.nbytes < PATCHED or not hasattr(manager, "changed_rows"):
        return None
    table, generation = arranged(view), manager.generation
    version, rows = manager.changed_rows(note[1] if note is not None and note[0] == generation else None)
    if rows is None:
        host.copy_(table)
    elif len(rows):
        host.index_copy_(1, rows, table.index_select(1, rows))
    return generation, version


def fill_rows(view: DomainView, host: torch.Tensor) -> torch.Tensor:
    """Row of the batch → row of the manager's table; -1 in padded rows."""
    if view.geometry.row_order is RowOrder.BATCH:
        return host.copy_(first_rows(len(view.batch or ()), host.shape[0]))
    return host.copy_(pad(view.rows(), host.shape[0], -1))


def fill_kv_lens(view: DomainView, host: torch.Tensor) -> torch.Tensor:
    return host.copy_(column(view.batch, "kv_lens", host.shape[0])) if view.batch else host.zero_()


def fill_seq_lens(view: DomainView, host: torch.Tensor) -> torch.Tensor:
    return host.copy_(column(view.batch, "tokens", host.shape[0])) if view.batch else host.zero_()


def column(batch: Batch, name: str, size: int) -> torch.Tensor:
    """A field of the batch with 0 in padded rows, int32 [size]. Made once: it mostly serves target and draft."""
    made: torch.Tensor | None = batch.packed.get((name, size))
    if made is None:
        made = batch.packed[name, size] = pad(getattr(batch, name), size, 0)
    return made


@lru_cache(maxsize=256)
def first_rows(live: int, size: int) -> torch.Tensor:
    """0, 1, 2, … for the live rows, then -1."""
    return pad(range(live), size, -1)


def pad(live: Sequence[int], size: int, sentinel: int) -> torch.Tensor:
    """`live`, then the sentinel, int32 [size]. Through an array: a tensor of Python ints takes four times as long."""
    rows = array("i", live)
    rows.extend([sentinel] * (size - len(rows)))
    return torch.frombuffer(rows, dtype=torch.int32) if size else torch.empty(0, dtype=torch.int32)


def _num_rows(view: DomainView) -> int:
    return view.batch.rows if view.batch is not None else 0


def runtime(of: str) -> Alias:
    """``<name>_runtime``: of a buffer for the largest batch, the rows that the phase is run with."""
    return Alias(
        f"{of}_runtime",
        of=of,
        reads=("batch",),
        derive=lambda buffer, view: buffer[: _num_rows(view)],
        note="view [:num_seqs]",
    )


# What every paged backend is derived from, declared once.

SOURCES: tuple[Resource, ...] = (
    Pointer("kv_cache_manager", reads=("manager",), of=lambda view: view.manager),
    Pointer(
        "host_kv_cache_block_offsets",
        reads=("manager",),
        of=lambda view: view.manager.host_block_offsets,
        note="pinned, owned by the manager",
    ),
    Pointer(
        "host_kv_cache_pool_pointers",
        reads=("manager",),
        of=lambda view: tuple(view.manager.pool_pointers),
        note="baked into a captured graph",
    ),
    Pointer("tokens_per_block", reads=("manager",), of=lambda view: view.geometry.tokens_per_block),
    Staged(
        "base_block_offsets",
        reads=("manager", "blocks", "batch"),
        attribute=None,
        dtype="int32",
        shape=("P", "R", "Q", "B"),
        space=AddressSpace("kv", Unit.ENTRY),
        sentinel=-1,
        fill=fill_base,
        patch=patch_base,
        note="device copy of the manager's table, still encoded",
    ),
    Staged(
        "row_index",
        reads=("manager", "blocks", "batch"),
        attribute=None,
        dtype="int32",
        shape=("S",),
        space=AddressSpace("kv", Unit.ROW),
        sentinel=-1,
        fill=fill_rows,
        note="where the manager keeps each row of the batch; -1 pads",
    ),
)

LENGTHS: tuple[Resource, ...] = (
    Staged(
        "kv_lens_cuda",
        reads=("batch", "lengths"),
        dtype="int32",
        shape=("S",),
        sentinel=0,
        host_attribute="kv_lens",
        fill=fill_kv_lens,
        note="tokens in the cache, the phase's own included",
    ),
    Staged(
        "_seq_lens_cuda",
        reads=("batch", "layout"),
        dtype="int32",
        shape=("S",),
        sentinel=0,
        host_attribute="_seq_lens",
        fill=fill_seq_lens,
        note="tokens of each request in the phase",
    ),
    Pointer("num_contexts", reads=("batch",), of=lambda view: view.batch.num_contexts if view.batch else 0),
    runtime("kv_lens_cuda"),
    runtime("_seq_lens_cuda"),
)

KV_TABLE = Table(
    "kv_cache_block_offsets",
    reads=("base_block_offsets", "row_index"),
    dtype="int32",
    shape=("P", "S", "Q", "B"),
    space=AddressSpace("kv", Unit.PAGE),
    sentinel=0,
    recipe=GatherTable(base="base_block_offsets", rows="row_index", unit=Unit.PAGE, planes=True, sentinel=0),
    note="K plane, V plane",
)

SWITCHED = (*SOURCES, *LENGTHS, KV_TABLE)


class Trtllm(Backend):
    """Plain paged attention: one block table with a K and a V plane, lengths, and what points at the manager."""

    def __init__(self) -> None:
        super().__init__("trtllm", SWITCHED)
