"""The reference decode loop: continuous batching, speculative, with a draft KV cache of its own.

One step: the target verifies 1 + L tokens of every request in one forward; then the draft, in its own cache, catches
up with the accepted tokens and proposes L new ones. Every table that either reads is kept by the state machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import torch
from attrs import define, evolve, field, frozen

from specfsm.backends.backend import Sizes
from specfsm.decode.attention import FLAVOURS, Pass
from specfsm.decode.cache import PagedKVCache, PoolExhausted
from specfsm.decode.model import Draft, Model
from specfsm.decode.verify import accept_greedy
from specfsm.domain import Batch, Domain, Geometry, RowOrder, UnifiedCache
from specfsm.orchestrator import Orchestrator

__all__ = ["DecodeLoop", "Emission", "Request", "Settings"]


@frozen(kw_only=True)
class Settings:
    """How a loop is run.

    Args:
        backend: name of an attention backend, see `specfsm.decode.attention.FLAVOURS`.
        draft_len: L, tokens that the draft proposes a step.
        max_requests: rows of a batch.
        max_tokens: longest request, prompt and output together.
        blocks, draft_blocks: pages of each pool; by default enough for every row at its longest.
        row_order: how the managers order their rows.
        host_blocks: pages of each cache's host pool.
        tokens_per_block, draft_tokens_per_block: page sizes; by default the backend's own.
    """

    backend: str = "trtllm"
    draft_len: int = 3
    max_requests: int = 4
    max_tokens: int = 2048
    blocks: int | None = None
    draft_blocks: int | None = None
    row_order: RowOrder = RowOrder.BATCH
    host_blocks: int = 8
    tokens_per_block: int | None = None
    draft_tokens_per_block: int | None = None
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def window(self) -> int:
        """Tokens that one step may write past the last known one."""
        return self.draft_len + 1


@define
class Request:
    """One request.

    Args:
        tokens: prompt and output so far.
        target_rows, draft_rows: how many rows of each cache are made from `tokens` and stay valid.
        drafted: what the target verifies next.
        states: the target's states that the draft has not seen yet, [rows, width].
    """

    id: int
    tokens: list[int]
    prompt_len: int
    max_new_tokens: int
    target_rows: int = 0
    draft_rows: int = 0
    drafted: list[int] = field(factory=list)
    states: torch.Tensor | None = None

    @property
    def remaining(self) -> int:
        return self.max_new_tokens - (len(self.tokens) - self.prompt_len)


@frozen
class Emission:
    """What one step wrote for one request.

    Args:
        tokens: in order; the first `accepted` of them were drafted.
        proposed: tokens that the draft had proposed.
        finished: nothing follows.
    """

    request: int
    tokens: tuple[int, ...]
    accepted: int
    proposed: int
    finished: bool


class DecodeLoop:
    """Decodes requests greedily.

    Args:
        target: the model that decides.
        draft: what proposes; None decodes with the target alone.
        settings: sizes and backend.
        stop: token ids that end a request.
        machine: further arguments of the `Orchestrator` (check, drop, trace, contracts, …).
    """

    def __init__(
        self,
        target: Model,
        draft: Draft | None,
        settings: Settings,
        stop: Iterable[int] = (),
        **machine: Any,
    ) -> None:
        if settings.backend not in FLAVOURS:
            raise ValueError(f"unknown backend {settings.backend!r}: it is one of {', '.join(FLAVOURS)}")
        self.target, self.draft = target, draft
        self.settings = settings if draft is not None else evolve(settings, draft_len=0)
        self.stop = frozenset(stop)
        self.flavour = FLAVOURS[settings.backend]
        self.cache = self._cache(target.layers, settings.tokens_per_block, settings.blocks)
        self.draft_cache = (
            None if draft is None else self._cache(draft.layers, settings.draft_tokens_per_block, settings.draft_blocks)
        )
        self.metadata = self.flavour.metadata()
        self.fsm = self._machine(machine)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._ids = count(1)
        self.forwards = 0

    def _cache(self, layers: int, tokens_per_block: int | None, blocks: int | None) -> PagedKVCache:
        settings, flavour, config = self.settings, self.flavour, self.target.config
        page = tokens_per_block or flavour.tokens_per_block
        width = -(-(settings.max_tokens + settings.window) // page)
        heads, dim = flavour.page(config.num_key_value_heads, config.hidden_size // config.num_attention_heads)
        geometry = Geometry(
            tokens_per_block=page,
            blocks_in_primary_pool=blocks or width * settings.max_requests,
            max_blocks_per_seq=width,
            num_layers=layers,
            kv_factor=flavour.planes,
            num_kv_heads=heads,
            head_dim=dim,
            index_scale=layers * flavour.planes if settings.row_order is RowOrder.BATCH else 1,
            row_order=settings.row_order,
            dtype=settings.dtype,
        )
        return PagedKVCache(
            geometry, max_requests=settings.max_requests, host_blocks=settings.host_blocks, device=settings.device
        )

    def _machine(self, arguments: dict[str, Any]) -> Orchestrator:
        settings, backend = self.settings, self.flavour.backend()
        sizes = Sizes(
            max_sequences=settings.max_requests,
            max_tokens=max(settings.max_tokens, settings.max_requests * settings.window),
            max_draft_len=settings.draft_len,
        )
        backend.allocate(self.metadata, self.cache, self.draft_cache, sizes, settings.device)
        draft = self.draft_cache or UnifiedCache("the target decodes alone: there is no draft")
        return Orchestrator(self.metadata, backend=backend, target=self.cache, draft=draft, **arguments)

    @property
    def caches(self) -> tuple[PagedKVCache, ...]:
        return (self.cache,) if self.draft_cache is None else (self.cache, self.draft_cache)

    # Requests.

    def submit(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        """Queue a request.

        Raises:
            ValueError: the prompt is empty, or the request could never fit a cache.
        """
        if not prompt:
            raise ValueError("the prompt is empty: there is nothing to continue")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        request = Request(next(self._ids), list(prompt), len(prompt), max_new_tokens)
        for cache, name in zip(self.caches, ("target", "draft"), strict=False):
            g = cache.geometry
            limit = min(g.max_tokens_per_seq, g.blocks_in_primary_pool * g.tokens_per_block) - self.settings.window
            if len(prompt) + max_new_tokens > limit:
                raise ValueError(
                    f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones do not fit the {name}'s cache, "
                    f"which holds {limit} tokens of a request beside the draft window"
                )
        self.waiting.append(request)
        return request.id

    def abort(self, request: int) -> None:
        """End a request between steps and give its pages back."""
        for queue in (self.waiting, self.running):
            for each in queue:
                if each.id == request:
                    queue.remove(each)
                    if queue is self.running:
                        self._release(each)
                    return
        raise KeyError(f"no request {request} is waiting or running")

    def _admit(self) -> None:
        """Take waiting requests in while both pools can hold every running one at its longest."""
        while self.waiting and len(self.running) < self.settings.max_requests:
            request = self.waiting[0]
            if not all(self._fits(cache, request) for cache in self.caches):
                return
            for cache in self.caches:
                cache.add(request.id)
            self.running.append(self.waiting.pop(0))

    def _fits(self, cache: PagedKVCache, request: Request) -> bool:
        """Whether the pool holds this request and every running one at its longest."""
        beside = self.settings.window
        longest = [each.prompt_len + each.max_new_tokens + beside for each in (*self.running, request)]
        return sum(map(cache.geometry.blocks, longest)) <= cache.geometry.blocks_in_primary_pool

    def _release(self, request: Request) -> None:
        for cache in self.caches:
            cache.free(request.id)

    # One step.

    def run(self, each: Callable[[Emission], None] | None = None) -> dict[int, list[int]]:
        """Decode until nothing is left; the output tokens of every request.

        Args:
            each: is told what every step wrote.
        """
        outputs: dict[int, list[int]] = {}
        while self.waiting or self.running:
            for emission in self.step():
                outputs.setdefault(emission.request, []).extend(emission.tokens)
                if each is not None:
                    each(emission)
        self.fsm.finish()
        return outputs

    @torch.no_grad()
    def step(self) -> list[Emission]:
        """One target forward over every running request, then the draft's window."""
        self._admit()
        if not self.running:
            if self.waiting:
                raise PoolExhausted("a waiting request fits neither beside the running ones nor alone")
            return []
        emissions = self._verify()
        if self.draft is not None:
            self._propose([request for request in self.running if request.remaining > 1])
        return emissions

    def _verify(self) -> list[Emission]:
        rows = sorted(self.running, key=lambda request: request.target_rows > 0)
        for request in rows:
            self.cache.reserve(request.id, len(request.tokens) + self.settings.window)
        inputs = {request.id: request.tokens[request.target_rows :] + request.drafted for request in rows}
        batch = _batch(rows, {r.id: r.target_rows for r in rows}, {i: len(each) for i, each in inputs.items()})
        self.fsm.target_prepare(batch)
        states = self.target(self._tensor(inputs.values()), None, self._pass(batch))
        self.forwards += 1
        emissions = []
        for request, own in zip(rows, torch.split(states, list(batch.tokens)), strict=True):
            logits = self.target.logits(own[-1 - len(request.drafted) :])
            emissions.append(self._accept(request, own, logits))
        return emissions

    def _accept(self, request: Request, states: torch.Tensor, logits: torch.Tensor) -> Emission:
        """Keep what the target agrees with. Rejected rows stay in the cache, past its length, and are overwritten."""
        accepted, own = accept_greedy(request.drafted, logits)
        proposed, written = len(request.drafted), [*request.drafted[:accepted], own]
        written = written[: request.remaining]
        for place, token in enumerate(written):
            if token in self.stop:
                written = written[: place + 1]
                break
        request.states = states[: states.shape[0] - proposed + accepted]
        request.target_rows = len(request.tokens) + accepted
        request.tokens += written
        request.drafted = []
        finished = request.remaining == 0 or written[-1] in self.stop
        if finished:
            self.running.remove(request)
            self._release(request)
        return Emission(request.id, tuple(written), min(accepted, len(written)), proposed, finished)

    def _propose(self, rows: list[Request]) -> None:
        """The draft's window: it catches up with the accepted tokens, then writes one token a step."""
        assert self.draft is not None
        assert self.draft_cache is not None
        if not rows:
            return
        rows = sorted(rows, key=lambda request: request.draft_rows > 0)
        shift = self.draft.shift
        for request in rows:
            self.draft_cache.reserve(request.id, len(request.tokens) + self.settings.window)
        inputs = {request.id: request.tokens[request.draft_rows + shift :] for request in rows}
        batch = _batch(rows, {r.id: r.draft_rows for r in rows}, {i: len(each) for i, each in inputs.items()})
        tokens, states = self._tensor(inputs.values()), _joined(rows) if shift else None
        by_id = {request.id: request for request in rows}
        steps = max(min(self.settings.draft_len, request.remaining - 1) for request in rows)
        with self.fsm.draft_forward(batch):
            for step in range(steps):
                states = self.draft(tokens, states, self._pass(batch))[_last(batch, tokens.device)]
                tokens = self.draft.logits(states).argmax(-1)
                for row, token in zip(batch.request_ids, tokens.tolist(), strict=True):
                    by_id[row].drafted.append(token)
                if step + 1 < steps:
                    batch, order = self._advance(batch)
                    tokens, states = tokens[order], states[order]
        for request in rows:
            request.draft_rows = len(request.tokens) - shift
            request.drafted = request.drafted[: request.remaining - 1]

    def _advance(self, batch: Batch) -> tuple[Batch, list[int]]:
        """The next draft step's batch, and where each of its rows stood before."""
        self.fsm.draft_step()
        now = self.fsm.batch(Domain.DRAFT)
        assert now is not None
        return now, [batch.request_ids.index(request) for request in now.request_ids]

    def _pass(self, batch: Batch) -> Pass:
        return self.flavour.forward_pass(self.metadata, batch, self.fsm.publish)

    def _tensor(self, tokens: Iterable[list[int]]) -> torch.Tensor:
        packed = [token for each in tokens for token in each]
        return torch.tensor(packed, dtype=torch.long, device=self.settings.device)


def _batch(rows: Sequence[Request], before: dict[int, int], new: dict[int, int]) -> Batch:
    """The batch of these rows: what each cache holds of a request before the phase, and how much is new."""
    return Batch(
        request_ids=[request.id for request in rows],
        kv_lens=[before[request.id] + new[request.id] for request in rows],
        tokens=[new[request.id] for request in rows],
        num_contexts=sum(before[request.id] == 0 for request in rows),
    )


def _last(batch: Batch, device: torch.device) -> torch.Tensor:
    """Index of each request's last token in the packed batch."""
    return torch.tensor(batch.tokens, device=device).cumsum(0) - 1


def _joined(rows: Sequence[Request]) -> torch.Tensor:
    return torch.cat([request.states for request in rows if request.states is not None])
