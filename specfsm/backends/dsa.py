"""DSA (DeepSeek sparse attention): an indexer with a key pool of its own picks the tokens that the attention reads.

Bound to TensorRT-LLM's attribute names. Upstream fills most of these tables on the host and copies them; here they are
recipes over the manager's own table, so the pairs of host and device buffers are gone.

What the draft loop moves on the device (lengths, and with them positions, clipped tables and slots) is refreshed inside
a captured graph. Which request a token belongs to follows the *layout*: a map that kept the target's (1 + draft length
tokens a request) in the draft loop wrote indexer keys into other requests' pages (TensorRT-LLM #16925).
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from specfsm.backends.backend import Backend
from specfsm.backends.resource import Alias, Cache, DomainView, Plan, Table
from specfsm.backends.trtllm import KV_TABLE, LENGTHS, SOURCES
from specfsm.domain import AddressSpace, Unit
from specfsm.kernels.recipes import ExpandRows, GatherTable, SlotMapping

__all__ = ["DATA_BYTES", "DSA", "SCALE_BYTES"]

DATA_BYTES, SCALE_BYTES = 128, 4
"""One token's indexer key: 128 elements of FP8, and a float32 scale for them."""


# Device-side refreshes: they read `_seq_lens_cuda`, never the host's batch, so that a graph can record them.


def _owners(view: DomainView, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each of T tokens its place, the row that owns it (S for none), and the end of each row."""
    ends = view.value("_seq_lens_cuda").cumsum(0)
    token = torch.arange(buffer.shape[0], device=buffer.device)
    return token, torch.searchsorted(ends, token, right=True), ends


def refresh_requests(view: DomainView, buffer: torch.Tensor) -> torch.Tensor:
    """The row of the batch that each token belongs to; -1 pads."""
    _, row, ends = _owners(view, buffer)
    return buffer.copy_(torch.where(row < ends.shape[0], row, -1))


def refresh_back(view: DomainView, buffer: torch.Tensor) -> torch.Tensor:
    """Tokens from each token to the end of its request: 1 for the last one; 0 pads."""
    token, row, ends = _owners(view, buffer)
    left = ends[row.clamp(max=ends.shape[0] - 1)] - token
    return buffer.copy_(torch.where(row < ends.shape[0], left, 0))


def slot_mapping(name: str, part: Literal["data", "scale"]) -> Table:
    """Where each token's indexer key, or its scale, lies in the indexer's pool, in bytes."""
    return Table(
        name,
        reads=("indexer_k_cache_block_offsets", "req_idx_per_token", "tokens_to_end", "kv_lens_cuda"),
        dtype="int64",
        shape=("T",),
        space=AddressSpace("indexer", Unit.BYTE),
        sentinel=-1,
        recipe=SlotMapping(
            table="indexer_k_cache_block_offsets",
            requests="req_idx_per_token",
            back="tokens_to_end",
            lens="kv_lens_cuda",
            data_bytes=DATA_BYTES,
            scale_bytes=SCALE_BYTES,
            part=part,
        ),
        refreshed_by="graph",
        note=f"byte offset of each token's {part} row; -1 pads",
    )


def fullkv(of: str) -> Alias:
    """``<name>_fullkv``: the mapping of all tokens a context has, which are the new ones: no context is cached here."""
    return Alias(f"{of}_fullkv", of=of, derive=_same, note="the same: no part of a context is cached before its phase")


def _same(buffer: Any, _: DomainView) -> Any:
    return buffer


TOKENS = (
    Table(
        "req_idx_per_token",
        reads=("_seq_lens_cuda",),
        dtype="int32",
        shape=("T",),
        space=AddressSpace("batch", Unit.REQUEST),
        sentinel=-1,
        refresh=refresh_requests,
        on_device=True,
        refreshed_by="graph",
        note="row of the batch of each token; -1 pads",
    ),
    Table(
        "tokens_to_end",
        reads=("_seq_lens_cuda",),
        attribute=None,
        dtype="int32",
        shape=("T",),
        sentinel=0,
        refresh=refresh_back,
        on_device=True,
        refreshed_by="graph",
        note="1 for a request's last token: follows the layout, and stays put while lengths advance",
    ),
)

TABLES = (
    KV_TABLE,
    Table(
        "indexer_k_cache_block_offsets",
        reads=("base_block_offsets", "row_index"),
        dtype="int32",
        shape=("S", "B"),
        space=AddressSpace("indexer", Unit.SLOT),
        recipe=GatherTable(base="base_block_offsets", rows="row_index", unit=Unit.SLOT),
        note="slots of the indexer's pool, which shares its blocks with the KV pool",
    ),
    Table(
        "block_table",
        reads=("base_block_offsets", "row_index", "kv_lens_cuda"),
        dtype="int32",
        shape=("S", "B"),
        space=AddressSpace("kv", Unit.SLOT),
        sentinel=-1,
        recipe=GatherTable(
            base="base_block_offsets", rows="row_index", lens="kv_lens_cuda", unit=Unit.SLOT, sentinel=-1
        ),
        refreshed_by="graph",
        note="-1 from ceil(kv_len / tokens_per_block) on, so it follows the lengths that a graph moves",
    ),
    Table(
        "block_table_expanded",
        reads=("block_table",),
        dtype="int32",
        shape=("S*C", "B"),
        space=AddressSpace("kv", Unit.SLOT),
        sentinel=-1,
        recipe=ExpandRows(table="block_table"),
        refreshed_by="graph",
        note="each row C times, one for each query of a request",
    ),
)


class DSA(Backend):
    """DeepSeek sparse attention: plain paged attention, plus the indexer's tables, slot mappings and schedules."""

    def __init__(self) -> None:
        mappings = (slot_mapping("slot_mapping_fp8", "data"), slot_mapping("slot_mapping_scale", "scale"))
        super().__init__(
            "dsa",
            (
                *SOURCES,
                *LENGTHS,
                *TOKENS,
                *TABLES,
                *mappings,
                *(fullkv(each.name) for each in mappings),
                Plan("scheduler_metadata_buffer", reads=("kv_lens_cuda",), note="which blocks each worker scores"),
                Plan(
                    "scheduler_metadata_buffer_expanded",
                    reads=("kv_lens_cuda", "_seq_lens_cuda"),
                    note="the same for rows of several queries each",
                ),
                Cache("pool_view", reads=("manager",), note="the pools as the kernels index them"),
                Cache("pool_remap", reads=("manager",), note="layer → how a slot becomes a row of the viewed pool"),
            ),
        )
