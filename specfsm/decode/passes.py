"""What a forward needs beside the metadata, whatever the backend: made when it begins, gone when it ends.

A batch is *packed*: the tokens of all requests follow each other in one sequence. Everything here is derived from what
the metadata carries when the forward begins, so a length that is stale is *read* stale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specfsm.domain import Batch

__all__ = ["AttentionMetadata", "Pass", "Publish"]

Publish = Callable[[str, Any], None]


class AttentionMetadata:
    """What the attention of one backend reads. Every attribute is put there by the backend's declaration."""

    kv_cache_manager: Any
    kv_lens_cuda_runtime: torch.Tensor
    _seq_lens_cuda_runtime: torch.Tensor
    num_contexts: int
    tokens_per_block: int


class Pass:
    """One forward over a packed batch of T tokens of n requests. Nothing in it makes the host wait for the device.

    Args:
        metadata: as the last transition left it.
        batch: its sizes; what a token reads comes from the metadata alone.
        publish: reports a lazily made plan to the machine.
        limit: longest KV length to provide for; by default the batch's. A captured pass states what it is captured for.
        first_layer: where in the cache the model's first layer lies: a draft in the target's cache comes after it.

    Attributes:
        rows: [T], the request of each token.
        positions: [T], each token's position in its request.
        place: [T], each token's query place: Q places a request, its last token rightmost.
        queries: [n, Q], the token at each query place; -1 where there is none.
    """

    def __init__(
        self, metadata: Any, batch: Batch, publish: Publish, limit: int | None = None, *, first_layer: int = 0
    ) -> None:
        self.metadata = metadata
        self.batch = batch
        self.publish = publish
        self.first_layer = first_layer
        self.page = int(metadata.tokens_per_block)
        self.blocks = -(-(limit or max(batch.kv_lens)) // self.page)
        self.lens: torch.Tensor = metadata.kv_lens_cuda_runtime.long()
        new: torch.Tensor = metadata._seq_lens_cuda_runtime.long()
        arange = torch.arange(batch.num_tokens, device=new.device)
        self.rows = torch.repeat_interleave(arange[: len(batch)], new, output_size=batch.num_tokens)
        back = new.cumsum(0)[self.rows] - arange  # 1 for a request's last token
        self.positions: torch.Tensor = self.lens[self.rows] - back
        self.place = max(batch.tokens) - back
        self.queries = arange.new_full((len(batch), max(batch.tokens)), -1)
        self.queries[self.rows, self.place] = arange

    @property
    def block(self) -> torch.Tensor:
        """[T], which of its request's blocks each token lies in."""
        return self.positions // self.page

    @property
    def offset(self) -> torch.Tensor:
        """[T], each token's place in its block."""
        return self.positions % self.page

    def tokens_of(self, rows: slice) -> slice:
        """Where the tokens of these requests stand in the packed batch."""
        return slice(sum(self.batch.tokens[: rows.start]), sum(self.batch.tokens[: rows.stop]))

    def spread(self, packed: torch.Tensor) -> torch.Tensor:
        """[T, …] → [n, Q, …], by query place; padding reads token 0 and is masked."""
        return packed[self.queries.clamp(min=0)]

    def pack(self, spread: torch.Tensor, packed: torch.Tensor, rows: slice) -> None:
        """Write these requests' [rows, Q, …] back to [T, …], padding left out."""
        tokens = self.tokens_of(rows)
        packed[tokens] = spread[self.rows[tokens] - rows.start, self.place[tokens]].to(packed.dtype)

    def visible(self, keys: torch.Tensor, rows: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Which key positions each query may see.

        Args:
            keys: [m, K], positions of the keys of each gathered row.
            rows: [m], the request of each gathered row.
            queries: [m, Q], tokens, -1 for padding.

        Returns:
            bool [m, Q, K]: causal, and within the request's length.
        """
        inside = keys < self.lens[rows, None]
        return (keys[:, None, :] <= self.at(queries)[:, :, None]) & inside[:, None, :]

    def at(self, queries: torch.Tensor) -> torch.Tensor:
        """[m, Q], the position of each query; 0 for padding."""
        return torch.where(queries >= 0, self.positions[queries.clamp(min=0)], 0)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Write the tokens' keys and values, then attend: query [T, H, D], key and value [T, G, D] → [T, H, D]."""
        raise NotImplementedError
