"""The reference decode loop: continuous batching, speculative, with a draft KV cache of its own.

One step: the target verifies 1 + L tokens of every request in one forward; then the draft, in its own cache, catches
up with the accepted tokens and proposes L new ones. Every table that either reads is kept by the state machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import evolve

from specfsm.backends.backend import Sizes
from specfsm.contracts.consensus import Consensus
from specfsm.contracts.lifetime import Flight
from specfsm.contracts.padding import Padding
from specfsm.contracts.window import Window
from specfsm.decode.attention import FLAVOURS, Flavour, Pass
from specfsm.decode.cache import PagedKVCache, PoolExhausted
from specfsm.decode.lifecycle import Lifecycle
from specfsm.decode.model import Draft, Model
from specfsm.decode.request import Emission, Request, Settings
from specfsm.decode.step import Step
from specfsm.decode.verify import Sampler
from specfsm.domain import Batch, Domain, Geometry, RowOrder, UnifiedCache
from specfsm.errors import DraftContentInvalid, IllegalTransition, RankDisagreement
from specfsm.orchestrator import Contract, Orchestrator

__all__ = ["DecodeLoop", "Emission", "Request", "Settings"]


class _Pending:
    """A step whose results the host has not read: they are on their way to host memory behind an event."""

    def __init__(self, rows: list[Request], step: Step, flight: Flight) -> None:
        self.rows, self.step, self.flight = rows, step, flight
        self.results = step.results()
        self.event: Any = torch.cuda.Event() if step.known.is_cuda else None  # type: ignore[no-untyped-call]  # torch's
        if self.event is not None:
            self.event.record()

    def read(self) -> tuple[list[list[int]], list[int], list[list[int]]]:
        """Choices, accepted counts and what is known now, after the step has run."""
        if self.event is not None:
            self.event.synchronize()
        self.flight.land()
        choices, accepted, known = (each.tolist() for each in self.results)
        return choices, accepted, known


class DecodeLoop(Lifecycle):
    """Decodes requests.

    Args:
        target: the model that decides.
        draft: what proposes; None decodes with the target alone.
        settings: sizes and backend.
        stop: token ids that end a request.
        sampler: how tokens are chosen; greedily by default.
        consensus: where several ranks run this loop in lockstep: they vote before each phase, recording, replay and
            skip of the draft. Whoever differs is refused on every rank; the next `step` goes on without speculation.
        machine: further arguments of the `Orchestrator` (check, drop, trace, contracts, …).
    """

    def __init__(
        self,
        target: Model,
        draft: Draft | None,
        settings: Settings,
        stop: Iterable[int] = (),
        sampler: Sampler | None = None,
        consensus: Consensus | None = None,
        **machine: Any,
    ) -> None:
        if settings.backend not in FLAVOURS:
            raise ValueError(f"unknown backend {settings.backend!r}: it is one of {', '.join(FLAVOURS)}")
        self.target, self.draft = target, draft
        self.settings = settings if draft is not None else evolve(settings, draft_len=0)
        self.stop = frozenset(stop)
        self.sampler = sampler or Sampler()
        self.flavour = FLAVOURS[settings.backend]
        super().__init__()
        self.consensus = consensus
        self.forward_pass = _forward_pass(settings, self.flavour)
        self.unified = UnifiedCache(settings.unified) if draft is not None and settings.unified is not None else None
        self.cache = self._cache(Domain.TARGET, target, settings.tokens_per_block, settings.blocks)
        self.draft_cache: PagedKVCache | None = None
        if draft is not None and self.unified is None:
            sizes = (settings.draft_tokens_per_block, settings.draft_blocks)
            self.draft_cache = self._cache(Domain.DRAFT, draft, *sizes)
        self.metadata = self.flavour.metadata()
        self.window = Window(self.cache.capacity, self.caches[-1].capacity if draft else None, draft_len=0)
        self.draft_len = self.settings.draft_len
        self.fsm = self._machine(machine)
        self.forwards = self.eager = self.replays = 0
        self.steps: dict[tuple[int, int], Step] = {}
        self.dummies = self._dummies()
        self.pending: _Pending | None = None

    def _cache(self, domain: Domain, model: Draft, tokens_per_block: int | None, blocks: int | None) -> PagedKVCache:
        settings, flavour, layers = self.settings, self.flavour, model.layers
        page = tokens_per_block or flavour.tokens_per_block
        width = -(-self.limit // page)
        heads, dim = _page(flavour, model)
        if self.unified is not None and self.draft is not None:
            layers += self.draft.layers
            if _page(flavour, self.draft) != (heads, dim):
                raise ValueError(
                    f"a unified cache has pages of one kind, but the target's tokens take {heads} x {dim} elements and "
                    f"the draft's {' x '.join(map(str, _page(flavour, self.draft)))}: give the draft its own cache"
                )
        geometry = Geometry(
            tokens_per_block=page,
            blocks_in_primary_pool=(blocks or width * settings.max_requests) + self._dummy_blocks(page),
            max_blocks_per_seq=width,
            num_layers=layers,
            kv_factor=flavour.planes,
            num_kv_heads=heads,
            head_dim=dim,
            index_scale=layers * flavour.planes if settings.row_order is RowOrder.BATCH else 1,
            row_order=settings.row_order,
            dtype=settings.dtype,
        )
        cache = flavour.caches[domain](
            geometry,
            max_requests=2 * settings.max_requests + settings.dummies,  # those that run or leave, and the offloaded
            host_blocks=settings.host_blocks,
            device=settings.device,
        )
        cache.may_free = self.lifetime.require_free
        return cache

    @property
    def limit(self) -> int:
        """Longest KV length of a request, its window included."""
        return self.settings.max_tokens + self.settings.window

    def _dummies(self) -> tuple[int, ...]:
        """Requests that pad a batch: they resolve in both caches and write to pages of their own."""
        dummies = tuple(range(-self.settings.dummies, 0))
        for request in dummies:
            self.lifetime.begin(request)
            self.content.begin(request, self.limit)  # whatever lies there will do
            for cache in self.caches:
                cache.add(request)
                cache.reserve(request, 2 * self.settings.window)
        return dummies

    def _machine(self, arguments: dict[str, Any]) -> Orchestrator:
        settings, backend = self.settings, self.flavour.backend()
        sizes = Sizes(
            max_sequences=settings.max_requests,
            max_tokens=settings.max_requests * self.limit,  # all prefilled at once, or their draft rows made anew
            max_draft_len=settings.draft_len,
        )
        backend.allocate(self.metadata, self.cache, self.draft_cache, sizes, settings.device)
        draft = self.draft_cache or self.unified or UnifiedCache("the target decodes alone: there is no draft")
        contracts = (*self._contracts(), *arguments.pop("contracts", ()))
        if self.consensus is not None:
            contracts = (*contracts, self.consensus)  # last: whoever voted is expected to act
        return Orchestrator(
            self.metadata, backend=backend, target=self.cache, draft=draft, contracts=contracts, **arguments
        )

    def _contracts(self) -> tuple[Contract, ...]:
        """The rules that every event of this loop is held to, before those that it was given."""
        rules = (self.lifetime, Padding(), self.window)
        return rules if self.draft is None else (*rules, self.content)

    @property
    def draft_len(self) -> int:
        """L, tokens that the draft proposes from the next step on; 0 leaves the draft out."""
        return self.window.draft_len

    @draft_len.setter
    def draft_len(self, length: int) -> None:
        if not 0 <= length <= self.settings.draft_len:
            raise ValueError(
                f"the draft length must be 0 to {self.settings.draft_len} (Settings.draft_len), not {length}"
            )
        self.window.draft_len = length
        if self.consensus is not None:
            self.consensus.draft_len = length

    # One step.

    def run(self, each: Callable[[Emission], None] | None = None) -> dict[int, list[int]]:
        """Decode until nothing is left; the output tokens of every request.

        Args:
            each: is told what every step wrote.
        """
        outputs: dict[int, list[int]] = {}
        while self.waiting or self.running or self.pending:
            for emission in self.step():
                outputs.setdefault(emission.request, []).extend(emission.tokens)
                if each is not None:
                    each(emission)
        self.fsm.finish()
        return outputs

    @torch.no_grad()
    def step(self) -> list[Emission]:
        """One target forward over every running request, then the draft's window.

        With overlap, what is returned is what the step before wrote. An engine that catches a refusal calls again: what
        was not drafted is decoded without speculation, and what was written by then is in the next emissions.
        """
        self._admit()
        if not self._continues():
            self._unreported += self._drain()
            self._admit()  # into what those that left held
        if self.running:
            self._advance_all()
        elif self.waiting and not self._unreported:
            raise PoolExhausted("a waiting request fits neither beside the running ones nor alone")
        emissions, self._unreported = self._unreported, []
        return emissions

    @torch.no_grad()
    def idle(self, rows: int = 1) -> None:
        """One step of dummies alone, for a rank that has nothing to do while the others step: it meets them in their
        collectives, and what it writes reaches no page but the dummies'.

        Args:
            rows: of the others' batches; padded to a captured size as theirs are.

        Raises:
            ValueError: there are not so many dummies. `Settings.idles` keeps one for each row of a batch.
        """
        size = self.settings.padded(rows)
        if not 0 < size <= len(self.dummies):
            raise ValueError(f"an idle step of {size} rows needs as many dummies, and there are {len(self.dummies)}")
        self._unreported += self._drain()
        for request in self.running:  # views of a step's buffers, which the dummies may run in now
            request.probs = None if request.probs is None else request.probs.clone()
        self._unreported += self._collect(self._speculate([], size))
        if self.draft is not None and not self.draft_len:
            self._skip()

    def _advance_all(self) -> None:
        if self._static() and self._launch():
            return
        self._unreported += self._verify()
        if self.draft is None:
            return
        if rows := self._drafting():
            with self._or_skip():
                self._propose(rows)
        else:
            self._skip()

    def _static(self) -> bool:
        """Whether every request has a whole draft to verify, and one of them will have use for the next. A graph is
        replayed whether or not: an eager forward takes longer than a draft that nobody needs."""
        whole = all(request.speculates(self.draft_len) for request in self.running)
        if self.draft is None or not whole:
            return whole
        return self.draft_len > 0 and (self.settings.graphs != "off" or not self._in_vain(self.running, 2))

    def _in_vain(self, rows: Iterable[Request], own: int = 1) -> bool:
        """Whether nobody has use for a draft: the target's own next tokens end every request."""
        return all(request.remaining <= own for request in rows)

    def _skip(self) -> None:
        """The draft is left out of this step; the other ranks must leave it out too."""
        if self.consensus is not None:
            self.consensus.skip(self.fsm)

    @contextmanager
    def _or_skip(self) -> Iterator[None]:
        """What this rank refuses by itself, the others learn by its vote: they wait for none that never comes."""
        try:
            yield
        except RankDisagreement:
            raise
        except IllegalTransition:
            self._skip()
            raise

    def _launch(self) -> bool:
        """Start a static step and read the one before. False where the draft's cache lacks rows: they are re-filled by
        a step of its own."""
        try:
            size = self.settings.padded(len(self.running))
            before, self.pending = self.pending, self._speculate(self.running, size)
        except DraftContentInvalid:
            self._unreported += self._drain()
            return not self.running
        self._unreported += self._collect(before)
        if not self.settings.overlap:
            self._unreported += self._drain()
        return True

    def _speculate(self, rows: list[Request], size: int) -> _Pending:
        """A step of generations only, on the device, run with `size` rows: see `specfsm.decode.step`."""
        new, dummies = self.draft_len + 1, self.dummies[: size - len(rows)]
        step = self.steps.get((size, self.draft_len)) or Step(self, size, self.draft_len)
        self.steps[size, self.draft_len] = step
        self._forget(step)
        step.load(rows)
        ahead = new if self.pending is not None else 0
        for request in rows:
            for cache in self.caches:
                cache.reserve(request.id, min(len(request.tokens) + ahead + new + new - 1, self.limit))
        ids = [*(request.id for request in rows), *dummies]
        known = [*(len(request.tokens) + ahead for request in rows), *[1] * (size - len(rows))]
        target = Batch(ids, [min(length - 1 + new, self.limit) for length in known], [new] * size, dummies=dummies)
        draft = None
        if self.draft is not None and self.draft_len:
            lengths = [min(length - self.draft.shift + new, self.limit) for length in known]
            draft = evolve(target, kv_lens=lengths)
        try:
            with self._or_skip():
                step.run(target, draft)
        except BaseException:
            step.holds = None
            for request in rows:
                request.drafted = []
            raise
        self.forwards += 1
        if draft is not None:  # as many as there are if everything is accepted; `_collect` cuts
            ends = dict(zip(draft.request_ids, draft.kv_lens, strict=True))
            self.content.wrote({request.id: ends[request.id] for request in rows})
        return _Pending(list(rows), step, self.lifetime.launch(ids))

    def _forget(self, but: Step | None = None) -> None:
        """The requests move on without these steps: what they hold on the device is of the past."""
        for step in self.steps.values():
            if step is not but:
                step.holds = None

    def _continues(self) -> bool:
        """Whether the step in flight, if any, may be followed by another one unseen."""
        same = self.pending is None or [each.id for each in self.pending.rows] == [each.id for each in self.running]
        return same and self._static()

    def _drain(self) -> list[Emission]:
        """Wait for the step in flight and take what it wrote."""
        pending, self.pending = self.pending, None
        return self._collect(pending)

    def _collect(self, pending: _Pending | None) -> list[Emission]:
        if pending is None:
            return []
        choices, accepted, known = pending.read()
        emissions = []
        rows = {request.id: request for request in pending.rows}
        for row, each in pending.flight.live():
            if each not in rows:
                continue  # a dummy
            request = rows[each]
            request.drafted = known[row][1:]
            request.probs = None if pending.step.probs is None else pending.step.probs[row]
            emissions.append(self._take(request, accepted[row], choices[row][accepted[row]], choices[row][:-1]))
            request.states = None
            if self.pending is None and self.draft is not None and request in self.running:
                self.content.cut(each, len(request.tokens) - self.draft.shift)
        self._release()
        return emissions

    def _verify(self) -> list[Emission]:
        self._forget()
        if self.steps:  # they wrote true lengths over the provisional ones of their batch, which this one may equal
            self.fsm.moved("lengths")
        rows = sorted(self.running, key=lambda request: request.target_rows > 0)
        for request in rows:
            for cache in self.caches:
                cache.reserve(request.id, len(request.tokens) + self.settings.window)
            self.cache.detach(request.id, request.target_rows)
        inputs = {request.id: self._known(request) for request in rows}
        batch = _batch(rows, {r.id: r.target_rows for r in rows}, {i: len(each) for i, each in inputs.items()})
        with self._or_skip():
            self.fsm.target_prepare(batch)
        states = self.target(self._tensor(inputs.values()), None, self.forward(batch, Domain.TARGET))
        self.forwards += 1
        emissions = []
        for request, own in zip(rows, torch.split(states, list(batch.tokens)), strict=True):
            before = request.target_rows
            if before + own.shape[0] < len(request.tokens):  # a chunk of its prompt
                request.target_rows += own.shape[0]
                self._see(request, own)
                continue
            if self.settings.prefix_cache and before < request.prompt_len:
                self._publish(request)
            logits = self.target.logits(own[-1 - len(request.drafted) :])
            emissions.append(self._accept(request, own, logits))
        return emissions

    def _known(self, request: Request) -> list[int]:
        """What the target reads of a request: what it has not read and what was drafted, or a chunk of a prompt."""
        tokens = request.tokens[request.target_rows :] + request.drafted
        chunk = self.settings.chunk
        return tokens if chunk is None or request.prefilled else tokens[:chunk]

    def _see(self, request: Request, states: torch.Tensor) -> None:
        """Keep the target's states for a draft that reads them."""
        if self.shift:
            request.states = states if request.states is None else torch.cat((request.states, states))

    def _accept(self, request: Request, states: torch.Tensor, logits: torch.Tensor) -> Emission:
        """Keep what the target agrees with. Rejected rows stay in the cache, past its length, and are overwritten."""
        drafted, request.drafted = request.drafted, []
        noise = self.sampler.noise(1, len(drafted)).to(logits.device)[:, len(drafted) :]
        probs = None if request.probs is None or not drafted else request.probs[None]
        counts, tokens = self.sampler.accept(self._tensor([drafted])[None], probs, logits[None], noise)
        accepted, own = int(counts), int(tokens)
        self._see(request, states[: states.shape[0] - len(drafted) + accepted])
        return self._take(request, accepted, own, drafted)

    def _take(self, request: Request, accepted: int, own: int, agreed: list[int]) -> Emission:
        """Append the accepted tokens and the target's own one, as far as the request goes."""
        proposed = min(len(agreed), request.remaining)
        written = [*agreed[:accepted], own][: request.remaining]
        for place, token in enumerate(written):
            if token in self.stop:
                written = written[: place + 1]
                break
        request.target_rows = len(request.tokens) + accepted
        request.tokens += written
        finished = request.remaining == 0 or written[-1] in self.stop
        if finished:
            self._retire(request)
        return Emission(request.id, tuple(written), min(accepted, len(written)), proposed, finished)

    def _drafting(self) -> list[Request]:
        """Who drafts in this step. A draft that reads the target's states has those of the last step only: where it
        must begin earlier, the target runs over these tokens again in the next step.
        """
        assert self.draft is not None
        if self.draft_len == 0 or self._in_vain(self.running):
            return []
        rows = []
        for request in self.running:
            held = self.content.rows(request.id)
            lacking = request.target_rows + 1 - self.shift - held
            if self.shift and lacking > _count(request.states):
                request.restart(held)
            elif lacking > 0:
                request.states = request.states[-lacking:] if request.states is not None else None
                rows.append(request)
        return rows

    def _propose(self, rows: list[Request]) -> None:
        """The draft's window: it catches up with the accepted tokens, then writes one token a step. It begins at the
        first row that its cache lacks, and reads what the target has read and its last token: of a prompt in chunks,
        the chunk."""
        assert self.draft is not None
        shift = self.shift
        held = {request.id: self.content.rows(request.id) for request in rows}
        rows = sorted(rows, key=lambda request: held[request.id] > 0)
        inputs = {each.id: each.tokens[held[each.id] + shift : each.target_rows + 1] for each in rows}
        whole = {each.id for each in rows if each.prefilled}
        for request in rows:
            self.caches[-1].detach(request.id, held[request.id])
        batch = _batch(rows, held, {i: len(each) for i, each in inputs.items()})
        tokens, states = self._tensor(inputs.values()), _joined(rows) if shift else None
        drafted: dict[int, list[int]] = {request.id: [] for request in rows}
        steps = self.draft_len if whole else 1
        noise = self.sampler.noise(len(rows), steps).to(tokens.device)
        drawn: list[dict[int, torch.Tensor]] = []
        with self.fsm.draft_forward(batch):
            for step in range(steps):
                states = self.draft(tokens, states, self.forward(batch, Domain.DRAFT))[_last(batch, tokens.device)]
                tokens, probs = self.sampler.choose(self.draft.logits(states), noise[:, step])
                if probs is not None:
                    drawn.append(dict(zip(batch.request_ids, probs, strict=True)))
                for row, token in zip(batch.request_ids, tokens.tolist(), strict=True):
                    drafted[row].append(token)
                if step + 1 < steps:
                    batch, order = self._advance(batch)
                    tokens, states = tokens[order], states[order]
        self.content.wrote({request.id: request.target_rows + 1 - shift for request in rows})
        for request in rows:
            request.states = None
            if request.id in whole:
                request.drafted = drafted[request.id]
                request.probs = torch.stack([each[request.id] for each in drawn]) if drawn else None

    def _advance(self, batch: Batch) -> tuple[Batch, list[int]]:
        """The next draft step's batch, and where each of its rows stood before."""
        self.fsm.draft_step()
        now = self.fsm.batch(Domain.DRAFT)
        assert now is not None
        return now, [batch.request_ids.index(request) for request in now.request_ids]

    def forward(self, batch: Batch, domain: Domain, limit: int | None = None) -> Pass:
        """What one forward over `batch` reads, from the metadata as it is now: the target's, or the draft's."""
        first = self.target.layers if self.unified is not None and domain is Domain.DRAFT else 0
        return self.forward_pass(self.metadata, batch, self.fsm.publish, limit, first_layer=first)

    def _tensor(self, tokens: Iterable[list[int]]) -> torch.Tensor:
        packed = [token for each in tokens for token in each]
        return torch.tensor(packed, dtype=torch.long, device=self.settings.device)


def _page(flavour: Flavour, model: Draft) -> tuple[int, int]:
    """(heads, width) of one of the model's tokens in a page."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return flavour.page(config.num_key_value_heads, width)


def _forward_pass(settings: Settings, flavour: Flavour) -> type[Pass]:
    if settings.kernels == "torch":
        return flavour.forward_pass
    if settings.backend != "flash_mla" or settings.dtype != "bfloat16" or settings.device == "cpu":
        raise ValueError("the FlashMLA kernel needs the backend flash_mla, bfloat16 and a Hopper GPU")
    from specfsm.decode.flash_mla import FlashMLAKernelPass

    return FlashMLAKernelPass


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


def _count(states: torch.Tensor | None) -> int:
    return 0 if states is None else states.shape[0]


def _joined(rows: Sequence[Request]) -> torch.Tensor:
    return torch.cat([request.states for request in rows if request.states is not None])
