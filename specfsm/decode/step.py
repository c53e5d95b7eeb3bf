"""One speculative step of a batch in which every request generates, with static shapes and without a host read.

The same body runs eagerly, is recorded, and is what a replay repeats: verify 1 + L tokens a request, let the draft
catch up with all of them, step back to the accepted ones, and write L new tokens. The host's lengths are provisional
(it does not know how many tokens were accepted); the body corrects them on the device and publishes what it wrote
*before* the phase that reads them, so that whatever is derived from lengths is derived from the true ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import evolve

from specfsm.decode.engines import GraphEngine, engine_for
from specfsm.domain import Batch, Domain

if TYPE_CHECKING:
    from specfsm.decode.attention import Pass
    from specfsm.decode.loop import DecodeLoop, Request
    from specfsm.graph import Graph

__all__ = ["Step"]

WARM_UPS = 2
"""Eager runs of a step before it is recorded: they make every lazy thing, and they do refresh."""


class Step:
    """The step of one padded batch size and draft length.

    Args:
        loop: whose models, caches and machine it runs.
        size: B, rows, dummies included.
        draft_len: L, tokens that are verified, and proposed anew.

    Attributes:
        known: [B, 1 + L], each request's last known token and its drafted ones.
        length: [B], tokens known of each request, the last one included.
        live: [B], 1 for a request, 0 for a dummy row.
        choices: [B, 1 + L], the drafted tokens with the target's own one written over the first that it rejects.
        accepted: [B], how many drafted tokens it agrees with.
        states: [B x (1 + L), width], the target's states, for a draft that reads them.
        holds: the requests whose tokens and lengths are on the device; None where they are of the past.
        noise: [B, 2 L + 1], the step's uniform numbers; unused when greedy.
        probs: [B, L, vocabulary], what the drafted tokens were drawn from; None when greedy.
    """

    def __init__(self, loop: DecodeLoop, size: int, draft_len: int) -> None:
        self.loop, self.size, self.tokens = loop, size, draft_len + 1
        device = torch.device(loop.settings.device)
        self.known = torch.zeros((size, self.tokens), dtype=torch.long, device=device)
        self.length = torch.ones(size, dtype=torch.int32, device=device)
        self.live = torch.zeros(size, dtype=torch.int32, device=device)
        self.choices = torch.zeros_like(self.known)
        self.accepted = torch.zeros(size, dtype=torch.long, device=device)
        width = loop.target.config.hidden_size
        self.states = torch.zeros((size * self.tokens, width), dtype=getattr(torch, loop.settings.dtype), device=device)
        drafted = self.tokens - 1
        self.noise = torch.zeros((size, 2 * drafted + 1), device=device)
        greedy, vocabulary = loop.sampler.greedy, loop.target.config.vocab_size
        self.probs = None if greedy else torch.zeros((size, drafted, vocabulary), device=device)
        self.first = torch.arange(size, device=device) * self.tokens
        outputs = (self.choices, self.accepted, self.known)
        self.host = [[torch.empty_like(each, device="cpu", pin_memory=each.is_cuda) for each in outputs] for _ in "ab"]
        self.holds: tuple[int, ...] | None = None
        self.runs = 0
        self.graph: Graph | None = None
        self.engine: GraphEngine | None = None
        self.captured = False

    def load(self, rows: Sequence[Request]) -> None:
        """Put these requests on the device, unless they are what the last step left there."""
        ids = tuple(request.id for request in rows)
        if self.holds == ids:
            return
        self.holds, padding = ids, self.size - len(rows)
        known = [[request.tokens[-1], *request.drafted] for request in rows] + [[0] * self.tokens] * padding
        self.known.copy_(torch.tensor(known))
        self.length.copy_(torch.tensor([len(request.tokens) for request in rows] + [1] * padding))
        self.live.copy_(torch.tensor([1] * len(rows) + [0] * padding))
        if self.probs is not None and self.tokens > 1 and rows:
            self.probs[: len(rows)] = torch.stack([request.probs for request in rows if request.probs is not None])

    def results(self) -> list[torch.Tensor]:
        """Start copying choices, accepted counts and known tokens to the host, into the next of two buffers."""
        self.host.reverse()
        for host, device in zip(self.host[0], (self.choices, self.accepted, self.known), strict=True):
            host.copy_(device, non_blocking=True)
        return self.host[0]

    # The body.

    def run(self, target: Batch, draft: Batch | None) -> None:
        """Do one step: replayed where a graph is ready, recorded after the warm-ups, else eagerly."""
        mode = self.loop.settings.graphs
        self.runs += 1
        if not self.loop.sampler.greedy:
            self.noise.copy_(self.loop.sampler.noise(self.size, self.tokens - 1))
        if mode == "off" or self.runs <= WARM_UPS:
            self._eager(target, draft)
            self.loop.eager += 1
            return
        if self.graph is None or self.engine is None:
            self._record(target, draft)
        self._replay(target, draft)
        self.loop.replays += 1

    def _eager(self, target: Batch, draft: Batch | None) -> None:
        self._verify(target)
        if draft is not None:
            self._propose(draft)
        self._keep()

    def _record(self, target: Batch, draft: Batch | None) -> None:
        """Capture the whole step, or its draft phase alone. Recording executes nothing."""
        fsm, key = self.loop.fsm, (self.size, self.tokens - 1)
        whole = self.loop.settings.graphs == "whole" or draft is None
        self._settle(target, draft)
        self.engine = engine_for(self.loop.settings.device)
        self.captured = True
        try:
            with fsm.record(key, max_len=self.loop.limit) as graph, self.engine.capture():
                if whole:
                    self._verify(target)
                if draft is not None:
                    self._propose(draft)
                self._keep()
        finally:
            self.captured = False
        self.graph = graph

    def _settle(self, target: Batch, draft: Batch | None) -> None:
        """Make both caches' metadata fresh for this very batch: what a recording bakes in must be true of it."""
        fsm = self.loop.fsm
        if draft is not None:
            fsm.target_prepare(target)
            with fsm.draft_forward(draft):
                pass
        fsm.target_prepare(target)

    def _replay(self, target: Batch, draft: Batch | None) -> None:
        assert self.graph is not None
        assert self.engine is not None
        fsm = self.loop.fsm
        last = fsm.batch(Domain.DRAFT)
        if draft is not None and last is not None and last.num_contexts:
            self._settle(target, draft)  # a window of one draft step leaves the draft's values at a batch with prompts
        fsm.target_prepare(target, draft=draft, graph=None if draft is None else self.graph)
        if self.loop.settings.graphs == "draft" and draft is not None:
            self._verify(target)
        with fsm.draft_replay(self.graph, draft or target):
            self.engine.replay()

    def _pass(self, batch: Batch, domain: Domain) -> Pass:
        return self.loop.forward(batch, domain, self.loop.limit if self.captured else None)

    def _verify(self, batch: Batch) -> None:
        """The target over all known and drafted tokens; the longest agreeing prefix is accepted."""
        target, fsm = self.loop.target, self.loop.fsm
        fsm.announce(batch, Domain.TARGET)
        self._correct(Domain.TARGET, self.length - 1 + self.tokens)
        fsm.target_prepare(batch)
        self.states.copy_(target(self.known.flatten(), None, self._pass(batch, Domain.TARGET)))
        logits = target.logits(self.states).view(self.size, self.tokens, -1)
        accepted, own = self.loop.sampler.accept(
            self.known[:, 1:], self.probs, logits, self.noise[:, self.tokens - 1 :]
        )
        self.accepted.copy_(accepted)
        self.choices[:, :-1] = self.known[:, 1:]
        self.choices.scatter_(1, accepted[:, None], own[:, None])

    def _propose(self, batch: Batch) -> None:
        """The draft over all the target's choices, then L - 1 steps from the accepted ones on.

        Rows behind the accepted ones hold rejected tokens; the later steps overwrite them before anything reads them.
        """
        draft, fsm = self.loop.draft, self.loop.fsm
        assert draft is not None
        rows = self.length - draft.shift
        fsm.announce(batch, Domain.DRAFT)
        self._correct(Domain.DRAFT, rows + self.tokens, self.tokens)
        with fsm.draft_forward(batch):
            states = draft(self.choices.flatten(), self.states, self._pass(batch, Domain.DRAFT))
            states = states[self.first + self.accepted]
            tokens = self._choose(draft.logits(states), 1)
            for step in range(2, self.tokens):
                batch = evolve(batch, kv_lens=[length + 1 for length in batch.kv_lens], tokens=[1] * len(batch))
                fsm.announce(batch)
                self._correct(Domain.DRAFT, rows + self.accepted + step, 1)
                fsm.draft_step(batch)
                states = draft(tokens, states, self._pass(batch, Domain.DRAFT))
                tokens = self._choose(draft.logits(states), step)

    def _choose(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """The `step`-th drafted token of each row."""
        tokens, probs = self.loop.sampler.choose(logits, self.noise[:, step - 1])
        self.known[:, step] = tokens
        if self.probs is not None and probs is not None:
            self.probs[:, step - 1] = probs
        return tokens

    def _keep(self) -> None:
        """What the next step starts from, on the device."""
        own = self.choices.gather(1, self.accepted[:, None])
        self.known[:, :1] = own
        self.length += (self.accepted + 1).int() * self.live

    def _correct(self, domain: Domain, lens: torch.Tensor, tokens: int | None = None) -> None:
        """Write the true lengths over the host's provisional ones, and say so."""
        fsm = self.loop.fsm
        buffer = fsm.value("kv_lens_cuda", domain)
        buffer[: self.size] = lens
        buffer[self.size :] = 0
        fsm.publish("kv_lens_cuda", buffer, domain)
        if tokens is not None:
            buffer = fsm.value("_seq_lens_cuda", domain)
            buffer[: self.size] = tokens
            fsm.publish("_seq_lens_cuda", buffer, domain)
