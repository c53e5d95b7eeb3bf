"""DeepSeek-V4: a sliding window in every layer, and compressed caches beside it that only the target has.

Bound to TensorRT-LLM's attribute names. The sliding tables start from base page ids that each manager computes from its
own blocks. That they are computed *before* they are copied to the device is declared: the copy reads what was computed,
so a copy of the other domain's, or of an older, base is stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from specfsm.backends.backend import Backend
from specfsm.backends.resource import DomainView, Pointer, Resource, Staged, Table
from specfsm.backends.trtllm import KV_TABLE, LENGTHS, SOURCES
from specfsm.domain import AddressSpace, Domain, SlidingKVManager, UnifiedCache, Unit
from specfsm.kernels.recipes import GatherTable, SlidingTable

__all__ = ["DeepSeekV4"]


def sliding_manager(view: DomainView) -> SlidingKVManager:
    """The domain's manager, whose protocol was checked when it was bound."""
    return cast(SlidingKVManager, view.manager)


def compute_base(view: DomainView) -> Any:
    """Base page ids, computed by the manager; first it puts its rows in batch order, if they follow the batch."""
    return sliding_manager(view).compute_sliding_base(view.batch.request_ids if view.batch is not None else ())


def copy_base(view: DomainView, host: torch.Tensor) -> torch.Tensor | None:
    """What was computed; nothing where nothing was."""
    base = view.value("host_sliding_base")
    return None if base is None else host.copy_(base)


def fill_pools(view: DomainView, host: torch.Tensor) -> torch.Tensor:
    """Refuses a pool that the base table does not have: its entries would silently have no place."""
    pools = torch.tensor(sliding_manager(view).sliding_pools, dtype=host.dtype)
    if int(pools.max()) >= view.axes["P"]:
        raise ValueError(
            f"sliding_pools names pool {int(pools.max())}, but the {view.domain}'s manager has {view.axes['P']} pools: "
            "let it say -1 where a layer has none"
        )
    return host.copy_(pools)


def fill_scales(view: DomainView, host: torch.Tensor) -> torch.Tensor:
    """Refuses pages beyond int32."""
    scales = torch.tensor(sliding_manager(view).sliding_scales, dtype=torch.int64)
    largest = view.geometry.blocks_in_primary_pool * int(scales.max())
    if int(scales.min()) < 0 or largest > torch.iinfo(host.dtype).max:
        raise ValueError(f"sliding_scales must be 0 or more, and pages up to {largest} must fit {host.dtype}")
    return host.copy_(scales)


def fill_offsets(view: DomainView, host: torch.Tensor) -> torch.Tensor:
    return host.copy_(torch.tensor(sliding_manager(view).sliding_offsets, dtype=host.dtype))


def sliding(domains: tuple[Domain, ...]) -> tuple[Resource, ...]:
    """The window's tables and pointers, in the domains whose layers have a window."""
    layers: dict[str, Any] = {"reads": ("manager",), "attribute": None, "dtype": "int32", "domains": domains}
    return (
        Pointer(
            "host_sliding_base",
            reads=("manager", "blocks", "batch"),
            of=compute_base,
            domains=domains,
            note="base page ids, computed by the manager in a buffer of its own",
        ),
        Staged(
            "sliding_base",
            reads=("host_sliding_base",),
            attribute=None,
            dtype="int32",
            shape=("P", "R", "Q", "B"),
            space=AddressSpace("window", Unit.ENTRY),
            sentinel=-1,
            fill=copy_base,
            domains=domains,
            note="its device copy: computed first, then copied",
        ),
        Staged("sliding_pools", shape=("L", "Y"), sentinel=-1, fill=fill_pools, note="-1: no such table", **layers),
        Staged("sliding_scales", shape=("L", "Y"), fill=fill_scales, note="pages a base page", **layers),
        Staged("sliding_offsets", shape=("L",), fill=fill_offsets, note="the layer's page", **layers),
        Table(
            "sliding_block_tables",
            reads=("sliding_base", "row_index", "sliding_pools", "sliding_scales", "sliding_offsets"),
            dtype="int32",
            shape=("L", "Y", "S", "B"),
            space=AddressSpace("window", Unit.PAGE),
            sentinel=-1,
            recipe=SlidingTable(
                base="sliding_base",
                rows="row_index",
                pools="sliding_pools",
                scales="sliding_scales",
                offsets="sliding_offsets",
            ),
            domains=domains,
            note="-1 where the base has none, or the pool is invalid",
        ),
        Pointer(
            "sparse_mla_base_ptrs",
            reads=("manager",),
            of=lambda view: dict(sliding_manager(view).sparse_pointers),
            domains=domains,
            note="ratio → address; 1 is the window's pool",
        ),
        Pointer(
            "swa_buffer_ptrs",
            reads=("manager",),
            of=lambda view: dict(sliding_manager(view).window_pointers),
            domains=domains,
            note="layer → address",
        ),
    )


def compressed(ratios: Sequence[int]) -> tuple[Resource, ...]:
    """What the target alone has: the draft's layers have ratio 1."""
    tables = [
        Table(
            f"compress_block_tables{ratio}",
            reads=("base_block_offsets", "row_index"),
            dtype="int32",
            shape=("S", "B"),
            space=AddressSpace(f"compressed{ratio}", Unit.SLOT),
            sentinel=-1,
            recipe=GatherTable(base="base_block_offsets", rows="row_index", unit=Unit.SLOT, sentinel=-1),
            domains=(Domain.TARGET,),
            note=f"slots of the entries that stand for {ratio} tokens each",
        )
        for ratio in ratios
    ]
    pointers = Pointer(
        "compressed_buffer_ptrs",
        reads=("manager",),
        of=lambda view: dict(sliding_manager(view).compressed_pointers),
        domains=(Domain.TARGET,),
        note="layer → address",
    )
    return (*tables, pointers)


class DeepSeekV4(Backend):
    """DeepSeek-V4: sliding tables and pool pointers in both domains, compressed tables in the target's.

    Args:
        compress_ratios: tokens of one compressed entry, one table for each, beside the window's ratio 1.
        draft_compress_ratio: what the draft's layers have. Stated, not inferred from the target's last layer.
        sparse_draft: whether the draft has a window too. An Eagle3 draft has plain paged attention: its manager needs
            no sliding tables, and there are no twins of them.
        beam_width: of the sampler.
        pipeline_parallel_size: above 1 the draft keeps its KV in the target's cache.

    Raises:
        ValueError: a compress ratio of the draft or a beam width other than 1.
    """

    def __init__(
        self,
        *,
        compress_ratios: Sequence[int] = (4, 128),
        draft_compress_ratio: int = 1,
        sparse_draft: bool = True,
        beam_width: int = 1,
        pipeline_parallel_size: int = 1,
    ) -> None:
        if draft_compress_ratio != 1:
            raise ValueError(
                f"draft_compress_ratio is {draft_compress_ratio}, but compressed tables are the target's alone: "
                "give the draft layers of ratio 1"
            )
        if beam_width != 1:
            raise ValueError(f"beam_width is {beam_width}, but a sliding table has one row a request: use 1")
        domains = tuple(Domain) if sparse_draft else (Domain.TARGET,)
        super().__init__(
            "deepseek_v4",
            (
                *SOURCES,
                *LENGTHS,
                *(() if sparse_draft else (KV_TABLE,)),
                *sliding(domains),
                *compressed(compress_ratios),
            ),
            unified=UnifiedCache(
                f"{pipeline_parallel_size} pipeline stages: the last layer's stage alone cannot hold a draft cache"
            )
            if pipeline_parallel_size > 1
            else None,
            managers=dict.fromkeys(domains, SlidingKVManager),
        )
