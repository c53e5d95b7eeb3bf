"""DeepSeek-V4 in plain torch: attention over a sliding window, and over compressed entries of what lies before it.

A compressed entry is the mean of the keys, and of the values, of one group of tokens. It is derived from the rows that
stand in the window's pages, and made anew by every pass that writes a token of its group. It is read only by tokens a
whole window further on, whose pass found the group's tokens accepted: a rejected token was overwritten by then, and its
entry with it. So what is read does not depend on how the tokens were batched.

A model that was trained for full attention puts much weight on its first tokens, whatever they are, and writes nonsense
once they leave its window (arXiv:2309.17453). Where DeepSeek-V4 has a learned sink, the first group is kept as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from specfsm.decode.cache import PagedKVCache
from specfsm.decode.passes import AttentionMetadata, Pass
from specfsm.domain import Geometry

__all__ = ["RATIO", "SlidingKVCache", "SlidingMetadata", "SlidingPass"]

RATIO = 4
"""Tokens of a compressed entry."""


class SlidingMetadata(AttentionMetadata):
    """Metadata of DeepSeek-V4."""

    sliding_block_tables: torch.Tensor
    compress_block_tables4: torch.Tensor
    sparse_mla_base_ptrs: dict[int, int]
    swa_buffer_ptrs: dict[int, int]
    compressed_buffer_ptrs: dict[int, int]


class SlidingKVCache(PagedKVCache):
    """A paged cache as `specfsm.SlidingKVManager`: the window's pages, and compressed entries that go with them.

    Args:
        compressed: whether it has entries of `RATIO` tokens: the target's cache has, the draft's has not.

    Attributes:
        entries: [layers, slots, entries a block, planes, KV heads, head dim], or None.
    """

    def __init__(self, geometry: Geometry, *, compressed: bool = False, **options: Any) -> None:
        g = geometry
        if compressed and g.tokens_per_block % RATIO:
            raise ValueError(f"pages of {g.tokens_per_block} tokens do not hold whole groups of {RATIO}")
        shape = (g.tokens_per_block // RATIO, g.kv_factor, g.num_kv_heads, g.head_dim)
        dtype = getattr(torch, g.dtype)
        size = torch.Size(shape).numel() * dtype.itemsize
        super().__init__(geometry, extra={"compressed": size} if compressed else {}, **options)
        pages = (g.num_layers, g.blocks_in_primary_pool, *shape)
        self.entries = self.extra["compressed"].view(dtype).view(pages) if compressed else None
        self.sliding_base = torch.full_like(self.host_block_offsets, -1)

    # What the backend asks of it.

    @property
    def sliding_pools(self) -> list[list[int]]:
        return [[0]] * self.geometry.num_layers

    @property
    def sliding_scales(self) -> list[list[int]]:
        return [[self.geometry.pages_per_slot]] * self.geometry.num_layers

    @property
    def sliding_offsets(self) -> list[int]:
        return [layer * self.geometry.kv_factor for layer in range(self.geometry.num_layers)]

    @property
    def sparse_pointers(self) -> dict[int, int]:
        return {1: self.pool.data_ptr()} | ({} if self.entries is None else {RATIO: self.entries.data_ptr()})

    @property
    def window_pointers(self) -> dict[int, int]:
        return {layer: self.pool[0, layer].data_ptr() for layer in range(self.geometry.num_layers)}

    @property
    def compressed_pointers(self) -> dict[int, int]:
        return {} if self.entries is None else {layer: each.data_ptr() for layer, each in enumerate(self.entries)}

    def compute_sliding_base(self, request_ids: Any) -> torch.Tensor:
        """Slots out of the manager's own entries, in the order of the batch where its rows follow it."""
        self.arrange(request_ids)
        slots = self.host_block_offsets.div(self.geometry.index_scale, rounding_mode="floor")
        return self.sliding_base.copy_(slots.clamp(min=-1))

    # What a kernel would find at an address.

    def pages_at(self, address: int) -> torch.Tensor:
        """The flat pages of keys and values that begin at an address."""
        return _from(self.pages(), address)

    def entries_at(self, address: int) -> torch.Tensor:
        """The layers' compressed entries that begin at an address."""
        if self.entries is None:
            raise ValueError(f"this cache has no compressed entries, at {address:#x} or elsewhere")
        return _from(self.entries, address)


def _from(pool: torch.Tensor, address: int) -> torch.Tensor:
    first, within = divmod(address - pool.data_ptr(), pool.stride(0) * pool.itemsize)
    if within or not 0 <= first < pool.shape[0]:
        raise ValueError(f"{address:#x} is no address in this cache")
    return pool[first:]


class SlidingPass(Pass):
    """Attention over the last `window` tokens, the first `RATIO`, and the compressed entries of what lies between."""

    metadata: SlidingMetadata
    window = 128

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self._write(layer, key, value)
        parts = [self._recent(layer), self._first(layer)]
        if RATIO in self.metadata.sparse_mla_base_ptrs:
            self._compress(layer)
            parts.append(self._distant(layer))
        keys, values, seen = (torch.cat(each, dim=-3 if each[0].ndim == 4 else -1) for each in zip(*parts, strict=True))
        heads = functional.scaled_dot_product_attention(
            self.spread(query).transpose(1, 2),
            keys.to(query.dtype).transpose(1, 2),
            values.to(query.dtype).transpose(1, 2),
            attn_mask=seen[:, None],
            scale=scale,
            enable_gqa=True,
        )
        out = torch.zeros_like(query)
        self.pack(heads.transpose(1, 2), out, slice(0, len(self.batch)))
        return out

    def _table(self, layer: int) -> torch.Tensor:
        """[rows, blocks], the layer's key page of each block; its value page follows."""
        return self.metadata.sliding_block_tables[layer, 0].long()

    def _write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keys and values into the window's pages, counted from the layer's first one."""
        manager = self.metadata.kv_cache_manager
        pages = manager.pages_at(self.metadata.swa_buffer_ptrs[layer])
        page = self._table(layer)[self.rows, self.block] - layer * manager.geometry.kv_factor
        for plane, new in enumerate((key, value)):
            pages[page + plane, self.offset] = new.to(pages.dtype)

    def _recent(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values [n, K, G, D] and who sees them [n, Q, K]: the blocks that the windows of all queries touch."""
        pages, table = (
            self.metadata.kv_cache_manager.pages_at(self.metadata.sparse_mla_base_ptrs[1]),
            self._table(layer),
        )
        count, most = self.queries.shape
        width = min(self.blocks, (most + self.window - 2) // self.page + 2)
        first = (self.lens - most - self.window + 1).clamp(min=0) // self.page
        blocks = first[:, None] + torch.arange(width, device=first.device)
        rows = torch.arange(count, device=first.device)
        found = table[rows[:, None], blocks.clamp(max=table.shape[1] - 1)]
        places = (blocks[:, :, None] * self.page + torch.arange(self.page, device=first.device)).flatten(1)
        seen = self.visible(places, rows, self.queries)
        seen &= places[:, None, :] > self.at(self.queries)[:, :, None] - self.window
        return pages[found].flatten(1, 2), pages[found + 1].flatten(1, 2), seen

    def _first(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `_recent`, of the first group, for queries whose window has left it."""
        pages = self.metadata.kv_cache_manager.pages_at(self.metadata.sparse_mla_base_ptrs[1])
        places = torch.arange(RATIO, device=self.lens.device)
        page, offset = self._table(layer)[: len(self.batch), places // self.page], places % self.page
        seen = places <= self.at(self.queries)[:, :, None] - self.window
        return pages[page, offset], pages[page + 1, offset], seen

    def _compress(self, layer: int) -> None:
        """Make the entry of every group that this pass wrote a token of.

        Each token writes its group's entry from what stands in the page, so that tokens of one group write the same. An
        entry of a group that is not whole yet is made too, and not read.
        """
        metadata, manager = self.metadata, self.metadata.kv_cache_manager
        pages = manager.pages_at(metadata.sparse_mla_base_ptrs[1])
        entries = manager.entries_at(metadata.compressed_buffer_ptrs[layer])[0]
        group = self.positions // RATIO * RATIO
        members = group[:, None] + torch.arange(RATIO, device=group.device)
        page, offset = self._table(layer)[self.rows, self.block, None], members % self.page
        planes = [pages[page + plane, offset].float().mean(1) for plane in (0, 1)]
        slots = metadata.compress_block_tables4[self.rows, self.block].long()
        entries[slots, self.offset // RATIO] = torch.stack(planes, dim=1).to(entries.dtype)

    def _distant(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `_recent`, of the compressed entries: a group is seen from where all of it lies before the window."""
        entries = self.metadata.kv_cache_manager.entries_at(self.metadata.sparse_mla_base_ptrs[RATIO])[layer]
        table = self.metadata.compress_block_tables4[: len(self.batch), : self.blocks].long()
        found = entries[table.clamp(min=0)].flatten(1, 2)
        last = torch.arange(found.shape[1], device=found.device) * RATIO + RATIO - 1
        seen = (last <= self.at(self.queries)[:, :, None] - self.window) & (last >= RATIO)  # the first is seen as it is
        return found[:, :, 0], found[:, :, 1], seen
