"""The smallest engine that a case needs: two paged caches of different shape, metadata, and an orchestrator over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specfsm import Backend, Batch, Domain, Geometry, KVManager, Orchestrator, Sizes, Table, UnifiedCache
from specfsm.domain import NOBODY

__all__ = ["DRAFT", "TARGET", "Engine", "Pages", "keep", "lengths"]

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT
SIZES = Sizes(max_sequences=4, max_tokens=16, max_draft_len=3)


def keep(_: Any, buffer: torch.Tensor) -> torch.Tensor:
    """A refresh of contents that the scenario is not about."""
    return buffer


def lengths(name: str = "kv_lens") -> Table:
    """KV lengths of the rows, by whatever name the engine has for them."""
    return Table(name, reads=("batch", "lengths"), dtype="int32", shape=("S",), sentinel=0, refresh=keep)


class Pages:
    """A KV manager whose rows follow the batch. Slots are handed out in order."""

    def __init__(self, page: int, width: int, heads: int, blocks: int = 32) -> None:
        self.geometry = Geometry(
            tokens_per_block=page,
            blocks_in_primary_pool=blocks,
            max_blocks_per_seq=width,
            num_layers=2,
            kv_factor=1,
            num_kv_heads=heads,
        )
        self.generation = self.blocks_version = 1
        self.host_block_offsets = torch.full((1, SIZES.max_sequences, 1, width), -1, dtype=torch.int32)
        self.pool_pointers = (0x1000 * page,)
        self.slots: dict[int, list[int]] = {}
        self.free = list(range(blocks))

    def reserve(self, request: int, tokens: int) -> None:
        """Pages for so many tokens; what the request holds already stays."""
        held = self.slots.setdefault(request, [])
        while len(held) < self.geometry.blocks(tokens):
            held.append(self.free.pop(0))
            self.blocks_version += 1

    def capacity(self, request: int) -> int:
        """Tokens that fit the request's pages."""
        return len(self.slots[request]) * self.geometry.tokens_per_block

    def page_owners(self, pool: str) -> torch.Tensor:
        owners = torch.full((self.geometry.blocks_in_primary_pool,), NOBODY, dtype=torch.int64)
        for request, held in self.slots.items():
            owners[held] = request
        return owners

    def release(self, request: int) -> None:
        self.free += self.slots.pop(request)
        self.blocks_version += 1

    def arrange(self, request_ids: Sequence[int]) -> Sequence[int]:
        self.host_block_offsets.fill_(-1)
        for row, request in enumerate(request_ids):
            held = torch.tensor(self.slots[request], dtype=torch.int32)
            self.host_block_offsets[0, row, 0, : len(held)] = held
        return range(len(request_ids))


class Engine:
    """Requests 7 and 9 with 8 tokens each in both caches.

    Args:
        backend: what the metadata holds.
        draft: the draft's manager, or a `UnifiedCache`.
        width: blocks a sequence, in both caches.
        metadata: carries the buffers already; by default they are allocated.
        options: for the `Orchestrator`.
    """

    REQUESTS = (7, 9)

    def __init__(
        self,
        backend: Backend,
        *,
        draft: KVManager | UnifiedCache | None = None,
        width: int = 8,
        metadata: Any = None,
        **options: Any,
    ) -> None:
        self.target, self.draft = Pages(page=4, width=width, heads=8), Pages(page=4, width=width, heads=2)
        self.target.reserve(0, 4)  # so that the two caches give a request different pages
        for manager in (self.target, self.draft):
            for request in self.REQUESTS:
                manager.reserve(request, 8)
        self.metadata = type("Metadata", (), {})() if metadata is None else metadata
        if metadata is None:
            backend.allocate(self.metadata, self.target, self.draft, SIZES, "cpu")
        self.fsm = Orchestrator(
            self.metadata,
            backend=backend,
            target=self.target,
            draft=draft or self.draft,
            **{"check": "stamps", **options},
        )

    def batch(self, length: int = 8, tokens: int = 4, contexts: int = 0) -> Batch:
        """Both requests, `tokens` of `length` tokens each in this phase."""
        return Batch(self.REQUESTS, kv_lens=(length,) * 2, tokens=(tokens,) * 2, num_contexts=contexts)

    def write(self, batch: Batch, domain: Domain, *names: str) -> None:
        """Refresh these by hand for `batch`, as an engine with refreshes of its own does, and report each."""
        self.fsm.announce(batch, domain)
        for name in names:
            self.fsm.publish(name, self.fsm.value(name, domain), domain)
