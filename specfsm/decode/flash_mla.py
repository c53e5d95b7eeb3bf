"""The real FlashMLA kernel in place of the torch attention, on a Hopper GPU (package ``sgl-flash-mla``)."""

from __future__ import annotations

import torch
from torch.nn import functional

from specfsm.decode.attention import LATENT, FlashMLAPass

__all__ = ["FlashMLAKernelPass"]

HEADS = 16
"""Fewest query heads that the kernel takes; the rest are zero."""


class FlashMLAKernelPass(FlashMLAPass):
    """Generation rows go through ``flash_mla_with_kvcache``; context rows through the torch attention.

    Its schedule is opaque and made by the kernel's first call; it is the backend's `Plan`. The library checks that the
    shapes are those it was made for, but not the lengths, nor whose cache it is: that is what the machine adds.
    """

    def _split(self, pages: torch.Tensor, wide: torch.Tensor, out: torch.Tensor, rows: slice, scale: float) -> None:
        from flash_mla import (  # type: ignore[import-not-found]  # only on a machine with a Hopper GPU
            flash_mla_with_kvcache,
            get_mla_metadata,
        )

        metadata, heads = self.metadata, wide.shape[1]
        schedule = metadata.flash_mla_tile_scheduler_metadata
        if schedule is None:
            schedule, _ = get_mla_metadata()
            self.publish("flash_mla_tile_scheduler_metadata", schedule)
            self.publish("flash_mla_num_splits", schedule)
        queries = wide[self.queries[rows].clamp(min=0)]
        attended, _ = flash_mla_with_kvcache(
            functional.pad(queries, (0, 0, 0, max(0, HEADS - heads))),
            pages[:, :, None],
            metadata.block_ids_per_seq[: rows.stop - rows.start],
            self.lens[rows].int(),
            LATENT,
            schedule,
            softmax_scale=scale,
            causal=True,
            use_legacy=True,
        )
        self.pack(attended[:, :, :heads], out, rows)
