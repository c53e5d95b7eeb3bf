"""The switch as TensorRT-LLM wrote it by hand, twice over, written anew from a description of what it does.

*Generation 1* has no twins of the tables that a backend derives: it clones them, refills them in place for the draft,
and copies the clones back at restore. (FlashMLA's two tables it does not even clone: it refills them a second time.)
*Generation 2* gives every table a draft twin: a switch rebinds references and refills the twin, each time; a restore
rebinds.

Both are what a competent engineer would ship: buffers and pinned host halves are made once, what the batch alone
decides (owner and position of each token) is taken from the target's step, copies are pinned and asynchronous, nothing
waits for the device, and no Python list is built. Neither keeps the promises that `specfsm` keeps beside: no refill is
skipped, but nothing is atomic, and nothing notices a refill that was forgotten.

Names in code are the upstream attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from benchmarks.caches import Cache
from specfsm.backends.dsa import DATA_BYTES, SCALE_BYTES
from specfsm.domain import Batch

__all__ = ["TABLES", "Generation1", "Generation2", "Metadata", "Step"]


@frozen
class Step:
    """What the engine knows of a step before any switch, from preparing the target's metadata.

    Args:
        batch: of target and draft.
        kv_lens: int64 [requests], host.
        owner: int64 [tokens], the row of each token, host.
        position: int64 [tokens], its position in its request, host.
    """

    batch: Batch
    kv_lens: Tensor
    owner: Tensor
    position: Tensor


class Metadata:
    """Attention metadata of one backend: what both generations share. Twins are generation 2's.

    Args:
        backend: its name.
        target, draft: the managers.
        requests: rows of the tables.
        queries: C, tokens of each request in the target's step and in the draft's first pass.
        device: where the tables are.
    """

    def __init__(
        self, backend: str, target: Cache, draft: Cache, requests: int, queries: int, device: torch.device
    ) -> None:
        self.backend, self.queries = backend, queries
        self.kv_cache_manager, self.draft_kv_cache_manager = target, draft
        self.host_kv_cache_block_offsets = target.upstream_block_offsets
        self.draft_host_kv_cache_block_offsets = draft.upstream_block_offsets
        self._seq_lens = torch.full((requests,), queries, dtype=torch.int32)
        self._seq_lens_cuda = self._seq_lens.to(device)
        self.kv_lens_cuda = torch.zeros(requests, dtype=torch.int32, device=device)
        self.num_contexts = 0
        for prefix, manager in (("", target), ("draft_", draft)):
            for name, (dtype, shape, padding) in tables(backend, manager, requests, queries).items():
                setattr(self, prefix + name, torch.full(shape, padding, dtype=dtype, device=device))
                if name != "kv_cache_block_offsets":  # whose host half is the manager's own
                    host = torch.full(shape, padding, dtype=dtype, pin_memory=device.type == "cuda")
                    setattr(self, f"{prefix}host_{name}", host)
        if backend == "dsa":
            self.req_idx_per_token = torch.arange(requests, dtype=torch.int32, device=device).repeat_interleave(queries)
            self.draft_req_idx_per_token = self.req_idx_per_token.clone()
        for name in PLANS[backend]:
            setattr(self, name, None)
        self.pool_view: dict[Any, Any] = {}
        self.sliding = {id(each): sliding_layout(each) for each in (target, draft)}


Shape = tuple[torch.dtype, tuple[int, ...], int]


def tables(backend: str, manager: Cache, requests: int, queries: int) -> dict[str, Shape]:
    """Name → dtype, shape and padding of the tables that a switch must refill."""
    g = manager.geometry
    width = g.max_blocks_per_seq
    offsets: Shape = (torch.int32, (1, requests, g.kv_factor, width), 0)
    ids: Shape = (torch.int32, (requests, width), 0)
    slots: Shape = (torch.int64, (requests * queries,), -1)
    return {
        "trtllm": {"kv_cache_block_offsets": offsets},
        "flash_mla": {"kv_block_ids_per_seq": ids, "block_ids_per_seq": ids},
        "dsa": {
            "kv_cache_block_offsets": offsets,
            "indexer_k_cache_block_offsets": ids,
            "block_table": (torch.int32, (requests, width), -1),
            "block_table_expanded": (torch.int32, (requests * queries, width), -1),
            "slot_mapping_fp8": slots,
            "slot_mapping_scale": slots,
        },
        "deepseek_v4": {
            "sliding_block_tables": (torch.int32, (g.num_layers, g.sliding_types, requests, width), -1),
        },
    }[backend]


TABLES = {
    "trtllm": ("kv_cache_block_offsets",),
    "flash_mla": ("kv_block_ids_per_seq", "block_ids_per_seq"),
    "dsa": (
        "kv_cache_block_offsets",
        "indexer_k_cache_block_offsets",
        "block_table",
        "block_table_expanded",
        "slot_mapping_fp8",
        "slot_mapping_scale",
        "req_idx_per_token",
    ),
    "deepseek_v4": ("sliding_block_tables",),
}
"""What must be the draft's between switch and restore."""

PLANS = {
    "trtllm": (),
    "flash_mla": ("flash_mla_tile_scheduler_metadata", "flash_mla_num_splits"),
    "dsa": ("scheduler_metadata_buffer", "scheduler_metadata_buffer_expanded"),
    "deepseek_v4": (),
}


# Refills: each writes the bound tables from the bound manager, for either generation.


def refill_trtllm(metadata: Any, step: Step) -> None:
    live = len(step.batch)
    host = metadata.host_kv_cache_block_offsets
    metadata.kv_cache_block_offsets[:, :live].copy_(host[:, :live], non_blocking=True)


def refill_flash_mla(metadata: Any, step: Step) -> None:
    """Both tables are zero-filled, then take the ids; a fresh pinned source, because the last copy may be pending."""
    ids = metadata.kv_cache_manager.block_ids(step.batch.request_ids)
    ids = ids.pin_memory() if metadata.kv_block_ids_per_seq.is_cuda else ids
    generations = ids[metadata.num_contexts :]
    metadata.kv_block_ids_per_seq.zero_()
    metadata.kv_block_ids_per_seq[: len(ids)].copy_(ids, non_blocking=True)
    metadata.block_ids_per_seq.zero_()
    metadata.block_ids_per_seq[: len(generations)].copy_(generations, non_blocking=True)


def refill_dsa(metadata: Any, step: Step) -> None:
    refill_trtllm(metadata, step)
    manager, live, tokens = metadata.kv_cache_manager, len(step.batch), len(step.owner)
    g = manager.geometry
    page = g.tokens_per_block

    slots = metadata.host_indexer_k_cache_block_offsets[:live]
    torch.div(manager.host_block_offsets[0, :live, 0], g.index_scale, rounding_mode="floor", out=slots)
    absent = slots < 0
    slots.clamp_(0, g.blocks_in_primary_pool - 1)
    metadata.indexer_k_cache_block_offsets[:live].copy_(slots, non_blocking=True)

    start = slots[step.owner, step.position // page].long() * (page * (DATA_BYTES + SCALE_BYTES))
    within = step.position % page
    for name, first, size in (
        ("slot_mapping_fp8", 0, DATA_BYTES),
        ("slot_mapping_scale", page * DATA_BYTES, SCALE_BYTES),
    ):
        host = getattr(metadata, f"host_{name}")[:tokens]
        torch.add(start, within * size + first, out=host)
        getattr(metadata, name)[:tokens].copy_(host, non_blocking=True)

    beyond = torch.arange(slots.shape[1]) * page >= step.kv_lens[:, None]
    host = metadata.host_block_table[:live]
    host.copy_(slots).masked_fill_(beyond | absent, -1)
    metadata.block_table[:live].copy_(host, non_blocking=True)
    expanded = metadata.block_table_expanded[: live * metadata.queries].view(live, metadata.queries, -1)
    expanded.copy_(metadata.block_table[:live, None].expand_as(expanded))


def sliding_layout(manager: Cache) -> tuple[Tensor, Tensor, Tensor]:
    """Pools and scales [layers, types, 1, 1] and offsets [layers, 1, 1, 1], made once a manager."""
    pools, scales = torch.tensor(manager.sliding_pools), torch.tensor(manager.sliding_scales)
    offsets = torch.tensor(manager.sliding_offsets, dtype=torch.int32)
    return pools, scales.to(torch.int32)[:, :, None, None], offsets[:, None, None, None]


def refill_deepseek_v4(metadata: Any, step: Step) -> None:
    """Computed on the host for each manager, then copied: the order is mandatory."""
    manager, live = metadata.kv_cache_manager, len(step.batch)
    pools, scales, offsets = metadata.sliding[id(manager)]
    base = manager.compute_sliding_base(step.batch.request_ids)[:, :live, 0]
    pages = base[pools]
    layers = len(pools)
    host = metadata.host_sliding_block_tables[:layers, :, :live]
    host.copy_(pages * scales + offsets).masked_fill_(pages < 0, -1)
    metadata.sliding_block_tables[:layers, :, :live].copy_(host, non_blocking=True)


REFILLS: dict[str, Callable[[Any, Step], None]] = {
    "trtllm": refill_trtllm,
    "flash_mla": refill_flash_mla,
    "dsa": refill_dsa,
    "deepseek_v4": refill_deepseek_v4,
}


class Generation1:
    """Clone, refill in place, restore.

    Only the block offsets have a draft buffer of their own. FlashMLA's tables are refilled again for the target;
    DSA's six tensors, and the draft's layers of the sliding tables, are cloned and copied back.
    """

    def __init__(self, metadata: Metadata) -> None:
        self.metadata: Any = metadata
        self.refill = REFILLS[metadata.backend]
        self.step: Step | None = None
        own = {"kv_cache_block_offsets"} if metadata.backend in ("trtllm", "dsa") else set()
        self.rebound = ("host_kv_cache_block_offsets", *own)
        self.cloned = () if metadata.backend == "flash_mla" else tuple(set(TABLES[metadata.backend]) - own)
        self.layers = metadata.draft_kv_cache_manager.geometry.num_layers

    def prepare_for_draft_forward(self, step: Step) -> None:
        metadata, self.step = self.metadata, step
        self.manager, self.originals = (
            metadata.kv_cache_manager,
            [getattr(metadata, name) for name in self.rebound],
        )
        self.lens = metadata._seq_lens, metadata._seq_lens_cuda, metadata.num_contexts
        metadata._seq_lens, metadata._seq_lens_cuda = self.lens[0].clone(), self.lens[1].clone()
        metadata.kv_cache_manager = metadata.draft_kv_cache_manager
        for name in self.rebound:
            setattr(metadata, name, getattr(metadata, f"draft_{name}"))
        self.clones = [self._written(name).clone() for name in self.cloned]
        self.refill(metadata, step)
        derive(metadata, step)

    def restore_after_draft_forward(self) -> None:
        metadata = self.metadata
        metadata.kv_cache_manager = self.manager
        for name, original in zip(self.rebound, self.originals, strict=True):
            setattr(metadata, name, original)
        metadata._seq_lens, metadata._seq_lens_cuda, metadata.num_contexts = self.lens
        for name, clone in zip(self.cloned, self.clones, strict=True):
            self._written(name).copy_(clone)
        if metadata.backend == "flash_mla":
            self.refill(metadata, self.step)
        derive(metadata, self.step)

    def _written(self, name: str) -> Tensor:
        """What the draft's refill overwrites of a table: of the sliding ones its own layers."""
        table: Tensor = getattr(self.metadata, name)
        return table[: self.layers] if name == "sliding_block_tables" else table


class Generation2:
    """Twins: rebind and refill there, rebind back."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata: Any = metadata
        self.refill = REFILLS[metadata.backend]
        self.step: Step | None = None
        twins = tuple(name.removeprefix("draft_") for name in vars(metadata) if name.startswith("draft_"))
        self.swapped = (*twins, "_seq_lens", "_seq_lens_cuda", "num_contexts")
        self.twins = twins

    def prepare_for_draft_forward(self, step: Step) -> None:
        metadata, self.step = self.metadata, step
        self.originals = [getattr(metadata, name) for name in self.swapped]
        for name in self.twins:
            setattr(metadata, name, getattr(metadata, f"draft_{name}"))
        metadata._seq_lens, metadata._seq_lens_cuda = metadata._seq_lens.clone(), metadata._seq_lens_cuda.clone()
        if not (metadata.kv_lens_cuda.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.refill(metadata, step)
        derive(metadata, step)

    def restore_after_draft_forward(self) -> None:
        for name, original in zip(reversed(self.swapped), reversed(self.originals), strict=True):
            setattr(self.metadata, name, original)
        derive(self.metadata, self.step)


def derive(metadata: Any, step: Any) -> None:
    """Views of what is bound now; plans and manager-keyed caches are dropped."""
    live = len(step.batch)
    metadata.kv_lens_cuda_runtime = metadata.kv_lens_cuda[:live]
    metadata._seq_lens_cuda_runtime = metadata._seq_lens_cuda[:live]
    for name in PLANS[metadata.backend]:
        setattr(metadata, name, None)
    if metadata.backend == "dsa":
        metadata.slot_mapping_fp8_fullkv = metadata.slot_mapping_fp8
        metadata.slot_mapping_scale_fullkv = metadata.slot_mapping_scale
        metadata.pool_view = {}
