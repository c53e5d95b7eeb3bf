"""The loop under anything that may happen to requests: every token is the target's own, step after step.

``SPECFSM_CHAOS=5000`` runs so many steps of every case instead of a few hundred in all.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from specfsm.decode.attention import FLAVOURS
from specfsm.decode.cache import PoolExhausted
from specfsm.decode.loop import DecodeLoop
from specfsm.domain import RowOrder
from tests.decode.conftest import CHECK, draft, prompt, reference, settings, target

STEPS = int(os.environ.get("SPECFSM_CHAOS", "120"))
"""Of each case."""
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "overlap": {"overlap": True},
    "whole": {"graphs": "whole"},
    "draft, overlap": {"graphs": "draft", "overlap": True},
}
COMMON = prompt(70, 13)
"""What prompts begin with, so that prefixes are met again."""
PROMPTS = [COMMON[:length] + prompt(71 + length + tail, tail) for length in (0, 8, 13) for tail in (1, 4, 9)]
NEW = 14


class Chaos:
    """A loop, and what happens between its steps.

    Attributes:
        happened: how often each thing did.
    """

    def __init__(self, mode: str, kind: str, seed: int, **changes: Any) -> None:
        self.random = random.Random(seed)
        options = {"max_tokens": 40, "host_blocks": 30, "draft_blocks": 16, "prefix_cache": True, **MODES[mode]}
        self.loop = DecodeLoop(target(), draft(kind), settings(**{**options, **changes}), check=CHECK)
        self.prompts: dict[int, list[int]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.happened: Counter[str] = Counter()
        self.free = [cache.free_blocks for cache in self.loop.caches]
        self.aborted: set[int] = set()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for action in self.random.choices(ACTIONS, k=self.random.randrange(3)):
                with suppress(PoolExhausted, KeyError, IndexError):  # no room, nobody there, or it has just finished
                    getattr(self, action)()
                    self.happened[action] += 1
            self.step()
        while self.loop.running or self.loop.waiting or self.loop.pending or self.loop.parked:
            with suppress(PoolExhausted, IndexError):
                self.load_back()
            self.step()
        assert [cache.free_blocks for cache in self.loop.caches] == self.free, "pages were lost"

    def step(self) -> None:
        for emission in self.loop.step():
            self.outputs[emission.request] += emission.tokens
            expected = reference(self.prompts[emission.request], NEW)
            assert self.outputs[emission.request] == expected[: len(self.outputs[emission.request])]
            assert emission.finished == (self.outputs[emission.request] == expected)
            self.happened["accepted"] += emission.accepted
            self.happened["rejected"] += emission.proposed - emission.accepted

    def submit(self) -> None:
        if len(self.loop.waiting) < 2:
            tokens = self.random.choice(PROMPTS)
            request = self.loop.submit(tokens, NEW)
            self.prompts[request], self.outputs[request] = tokens, []

    def abort(self) -> None:
        request = self.random.choice(self.loop.running + self.loop.parked + self.loop.waiting).id
        self.loop.abort(request)
        self.aborted.add(request)

    def preempt(self) -> None:
        self.loop.preempt(self.random.choice(self.loop.running + self.loop.parked).id)

    def offload(self) -> None:
        self.loop.offload(self.random.choice(self.loop.running).id)

    def offload_without_draft(self) -> None:
        self.loop.offload(self.random.choice(self.loop.running).id, draft=False)

    def load_back(self) -> None:
        self.loop.load_back(self.loop.parked[0].id)

    def move(self) -> None:
        """One page of a request goes to the host and comes back elsewhere."""
        cache = self.random.choice(self.loop.caches)
        request = self.random.choice(self.loop.running).id
        cache.offload(request, self.random.choice(range(len(cache.block_ids(request)))))
        cache.load_back(request)

    def draft_len(self) -> None:
        self.loop.draft_len = self.random.randrange(self.loop.settings.draft_len + 1)

    def roll_back(self) -> None:
        """The engine takes tokens back, of which some may not have been reported yet."""
        each = self.random.choice(self.loop.running)
        self.step_out(each.id)
        written = len(each.tokens) - each.prompt_len
        count = self.random.randrange(written + 1)
        self.loop.roll_back(each.id, count)
        self.outputs[each.id] = self.outputs[each.id][: written - count]

    def step_out(self, request: int) -> None:
        """Take what was written, so that the loop and the test know of the same tokens."""
        self.loop._unreported += self.loop._drain()
        unreported, self.loop._unreported = self.loop._unreported, []
        for emission in unreported:
            self.outputs[emission.request] += emission.tokens
        if all(each.id != request for each in self.loop.running):
            raise KeyError(request)

    def lose(self) -> None:
        """The draft's cache loses rows of a request."""
        request = self.random.choice(self.loop.running).id
        self.loop.content.cut(request, self.random.randrange(20))


ACTIONS = (
    *["submit"] * 5, "abort", "preempt", "offload", "offload_without_draft", *["load_back"] * 3, "move", "draft_len",
    "roll_back", "lose",
)  # fmt: skip
CASES = [
    (mode, kind, chunk, number)
    for number, (mode, kind, chunk) in enumerate(
        (mode, kind, (None, 5, 3)[(place + len(kind)) % 3])
        for place, mode in enumerate(MODES)
        for kind in ("self", "early-exit", "head")
    )
]


@pytest.mark.parametrize(("mode", "kind", "chunk", "seed"), CASES)
def test_chaos_is_lossless(mode: str, kind: str, chunk: int | None, seed: int) -> None:
    """Requests join, finish, abort, are preempted, offloaded, loaded back, rolled back, prefilled in chunks or from a
    prefix; pages move, the draft's rows are lost, the draft length changes."""
    chaos = Chaos(mode, kind, seed, chunk=chunk, order=tuple(RowOrder)[seed % 2])
    chaos.run(STEPS)
    if STEPS >= 100:
        wanted = {*ACTIONS, "rejected"} if kind == "head" else {*ACTIONS, "accepted"}  # nobody trained the head
        lacking = wanted - {name for name, times in chaos.happened.items() if times}
        assert not lacking, "the run was too calm"


@pytest.mark.parametrize("backend", FLAVOURS)
def test_chaos_over_backends(backend: str) -> None:
    """The same, over every backend."""
    Chaos("whole", "early-exit", 99, backend=backend, chunk=5).run(STEPS // 2)
