"""Paged attention in plain torch, reading the very tables that the state machine keeps fresh.

transformers' models call it through their attention interface, so no model code is copied. What a forward needs beside
the metadata is made once, when it begins, in a `Pass`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch.nn import functional

from specfsm.backends.backend import Backend, register
from specfsm.backends.deepseek_v4 import DeepSeekV4
from specfsm.backends.dsa import DSA
from specfsm.backends.flash_mla import FlashMLA
from specfsm.backends.trtllm import Trtllm
from specfsm.decode.cache import PagedKVCache
from specfsm.decode.dsa import DSAMetadata, DSAPass, IndexedKVCache
from specfsm.decode.passes import AttentionMetadata, Pass
from specfsm.decode.sliding import RATIO, SlidingKVCache, SlidingMetadata, SlidingPass
from specfsm.decode.splits import Splits, plan_splits

__all__ = ["ATTENTION", "FLAVOURS", "Flavour", "Pass", "install"]

ATTENTION = "specfsm_paged"
"""Name of the attention, and of its mask, in transformers' interfaces."""


class TrtllmMetadata(AttentionMetadata):
    """Metadata of plain paged attention."""

    kv_cache_block_offsets: torch.Tensor


class FlashMLAMetadata(AttentionMetadata):
    """Metadata of FlashMLA."""

    kv_block_ids_per_seq: torch.Tensor
    block_ids_per_seq: torch.Tensor
    flash_mla_tile_scheduler_metadata: Any  # None until the first layer makes the schedule
    flash_mla_num_splits: Any


class TrtllmPass(Pass):
    """Grouped-query attention over K and V pages, found through ``kv_cache_block_offsets``."""

    metadata: TrtllmMetadata

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        manager = self.metadata.kv_cache_manager
        pages = manager.pages()
        table = self.metadata.kv_cache_block_offsets[0].long() + layer * manager.geometry.kv_factor
        for plane, new in enumerate((key, value)):
            pages[table[self.rows, plane, self.block], self.offset] = new.to(pages.dtype)
        count, width = self.queries.shape[0], self.blocks
        keys, values = (pages[table[:count, plane, :width]].flatten(1, 2).to(query.dtype) for plane in (0, 1))
        places = torch.arange(keys.shape[1], device=query.device).expand(count, -1)
        mask = self.visible(places, torch.arange(count, device=query.device), self.queries)
        heads = functional.scaled_dot_product_attention(
            self.spread(query).transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask[:, None],
            scale=scale,
            enable_gqa=True,
        )
        out = torch.zeros_like(query)
        self.pack(heads.transpose(1, 2), out, slice(0, count))
        return out


LATENT, ROPE = 512, 64


def latent_rows(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Grouped-query keys and values as FlashMLA's 576-wide rows: [T, G, D] twice → [T, 576].

    A row holds the keys of all KV heads, then their values, zero-padded to 512, then 64 zeros where RoPE would be: keys
    have it already. Attention over such rows is exact, see `latent_queries`.
    """
    row = torch.cat((key.flatten(1), value.flatten(1)), dim=1)
    return functional.pad(row, (0, LATENT + ROPE - row.shape[1]))


def latent_page(heads: int, dim: int) -> tuple[int, int]:
    """(heads, width) of one token of a model with `heads` KV heads of width `dim`."""
    needed = 2 * heads * dim
    if needed > LATENT:
        raise ValueError(
            f"{heads} KV heads of {dim} need {needed} elements of FlashMLA's {LATENT}: use --backend trtllm"
        )
    return 1, LATENT + ROPE


def latent_queries(query: torch.Tensor, groups: int) -> torch.Tensor:
    """Each head's query in the key slots of its own group, zero elsewhere: [T, H, D] → [T, H, 576].

    Its product with a latent row is then its product with its group's key, and nothing else.
    """
    tokens, heads, dim = query.shape
    wide = query.new_zeros(tokens, heads, LATENT + ROPE)
    columns = (torch.arange(heads, device=query.device) // (heads // groups) * dim)[:, None]
    index = columns + torch.arange(dim, device=query.device)
    return wide.scatter_(2, index.expand(tokens, -1, -1), query)


def latent_outputs(out: torch.Tensor, groups: int, dim: int) -> torch.Tensor:
    """Each head's output out of its group's value slots: [T, H, 512] → [T, H, dim]."""
    tokens, heads, _ = out.shape
    columns = (groups * dim + torch.arange(heads, device=out.device) // (heads // groups) * dim)[:, None]
    index = columns + torch.arange(dim, device=out.device)
    return out.gather(2, index.expand(tokens, -1, -1))


class FlashMLAPass(Pass):
    """Latent attention over 576-wide rows, split over the KV length as FlashMLA's schedule says."""

    metadata: FlashMLAMetadata
    splits: Splits | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        metadata, groups, dim = self.metadata, key.shape[1], key.shape[2]
        pages = metadata.kv_cache_manager.pool[:, layer, 0, :, 0]  # [slots, tokens a block, 576]
        pages[metadata.kv_block_ids_per_seq[self.rows, self.block].long(), self.offset] = latent_rows(key, value).to(
            pages.dtype
        )
        wide, out = latent_queries(query, groups), query.new_zeros(*query.shape[:2], LATENT)
        contexts, count = int(metadata.num_contexts), self.queries.shape[0]
        if contexts:
            self._whole(pages, wide, out, contexts, scale)
        if count > contexts:
            self._split(pages, wide, out, slice(contexts, count), scale)
        return latent_outputs(out, groups, dim)

    def _whole(self, pages: torch.Tensor, wide: torch.Tensor, out: torch.Tensor, contexts: int, scale: float) -> None:
        """Context rows: every query over its whole request."""
        rows = torch.arange(contexts, device=wide.device)
        table = self.metadata.kv_block_ids_per_seq[:contexts, : self.blocks].long()
        partial, _ = self._pieces(pages, wide, table, rows, torch.zeros_like(rows), self.lens[:contexts], scale)
        self.pack(partial, out, slice(0, contexts))

    def _split(self, pages: torch.Tensor, wide: torch.Tensor, out: torch.Tensor, rows: slice, scale: float) -> None:
        """Generation rows: the schedule's pieces, joined by their log-sum-exps."""
        splits = self._schedule(rows)
        columns = splits.begin[:, None] + torch.arange(splits.width, device=wide.device)
        table = self.metadata.block_ids_per_seq
        ids = table[splits.request[:, None], columns.clamp(max=table.shape[1] - 1)].long()
        request = splits.request + rows.start
        partial, lse = self._pieces(pages, wide, ids, request, splits.begin * self.page, splits.end * self.page, scale)
        self.pack(splits.join(partial, lse, rows.stop - rows.start), out, rows)

    def _schedule(self, rows: slice) -> Splits:
        """The plan that the metadata carries, made by the first layer that finds none."""
        names = ("flash_mla_tile_scheduler_metadata", "flash_mla_num_splits")
        if self.splits is None:
            for name, made in zip(names, plan_splits(self.lens[rows], self.page), strict=True):
                if getattr(self.metadata, name) is None:  # each on its own, so that one kept too long is read
                    self.publish(name, made)
            tiles, num_splits = (getattr(self.metadata, name) for name in names)
            self.splits = Splits.read(tiles, num_splits, self.blocks)
        return self.splits

    def _pieces(
        self,
        pages: torch.Tensor,
        wide: torch.Tensor,
        ids: torch.Tensor,
        rows: torch.Tensor,
        begin: torch.Tensor,
        end: torch.Tensor,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial attention of m pieces.

        Args:
            ids: [m, blocks], slots of each piece.
            rows: [m], the request of each piece.
            begin, end: [m], first token and end of the piece in its request.

        Returns:
            output [m, Q, H, 512] and log-sum-exp [m, Q, H]; a piece that a query cannot see has -inf.
        """
        keys = pages[ids].flatten(1, 2).to(wide.dtype)
        places = begin[:, None] + torch.arange(keys.shape[1], device=keys.device)
        queries = self.queries[rows]
        mask = self.visible(places, rows, queries) & (places < end[:, None])[:, None]
        spread = wide[queries.clamp(min=0)]
        scores = torch.einsum("mqhd,mkd->mqhk", spread, keys) * scale
        scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
        return torch.einsum("mqhk,mkd->mqhd", weights, keys[..., :LATENT]), lse


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    forward_pass: Pass,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: query [1, H, T, D], key and value [1, G, T, D] → ([1, T, H, D], no weights)."""
    queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
    layer: Any = module.layer_idx
    return forward_pass.attend(forward_pass.first_layer + layer, queries, keys, values, scaling)[None], None


def no_mask(*_: Any, **__: Any) -> None:
    """A packed batch has no mask: who sees what follows from the lengths."""


def install() -> None:
    """Enter the attention and its mask in transformers' interfaces."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, paged_attention)
    AttentionMaskInterface.register(ATTENTION, no_mask)


@frozen
class Flavour:
    """How the decode loop runs one backend.

    Args:
        backend, metadata, forward_pass: the declaration, what it binds to, and what reads it.
        tokens_per_block: page size.
        planes: 2 where keys and values have pages of their own, 1 where one row holds both.
        page: (KV heads, KV head dim of the model) → (heads, width) of one token in a page.
        caches: makers of the target's and of the draft's cache.
    """

    backend: Callable[[], Backend]
    metadata: type[AttentionMetadata]
    forward_pass: type[Pass]
    tokens_per_block: int
    planes: int
    page: Callable[[int, int], tuple[int, int]]
    caches: tuple[Callable[..., PagedKVCache], Callable[..., PagedKVCache]] = (PagedKVCache, PagedKVCache)


def token_page(heads: int, dim: int) -> tuple[int, int]:
    """Keys and values as the model makes them."""
    return heads, dim


FLAVOURS = {
    "trtllm": Flavour(Trtllm, TrtllmMetadata, TrtllmPass, 16, 2, token_page),
    "flash_mla": Flavour(FlashMLA, FlashMLAMetadata, FlashMLAPass, 64, 1, latent_page),
    "dsa": Flavour(DSA, DSAMetadata, DSAPass, 64, 2, token_page, (IndexedKVCache, IndexedKVCache)),
    "deepseek_v4": Flavour(
        partial(DeepSeekV4, compress_ratios=(RATIO,)),
        SlidingMetadata,
        SlidingPass,
        128,
        2,
        token_page,
        (partial(SlidingKVCache, compressed=True), SlidingKVCache),
    ),
}
"""Backend name → how the loop runs it."""

for _flavour in FLAVOURS.values():
    register(_flavour.metadata, _flavour.backend)
