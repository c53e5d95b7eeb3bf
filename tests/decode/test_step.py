"""One speculative step on the device: what the host does not know yet is corrected there, before anything reads it."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from specfsm.decode.loop import DecodeLoop
from specfsm.decode.step import Step
from specfsm.domain import Batch, Domain
from tests.decode.conftest import draft, prompt, settings, target
from tests.toys import BATCH, REQUESTS, World, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT


class Watched(DecodeLoop):
    """Keeps, of each pass of a step, the lengths that the host believed and those that the device had.

    The device's are copied by the pass itself: a recorded copy is repeated by every replay.
    """

    believed: list[int]
    found: dict[tuple[Domain, int], torch.Tensor]

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found, run = {}, Step.run

        def begin(step: Step, batch: Batch, draft_batch: Batch | None) -> None:
            self.believed, self.places = list(batch.kv_lens), [count(), count()]
            run(step, batch, draft_batch)

        monkeypatch.setattr(Step, "run", begin)

    def forward(self, batch: Batch, domain: Domain, limit: int | None = None) -> Any:
        if hasattr(self, "places"):
            self.found[domain, next(self.places[domain])] = self.metadata.kv_lens_cuda_runtime.clone()
        return super().forward(batch, domain, limit)


@pytest.mark.parametrize("kind", ["early-exit", "head"])
@pytest.mark.parametrize("graphs", ["off", "whole", "draft"])
@pytest.mark.parametrize("backend", ["trtllm", "dsa"])
def test_lengths_that_the_host_does_not_know_are_true_when_they_are_read(
    backend: str, graphs: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overlap the host prepares for every drafted token being accepted. The target's pass, and each of the
    draft's, find how many really were."""
    drafted = 3
    loop = Watched(target(), draft(kind), settings(backend, draft_len=drafted, overlap=True, graphs=graphs))
    assert loop.draft is not None
    loop.submit(prompt(33, 6), 34)
    loop.step()
    loop.watch(monkeypatch)
    begun, written = [], []
    for _ in range(7):
        emissions = loop.step()
        begun.append((loop.believed[0], [int(loop.found[each][0]) for each in sorted(loop.found)]))
        written += [len(emission.tokens) for emission in emissions]
    known, wrong = 7, 0  # the prompt and the token that its prefill wrote
    for (believed, found), new in zip(begun, written, strict=False):
        rows = known - loop.draft.shift
        later = [rows + new - 1 + step for step in range(2, drafted + 1)]
        assert found == [known + drafted, rows + drafted + 1, *later]
        wrong += believed > known + drafted
        known += new
    assert len(written) == 6
    assert wrong > 0
    assert (loop.replays > 0) == (graphs != "off")


# Declared, or lost.


BELIEVED = Batch(REQUESTS, kv_lens=(10, 10, 10), tokens=(2, 2, 2))
TRUE = (8, 10, 9)


def correct(at: World, domain: Domain, *, publish: bool) -> torch.Tensor:
    """The device's own lengths over the host's."""
    at.fsm.announce(BELIEVED, domain)
    lens: torch.Tensor = at.fsm.value("kv_lens_cuda", domain)
    lens[:3] = torch.tensor(TRUE)
    if publish:
        at.fsm.publish("kv_lens_cuda", lens, domain)
    return lens


def enter(at: World, domain: Domain) -> None:
    if domain is TARGET:
        at.fsm.target_prepare(BELIEVED)
    else:
        at.fsm.draft_forward(BELIEVED)


@pytest.mark.parametrize("check", ["stamps", "tensors"])
@pytest.mark.parametrize("domain", Domain)
def test_declared_correction_is_what_tables_are_derived_from(domain: Domain, check: str) -> None:
    """Announced, written, published: the phase with the same batch neither overwrites it nor derives from the host's
    lengths."""
    at = world("dsa", check=check)
    at.round_trip()
    at.prepare(BATCH)
    lens = correct(at, domain, publish=True)
    enter(at, domain)
    assert lens.tolist() == [*TRUE, 0, 0]
    page = at.fsm.bindings[domain].manager.geometry.tokens_per_block
    blocks = (at.fsm.value("block_table", domain) >= 0).sum(1).tolist()
    assert blocks[:3] == [min(-(-length // page), 3) for length in TRUE]  # each request holds three pages


@pytest.mark.parametrize("domain", Domain)
def test_correction_that_nobody_declares_is_overwritten(domain: Domain) -> None:
    """The lengths moved, and as far as the machine knows only the host has new ones."""
    at = world("dsa")
    at.round_trip()
    at.prepare(BATCH)
    lens = correct(at, domain, publish=False)
    enter(at, domain)
    assert lens.tolist() == [10, 10, 10, 0, 0]
