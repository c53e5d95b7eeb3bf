"""A KV cache without keys and values: the tables of a manager whose requests grow, for the benchmarks of the switch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specfsm.decode.cache import RowLog
from specfsm.domain import Geometry

__all__ = ["Cache"]


class Cache:
    """A batch-ordered manager (`specfsm.SlidingKVManager`) whose rows hold the same requests throughout.

    Beside the table that `specfsm` asks for it keeps the tables that TensorRT-LLM's managers hand out, so that a
    hand-written switch copies them as they are. All are kept up to date by `reserve`, and none is written meanwhile.

    Args:
        geometry: page size, pool, width.
        rows: requests.
        seed: of the pages that each row gets.
        pinned: whether a GPU reads the tables.

    Attributes:
        host_block_offsets: int32 [1, rows, planes, blocks], -1 where there is no page: what `specfsm` reads.
        upstream_block_offsets: the same with 0 there: what a plain copy to the device takes.
        blocks: int32 [rows, blocks], raw block ids, 0 where there is none. No page is offloaded: id and slot are equal.
        sliding_base: int32 [1, rows, planes, blocks], the window's base pages, -1 where there is none.
        reserved: int64 [rows], blocks that each row holds.
    """

    def __init__(self, geometry: Geometry, rows: int, *, seed: int, pinned: bool) -> None:
        self.geometry = geometry
        self.generation = 1
        self.blocks_version = 0
        self.pool_pointers = (4096 * (1 + seed),)
        width = geometry.max_blocks_per_seq
        pages = torch.randperm(geometry.blocks_in_primary_pool, generator=torch.Generator().manual_seed(seed))
        self._pages = pages[: rows * width].view(rows, width).to(torch.int32)
        table = (1, rows, geometry.kv_factor, width)
        self.host_block_offsets = torch.full(table, -1, dtype=torch.int32, pin_memory=pinned)
        self.upstream_block_offsets = torch.zeros(table, dtype=torch.int32, pin_memory=pinned)
        self.sliding_base = torch.full(table, -1, dtype=torch.int32, pin_memory=pinned)
        self.blocks = torch.zeros((rows, width), dtype=torch.int32)
        self.reserved = torch.zeros(rows, dtype=torch.int64)
        self.changed: list[int] = []
        self._log = RowLog(rows)

    def reserve(self, tokens: Tensor) -> None:
        """Give each row the pages of so many tokens. `changed` says whose table moved."""
        wanted = (tokens + self.geometry.tokens_per_block - 1) // self.geometry.tokens_per_block
        self.changed = (wanted != self.reserved).nonzero().flatten().tolist()
        for row in self.changed:
            self._write(row, int(wanted[row]))
        self.reserved = wanted
        self.blocks_version += bool(self.changed)

    def _write(self, row: int, blocks: int) -> None:
        self._log.write(row)
        pages = self._pages[row, :blocks]
        self.blocks[row, :blocks], self.blocks[row, blocks:] = pages, 0
        self.sliding_base[0, row, :, :blocks], self.sliding_base[0, row, :, blocks:] = pages, -1
        for plane in range(self.geometry.kv_factor):
            entries = pages * self.geometry.index_scale + plane
            for table, padding in ((self.host_block_offsets, -1), (self.upstream_block_offsets, 0)):
                table[0, row, plane, :blocks], table[0, row, plane, blocks:] = entries, padding

    # What `specfsm` asks.

    def arrange(self, request_ids: Sequence[int]) -> Sequence[int]:
        return range(len(request_ids))

    def changed_rows(self, since: int | None) -> tuple[int, Tensor | None]:
        return self._log.since(since)

    @property
    def sliding_pools(self) -> list[list[int]]:
        return [[0] * self.geometry.sliding_types] * self.geometry.num_layers

    @property
    def sliding_scales(self) -> list[list[int]]:
        return [[self.geometry.pages_per_slot] * self.geometry.sliding_types] * self.geometry.num_layers

    @property
    def sliding_offsets(self) -> list[int]:
        return list(range(self.geometry.num_layers))

    @property
    def sparse_pointers(self) -> dict[int, int]:
        return {1: self.pool_pointers[0]}

    @property
    def window_pointers(self) -> dict[int, int]:
        return {layer: self.pool_pointers[0] + layer for layer in range(self.geometry.num_layers)}

    @property
    def compressed_pointers(self) -> dict[int, int]:
        return {}

    def compute_sliding_base(self, request_ids: Sequence[int]) -> Tensor:
        return self.sliding_base

    # What TensorRT-LLM asks.

    def block_ids(self, request_ids: Sequence[int]) -> Tensor:
        """Raw block ids of the batch, int32 [requests, blocks] on the host."""
        return self.blocks[: len(request_ids)]
