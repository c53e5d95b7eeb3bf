"""Ranks that run the decode loop in lockstep: real processes, joined by gloo, a tiny model on each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specfsm.contracts.consensus import Consensus
from specfsm.decode.loop import DecodeLoop
from specfsm.errors import DraftContentInvalid, IllegalTransition, RankDisagreement
from tests.decode.conftest import draft, prompt, reference, settings, target
from tests.ranks import PATIENCE, Ranks

MODES = {
    "eager": {},
    "overlap": {"overlap": True},
    "whole": {"graphs": "whole", "graph_sizes": (2,)},
    "draft": {"graphs": "draft", "graph_sizes": (2,)},
}
PROMPTS = [prompt(60, 7), prompt(61, 4)]
OTHER = 1
"""The rank that does something else than the others."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as started:
        yield started


def voting(policy: str = "every step", mode: str = "eager", **machine: Any) -> DecodeLoop:
    consensus = Consensus(policy, timeout=PATIENCE)
    return DecodeLoop(target(), draft("self"), settings(**MODES[mode]), consensus=consensus, **machine)


def decode(loop: DecodeLoop, lengths: tuple[int, ...], steps: int = 100) -> dict[str, Any]:
    """Submit requests and decode so many steps; what each refusal says, and whether tokens are the target's."""
    refused = []
    outputs: dict[int, list[int]] = {}
    expected = {loop.submit(tokens, new): reference(tokens, new) for tokens, new in zip(PROMPTS, lengths, strict=False)}
    for each in loop.running:
        expected[each.id] = reference(each.tokens, each.remaining)
    for _ in range(steps):
        if not (loop.running or loop.waiting or loop.pending):
            break
        try:
            for emission in loop.step():
                outputs.setdefault(emission.request, []).extend(emission.tokens)
        except IllegalTransition as error:
            votes = {rank: vote.event for rank, vote in getattr(error, "votes", {}).items()}
            refused.append((type(error).__name__, getattr(error, "fields", ()), votes))
    right = all(written == expected[request][: len(written)] for request, written in outputs.items())
    whole = [len(outputs.get(request, ())) for request in expected]
    return {"refused": refused, "right": right, "lengths": whole, "replays": loop.replays, "step": _step(loop)}


def _step(loop: DecodeLoop) -> int:
    assert loop.consensus is not None
    return loop.consensus.step


# Agreement.


def agrees(rank: int, policy: str, mode: str) -> Any:
    return decode(voting(policy, mode), (15, 12))


@pytest.mark.parametrize("mode", MODES)
def test_ranks_in_lockstep_decode(ranks: Ranks, mode: str) -> None:
    """They agree on every phase, recording, replay and skip, and write the target's tokens."""
    [found, *others] = ranks.run(agrees, "every step", mode)
    assert others == [found] * (ranks.count - 1)
    assert (found["refused"], found["right"], found["lengths"]) == ([], True, [15, 12])
    assert found["step"] > 4, "the steps were voted on"
    assert (found["replays"] > 0) == (mode in ("whole", "draft"))


@pytest.mark.parametrize("policy", ["on recording", "off"])
def test_policy_leaves_votes_out(ranks: Ranks, policy: str) -> None:
    """A recording is voted on, or nothing is."""
    found = ranks.run(agrees, policy, "whole")
    assert all(each["right"] and not each["refused"] and each["replays"] for each in found)


# Skipping the draft.


def nears_its_limit(rank: int) -> Any:
    """One rank takes its requests for shorter than they are: it has no use for a draft where the others have."""
    new = 1 if rank == OTHER else 9
    return decode(voting(), (new, new), steps=1)


def is_told_to_skip(rank: int, mode: str) -> Any:
    """One rank sets its draft length to 0 in the middle of things."""
    loop = voting(mode=mode)
    before = decode(loop, (14, 14), steps=4)
    if rank == OTHER:
        loop.draft_len = 0
    return before["refused"], decode(loop, (), steps=1)["refused"]


def test_a_rank_that_skips_the_draft_alone_is_found_on_all(ranks: Ranks) -> None:
    """vLLM #27837: some ranks skip the drafter near the length limit, and the others wait for them for ever."""
    votes = {rank: "skip" if rank == OTHER else "draft_forward" for rank in range(ranks.count)}
    for found in ranks.run(nears_its_limit):
        assert found["refused"] == [("RankDisagreement", ("event",), votes)]


def test_so_it_is_with_four(tmp_path: Path) -> None:
    with Ranks(4, tmp_path) as four:
        for found in four.run(nears_its_limit):
            [(name, fields, votes)] = found["refused"]
            assert (name, fields) == ("RankDisagreement", ("event",))
            assert list(votes.values()) == ["draft_forward", "skip", "draft_forward", "draft_forward"]


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_is_told_to_skip_is_found_on_all(ranks: Ranks, mode: str) -> None:
    """Wherever they are: its draft length is another from the step's first vote on."""
    votes = dict.fromkeys(range(ranks.count), "target_prepare")
    for before, found in ranks.run(is_told_to_skip, mode):
        assert before == []
        assert found == [("RankDisagreement", ("draft_len",), votes)]


def all_skip(rank: int) -> Any:
    loop = voting()
    loop.draft_len = 0
    return decode(loop, (5, 5))


def test_all_may_skip(ranks: Ranks) -> None:
    """Then it is agreed on, step by step."""
    for found in ranks.run(all_skip):
        assert (found["refused"], found["right"], found["lengths"]) == ([], True, [5, 5])


# What one rank refuses by itself.


def refuses(rank: int, event: str, mode: str) -> Any:
    """A contract of one rank refuses an event; then all go on."""

    class Once:
        events = (event,)
        left = 3 if rank == OTHER else 0

        def admit(self, fsm: Any, event: str, batch: Any) -> None:
            self.left -= 1
            if self.left == 0:
                raise IllegalTransition(fsm.state, event)

    return decode(voting(mode=mode, contracts=[Once()]), (15, 12))


@pytest.mark.parametrize("mode", ["eager", "whole"])
@pytest.mark.parametrize("event", ["target_prepare", "draft_forward"])
def test_what_one_rank_refuses_all_go_without(ranks: Ranks, event: str, mode: str) -> None:
    """It votes to skip, so that the others do not wait; all decode that step without speculation, and go on."""
    votes = {rank: "skip" if rank == OTHER else event for rank in range(ranks.count)}
    for found in ranks.run(refuses, event, mode):
        [(name, fields, found_votes)] = found["refused"]
        assert (name, fields[-1], found_votes) == ("RankDisagreement", "event", votes)
        assert (found["right"], found["lengths"]) == (True, [15, 12])


def loses_rows(rank: int, mode: str) -> Any:
    """One rank's draft cache loses what it held: there the draft must be filled again."""
    loop = voting(mode=mode)
    before = decode(loop, (18, 18), steps=4)
    if rank == OTHER:
        for request in loop.running:
            loop.content.cut(request.id, 0)
    return before, decode(loop, ())


@pytest.mark.parametrize("mode", ["eager", "draft"])
def test_rows_lost_on_one_rank_stop_the_draft_on_all(ranks: Ranks, mode: str) -> None:
    """The static step is refused where rows are missing; the re-fill happens in a step that all take."""
    for before, after in ranks.run(loses_rows, mode):
        assert before["refused"] == []
        [(name, fields, _)] = after["refused"]
        assert (name, fields[0]) == ("RankDisagreement", "event")
        assert after["right"]


def test_refusals_of_ranks_are_no_refusals_of_content() -> None:
    """The loop re-fills the draft's cache where content is missing, and does nothing of the kind where ranks differ."""
    assert not issubclass(RankDisagreement, DraftContentInvalid)
