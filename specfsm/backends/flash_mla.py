"""FlashMLA (Hopper, 64-token pages, 576-wide latent rows), bound to TensorRT-LLM's attribute names.

Upstream fills both tables with the manager's raw block ids, which are places only until a block is offloaded. Here
they are decoded to pool slots by the same recipe as every other table, so a raw id cannot get in.
"""

from __future__ import annotations

import torch

from specfsm.backends.backend import Backend
from specfsm.backends.resource import DomainView, Plan, Staged, Table
from specfsm.backends.trtllm import LENGTHS, SOURCES, fill_rows, pad
from specfsm.domain import AddressSpace, Unit
from specfsm.kernels.recipes import GatherTable

__all__ = ["FlashMLA"]

SLOTS = AddressSpace("kv", Unit.SLOT)


def fill_generation_rows(view: DomainView, host: torch.Tensor) -> torch.Tensor:
    """The generations' rows, packed to row 0: where the manager keeps each; -1 pads."""
    contexts = view.batch.num_contexts if view.batch is not None else 0
    if not contexts:
        return fill_rows(view, host)
    return host.copy_(pad(view.rows()[contexts:], host.shape[0], -1))


class FlashMLA(Backend):
    """FlashMLA: block ids of all rows and of the generations, and the split-KV schedule that its kernel runs by."""

    def __init__(self) -> None:
        super().__init__(
            "flash_mla",
            (
                *SOURCES,
                Staged(
                    "generation_row_index",
                    reads=("manager", "blocks", "batch"),
                    attribute=None,
                    dtype="int32",
                    shape=("S",),
                    space=AddressSpace("kv", Unit.ROW),
                    sentinel=-1,
                    fill=fill_generation_rows,
                    note="as row_index, generations only, packed to row 0",
                ),
                *LENGTHS,
                Table(
                    "kv_block_ids_per_seq",
                    reads=("base_block_offsets", "row_index"),
                    dtype="int32",
                    shape=("S", "B"),
                    space=SLOTS,
                    recipe=GatherTable(base="base_block_offsets", rows="row_index", unit=Unit.SLOT),
                    note="all rows, in batch order",
                ),
                Table(
                    "block_ids_per_seq",
                    reads=("base_block_offsets", "generation_row_index"),
                    dtype="int32",
                    shape=("S", "B"),
                    space=SLOTS,
                    recipe=GatherTable(base="base_block_offsets", rows="generation_row_index", unit=Unit.SLOT),
                    note="generation rows, packed to row 0",
                ),
                Plan("flash_mla_tile_scheduler_metadata", reads=("manager", "batch", "lengths", "layout")),
                Plan("flash_mla_num_splits", reads=("manager", "batch", "lengths", "layout")),
            ),
        )
