"""DSA in plain torch: an indexer with FP8 keys of its own scores the tokens, and the attention reads the best of them.

A trained indexer has projections of its own. Here its key is the keys of the first KV heads, as many as fit 128
elements, and its query the mean of the queries of each of their groups: its score is the mean logit of those heads. So
any grouped-query model runs, and what it leaves out is what its own attention weighs least.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from specfsm.backends.dsa import DATA_BYTES, SCALE_BYTES
from specfsm.decode.cache import PagedKVCache
from specfsm.decode.passes import AttentionMetadata, Pass
from specfsm.decode.splits import WORKERS, plan_splits
from specfsm.domain import Geometry

__all__ = ["DSAMetadata", "DSAPass", "IndexedKVCache", "index_keys", "index_queries", "quantise", "schedule"]

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


class DSAMetadata(AttentionMetadata):
    """Metadata of DSA."""

    kv_cache_block_offsets: torch.Tensor
    indexer_k_cache_block_offsets: torch.Tensor
    block_table: torch.Tensor
    block_table_expanded: torch.Tensor
    req_idx_per_token: torch.Tensor
    slot_mapping_fp8: torch.Tensor
    slot_mapping_scale: torch.Tensor
    slot_mapping_fp8_fullkv: torch.Tensor
    slot_mapping_scale_fullkv: torch.Tensor
    scheduler_metadata_buffer: Any  # None until the first layer makes the schedule
    scheduler_metadata_buffer_expanded: Any
    pool_view: dict[str, torch.Tensor]
    pool_remap: dict[int, tuple[int, int, int]]


class IndexedKVCache(PagedKVCache):
    """A paged cache whose pages have indexer keys too: in each, the data rows of all its tokens, then their scales."""

    def __init__(self, geometry: Geometry, **options: Any) -> None:
        page = geometry.tokens_per_block * (DATA_BYTES + SCALE_BYTES)
        super().__init__(geometry, extra={"indexer": page}, **options)


def index_keys(key: torch.Tensor) -> torch.Tensor:
    """Keys [T, G, D] → indexer keys [T, 128]: the first heads that fit, side by side, then zeros."""
    whole = key[:, : max(1, DATA_BYTES // key.shape[2])].flatten(1)[:, :DATA_BYTES].float()
    return functional.pad(whole, (0, DATA_BYTES - whole.shape[1]))


def index_queries(query: torch.Tensor, groups: int) -> torch.Tensor:
    """Queries [T, H, D] → indexer queries [T, 128]: each group's mean, where `index_keys` has the group's key."""
    return index_keys(query.float().view(query.shape[0], groups, -1, query.shape[2]).mean(2))


def quantise(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [T, 128] → the bytes of their FP8 data [T, 128] and of their float32 scales [T, 4]."""
    scales = keys.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny * LARGEST) / LARGEST
    return (keys / scales).to(FP8).view(torch.uint8), scales.view(torch.uint8)


def schedule(lens: torch.Tensor, page: int) -> torch.Tensor:
    """Which blocks each worker scores: i32 [rows x workers + 1, 2], first block and end; last, rows and workers.

    Args:
        lens: int [rows], how many keys each row has.
    """
    tiles, _ = plan_splits(lens, page)
    closing = tiles.new_full((1, 2), WORKERS)  # not a tensor of host values: a captured pass cannot wait for their copy
    closing[:, 0].fill_(lens.shape[0])
    return torch.cat((tiles[:, 1:4:2], closing))


class DSAPass(Pass):
    """Attention over the `top_k` tokens that the indexer scores highest, grouped-query and exact among them."""

    metadata: DSAMetadata
    top_k = 64

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self._write(layer, key, value)
        self._index(layer, key)
        scores = self._scores(layer, index_queries(query, key.shape[1]))
        best = scores.topk(min(self.top_k, scores.shape[1]), dim=1)
        return self._read(layer, query, best.indices, best.values > float("-inf"), scale)

    def _cached(self, name: str, make: Callable[[], dict[Any, Any]]) -> Any:
        """A cache keyed by the manager: filled by the first layer that finds it empty, and reported."""
        if not getattr(self.metadata, name):
            self.publish(name, make())
        return getattr(self.metadata, name)

    @property
    def _pools(self) -> dict[str, torch.Tensor]:
        """Rows of the KV pool, [slots x layers x planes x tokens a block, G, D], and the indexer's bytes, by layer."""
        manager = self.metadata.kv_cache_manager
        view: dict[str, torch.Tensor] = self._cached(
            "pool_view", lambda: {"kv": manager.pool.flatten(0, 3), "indexer": manager.extra["indexer"].flatten(1)}
        )
        return view

    def _row(self, layer: int, slots: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The key's row of the KV pool, and how far behind it the value's row is."""
        layers, planes = self.metadata.kv_cache_manager.geometry.num_layers, 2
        remap = self._cached(
            "pool_remap",
            lambda: {
                each: (layers * planes * self.page, each * planes * self.page, self.page) for each in range(layers)
            },
        )
        a_slot, first, behind = remap[layer]
        return slots * a_slot + first + positions % self.page, behind

    def _write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keys and values into their pages, through the table of both planes."""
        manager = self.metadata.kv_cache_manager
        pages = manager.pages()
        table = self.metadata.kv_cache_block_offsets[0].long() + layer * manager.geometry.kv_factor
        for plane, new in enumerate((key, value)):
            pages[table[self.rows, plane, self.block], self.offset] = new.to(pages.dtype)

    def _index(self, layer: int, key: torch.Tensor) -> None:
        """Indexer keys and scales into their bytes."""
        pool, tokens = self._pools["indexer"][layer], key.shape[0]
        metadata = self.metadata
        mappings = (metadata.slot_mapping_fp8, metadata.slot_mapping_scale)
        for mapping, rows in zip(mappings, quantise(index_keys(key)), strict=True):
            pool[_bytes(mapping[:tokens], rows.shape[1])] = rows

    # What the indexer scores.

    def _scores(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Score of each token's query with each position's key, [T, K]; -inf where it may not look."""
        contexts, width = int(self.metadata.num_contexts), self.blocks * self.page
        scores = queries.new_full((queries.shape[0], width), float("-inf"))
        for row in range(contexts):
            self._score_context(layer, row, queries, scores)
        rest = self.tokens_of(slice(contexts, len(self.batch)))
        if rest.start < rest.stop:
            scores[rest] = self._score_generations(layer, queries[rest], rest, contexts)
        positions = torch.arange(width, device=scores.device)
        return scores.masked_fill(positions > self.positions[:, None], float("-inf"))

    def _score_context(self, layer: int, row: int, queries: torch.Tensor, scores: torch.Tensor) -> None:
        """All of a context's keys are new: they are read back through the mapping of its tokens."""
        if self.batch.kv_lens[row] != self.batch.tokens[row]:
            raise ValueError("a context of which a part is cached is not supported: its mappings hold new tokens only")
        own, pool = self.tokens_of(slice(row, row + 1)), self._pools["indexer"][layer]
        data = pool[_bytes(self.metadata.slot_mapping_fp8_fullkv[own], DATA_BYTES)].view(FP8).float()
        scales = pool[_bytes(self.metadata.slot_mapping_scale_fullkv[own], SCALE_BYTES)].view(torch.float32)
        scores[own, : data.shape[0]] = queries[own] @ (data * scales).T

    def _score_generations(self, layer: int, queries: torch.Tensor, tokens: slice, contexts: int) -> torch.Tensor:
        """Whole blocks of keys, through the indexer's table; through the expanded one for several queries a request."""
        metadata, most = self.metadata, max(self.batch.tokens[contexts:])
        rows = metadata.req_idx_per_token[tokens].long()
        if most == 1:
            table, line = metadata.indexer_k_cache_block_offsets[rows], rows
            plan = self._planned("scheduler_metadata_buffer", self.lens)
        else:
            place = self.place[tokens] - (max(self.batch.tokens) - most)
            copies = metadata.block_table_expanded.shape[0] // metadata.block_table.shape[0]
            table, line = (
                metadata.block_table_expanded[rows * copies + place.clamp(max=copies - 1)],
                rows * most + place,
            )
            before = torch.arange(most - 1, -1, -1, device=rows.device)
            plan = self._planned(
                "scheduler_metadata_buffer_expanded", (self.lens[:, None] - before).clamp(min=0).flatten()
            )
        pool = self._pools["indexer"][layer].view(-1, self.page * (DATA_BYTES + SCALE_BYTES))
        blocks = pool[table[:, : self.blocks].long().clamp(min=0)]
        data, scales = blocks[..., : self.page * DATA_BYTES], blocks[..., self.page * DATA_BYTES :]
        keys = data.reshape(queries.shape[0], -1, DATA_BYTES).view(FP8).float()
        scores = torch.einsum("td,tkd->tk", queries, keys) * scales.contiguous().view(torch.float32).flatten(1)
        covered = _covered(plan, self.blocks)[line].repeat_interleave(self.page, dim=1)
        scored: torch.Tensor = scores.masked_fill(~covered, float("-inf"))
        return scored

    def _planned(self, name: str, lens: torch.Tensor) -> torch.Tensor:
        """The schedule that the metadata carries, made by the first layer that finds none."""
        if getattr(self.metadata, name) is None:
            self.publish(name, schedule(lens, self.page))
        plan: torch.Tensor = getattr(self.metadata, name)
        return plan

    # What the attention reads.

    def _read(
        self, layer: int, query: torch.Tensor, chosen: torch.Tensor, picked: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of each token to the positions `chosen` for it, [T, k], as far as they are `picked`."""
        requests = self.metadata.req_idx_per_token[: query.shape[0], None].long()
        slots = self.metadata.block_table[requests, chosen // self.page].long()
        rows, behind = self._row(layer, slots, chosen)
        pool = self._pools["kv"]
        keys, values = (pool[each].to(query.dtype).transpose(1, 2) for each in (rows, rows + behind))
        heads = functional.scaled_dot_product_attention(
            query[:, :, None], keys, values, attn_mask=picked[:, None, None], scale=scale, enable_gqa=True
        )
        return heads[:, :, 0]


def _bytes(offsets: torch.Tensor, count: int) -> torch.Tensor:
    """Offsets of the first of `count` bytes, [T] → of all of them, [T, count]."""
    return offsets[:, None] + torch.arange(count, device=offsets.device)


def _covered(plan: torch.Tensor, blocks: int) -> torch.Tensor:
    """Which blocks of each row some worker scores: bool [rows, blocks]."""
    pieces = plan[:-1].view(-1, WORKERS, 2)
    block = torch.arange(blocks, device=plan.device)
    inside = (block >= pieces[:, :, :1]) & (block < pieces[:, :, 1:])
    return inside.any(1)
