"""Ranks that vote: real processes, joined by gloo. What one of them does differently is found on all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

from specfsm.contracts.consensus import BYTES, POLICIES, Consensus, Vote, key_in_words
from specfsm.domain import Batch
from specfsm.errors import IllegalTransition, RankDisagreement, RankSilent
from specfsm.states.phase import Phase
from tests.ranks import PATIENCE, Ranks
from tests.toys import BATCH, World, snapshot, world

SHORT = 0.5
"""Seconds that a rank waits for votes, where one is missing."""
STEADY = Batch((7, 3), kv_lens=(8, 8), tokens=(2, 2))


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(request.param, tmp_path_factory.mktemp("ranks")) as started:
        yield started


def voting(policy: str = "every step", **options: Any) -> tuple[World, Consensus]:
    consensus = Consensus(policy, **{"draft_len": 3, "timeout": PATIENCE, **options})
    return world("trtllm", contracts=[consensus]), consensus


def facts(fire: Callable[[], Any], at: World) -> dict[str, Any]:
    """What an event is refused with; the refusal changes nothing."""
    at.fsm.explain()  # takes note of what the managers did
    before = snapshot(at.fsm)
    try:
        fire()
    except RankDisagreement as error:
        assert before.differences(snapshot(at.fsm)) == []
        return {
            "kind": type(error).__name__,
            "fields": error.fields,
            "votes": {rank: attrs.asdict(vote) for rank, vote in error.votes.items()},
            "rank": error.rank,
            "missing": getattr(error, "missing", None),
            "broken": getattr(error, "broken", None),
            "text": str(error),
        }
    return {}


# Agreement.


def whole_step(rank: int) -> Any:
    at, consensus = voting()
    with pytest.raises(RankDisagreement, match=r"not agreed on step 1 yet; .* is nothing"):
        consensus.agreed(at.fsm, 1)
    at.round_trip(STEADY)
    seen = [attrs.astuple(consensus.agreed(at.fsm, 1))]
    at.prepare(STEADY)
    with at.fsm.record(("decode", 2, 3)) as graph:
        seen.append(attrs.astuple(consensus.agreed(at.fsm, 2)))
        at.fsm.draft_forward(STEADY)
        seen.append(attrs.astuple(consensus.agreed(at.fsm, 2)))
        at.fsm.restore()
    with at.fsm.draft_replay(graph):
        seen.append(attrs.astuple(consensus.agreed(at.fsm, 2)))
    consensus.skip(at.fsm)
    seen.append(attrs.astuple(consensus.agreed(at.fsm, 2)))
    return seen


def test_ranks_that_agree_go_on(ranks: Ranks) -> None:
    """Every phase, a recording, a replay and a skip; the step is counted, what was agreed on is told."""
    key = "('decode', 2, 3)"
    assert (
        ranks.run(whole_step)
        == [
            [
                (1, "draft_forward", "", 2, 3),
                (2, "record", key, 2, 3),
                (2, "record", key, 2, 3),  # phases inside it are not voted on
                (2, "draft_replay", key, 2, 3),
                (2, "skip", "", 2, 3),
            ]
        ]
        * ranks.count
    )


# Disagreement.


def differ_in_event(rank: int) -> Any:
    """The faulty rank is near its length limit and leaves the draft out."""
    at, consensus = voting()
    at.prepare(STEADY)
    skips = rank == 1
    found = facts(lambda: consensus.skip(at.fsm) if skips else at.fsm.draft_forward(STEADY), at)
    consensus.skip(at.fsm)  # all of them, now
    at.prepare(STEADY)
    at.fsm.draft_forward(STEADY)
    return found


def differ_in_graph(rank: int) -> Any:
    at, _ = voting("on recording")
    at.round_trip(STEADY)

    def record() -> None:
        with at.fsm.record((2, 4 if rank == 1 else 3)):
            raise AssertionError("nothing is recorded")

    return facts(record, at)


def differ_in_batch(rank: int) -> Any:
    at, _ = voting()
    return facts(lambda: at.prepare(BATCH if rank == 1 else STEADY), at)


def differ_in_draft_len(rank: int) -> Any:
    at, consensus = voting()
    at.prepare(STEADY)
    consensus.draft_len = 2 if rank == 1 else 3
    return facts(lambda: at.fsm.draft_forward(STEADY), at)


def is_early(rank: int) -> Any:
    """It counts a step that the others have not begun."""
    at, _ = voting(clock=lambda: 6 if rank == 1 else 5)
    return facts(lambda: at.prepare(STEADY), at)


def is_late(rank: int) -> Any:
    """It comes with the vote of a step that the others have left."""
    clock = [1]
    at, _ = voting(clock=lambda: clock[0])
    at.round_trip(STEADY)
    clock[0] += rank != 1
    return facts(lambda: at.prepare(STEADY), at)


DISAGREEMENTS = [
    ("event", differ_in_event, "draft_forward", "skip"),
    ("graph", differ_in_graph, "(2, 3)", "(2, 4)"),
    ("batch", differ_in_batch, 2, 3),
    ("draft_len", differ_in_draft_len, 3, 2),
    ("step", is_early, 5, 6),
    ("step", is_late, 2, 1),
]


@pytest.mark.parametrize(("name", "scenario", "usual", "other"), DISAGREEMENTS)
def test_disagreement_is_raised_on_every_rank(
    ranks: Ranks, name: str, scenario: Callable[[int], Any], usual: Any, other: Any
) -> None:
    """vLLM #27837 (event): where some ranks skip the drafter the others wait for ever. All are refused, all know what
    each was about to do, and nothing has changed."""
    found = ranks.run(scenario)
    for rank, each in enumerate(found):
        assert (each["kind"], each["fields"], each["rank"]) == ("RankDisagreement", (name,), rank)
        others = [usual] * (ranks.count - 2)
        assert [vote[name] for vote in each["votes"].values()] == [usual, other, *others]
        assert list(each["votes"]) == list(range(ranks.count))


def stale_flag(rank: int) -> Any:
    at, consensus = voting()
    at.round_trip(STEADY)
    with pytest.raises(RankDisagreement, match=r"not agreed on step 2 yet; .* is step 1: draft_forward") as caught:
        consensus.agreed(at.fsm, 2)
    at.prepare(STEADY)
    return caught.value.fields, consensus.agreed(at.fsm, 2).step


def test_last_steps_agreement_is_not_this_steps(ranks: Ranks) -> None:
    """TensorRT-LLM #17710: the flag of the last step was applied before this step's vote. It is refused until then."""
    assert ranks.run(stale_flag) == [(("step",), 2)] * ranks.count


def refused_by_itself(rank: int) -> Any:
    """A refusal that only this rank knows of comes before its vote; it tells the others by a skip."""

    class Full:
        events = ("draft_forward",)

        def admit(self, fsm: Any, event: str, batch: Batch | None) -> None:
            if rank == 1:
                raise IllegalTransition(fsm.state, event)

    consensus = Consensus(draft_len=3, timeout=PATIENCE)
    at = world("trtllm", contracts=[Full(), consensus])
    at.prepare(STEADY)

    def draft() -> None:
        try:
            at.fsm.draft_forward(STEADY)
        except RankDisagreement:
            raise
        except IllegalTransition:
            consensus.skip(at.fsm)

    return facts(draft, at)["fields"], at.fsm.state.name


def test_what_one_rank_refuses_all_go_without(ranks: Ranks) -> None:
    assert ranks.run(refused_by_itself) == [(("event",), Phase.TARGET_PREPARE.name)] * ranks.count


# Silence.


def silent(rank: int) -> Any:
    """One rank votes only when the others have given up."""
    at, consensus = voting(timeout=SHORT)
    at.prepare(STEADY)
    others = [other for other in consensus.ranks if other != 1]
    if rank == 1:
        store = consensus.group.get_group_store()
        store.wait([f"gave up {other}" for other in others])
        return facts(lambda: at.fsm.draft_forward(STEADY), at)
    found = facts(lambda: at.fsm.draft_forward(STEADY), at)
    consensus.group.get_group_store().set(f"gave up {rank}", b"")
    return found, facts(lambda: at.prepare(STEADY), at)


def test_rank_that_never_votes_is_named(ranks: Ranks) -> None:
    """The others do not hang: after the time-out each names it. When it comes it is refused too, and so is whatever
    follows: the group is broken."""
    first, late, *more = ranks.run(silent)
    for found, after in (first, *more):
        assert (found["kind"], found["missing"], found["broken"]) == ("RankSilent", (1,), False)
        assert found["votes"].keys() == {*range(ranks.count)} - {1}
        assert f"rank 1 did not vote within {SHORT:g} s" in found["text"]
        assert (after["kind"], after["missing"], after["broken"]) == ("RankSilent", (1,), True)
        assert "the group is broken since" in after["text"]
    assert (late["kind"], late["missing"]) == ("RankSilent", ())
    assert "rank 1 voted when the others had given up" in late["text"]
    assert ranks.run(whole_step) == ranks.run(whole_step), "another group is as good as new"


def dies(rank: int) -> Any:
    at, _ = voting(timeout=SHORT)
    at.prepare(STEADY)
    if rank == 1:
        os._exit(1)
    return facts(lambda: at.fsm.draft_forward(STEADY), at)


@pytest.mark.parametrize("count", [2, 4])
def test_dead_rank_is_named(count: int, tmp_path: Path) -> None:
    with Ranks(count, tmp_path) as started:
        for found in started.run(dies, dead=(1,)):
            assert (found["kind"], found["missing"]) == ("RankSilent", (1,))


# Policies.


def rounds(rank: int, policy: str) -> Any:
    at, consensus = voting(policy)
    at.round_trip(STEADY)
    at.prepare(STEADY)
    with at.fsm.record("key"):
        pass
    consensus.skip(at.fsm)
    return consensus._rounds


@pytest.mark.parametrize(("policy", "votes"), [("every step", 5), ("on recording", 1), ("off", 0)])
def test_policy_says_when_ranks_vote(ranks: Ranks, policy: str, votes: int) -> None:
    """Draft steps are not voted on: their window was."""
    assert ranks.run(rounds, policy) == [votes] * ranks.count


def outer(rank: int, count: int) -> Any:
    group = dist.new_group([0, count - 1], backend="gloo")
    if rank not in (0, count - 1):
        return None
    at, consensus = voting(group=group)
    return facts(lambda: at.prepare(STEADY if rank else BATCH), at)["votes"].keys() == {0, count - 1}, consensus.rank


def test_group_of_some_ranks_names_them_as_the_world_does(ranks: Ranks) -> None:
    first, *inner, last = ranks.run(outer, ranks.count)
    assert (first, last) == ((True, 0), (True, ranks.count - 1))
    assert not any(inner)


def test_what_it_cannot_be_made_with() -> None:
    with pytest.raises(ValueError, match="unknown policy 'never': it is one of every step, on recording, off"):
        Consensus("never")
    with pytest.raises(RuntimeError, match="cannot vote before torch"):
        Consensus()
    assert Consensus("off").events == POLICIES["off"] == ()


# The ballot.


@pytest.mark.parametrize("key", [(8, 3), "é", ("x" * 400, 1), None, 2**70])
def test_ballots_have_one_size(key: Any) -> None:
    """Whatever the key is; two long ones that differ at their end are told apart."""
    vote = Vote(2**62, "target_prepare", key_in_words(key), 4096, 64)
    encoded = vote.encode()
    assert (encoded.shape, encoded.dtype) == ((BYTES,), torch.uint8)
    assert Vote.decode(bytes(encoded.tolist())) == vote
    assert key_in_words(("x" * 400, 1)) != key_in_words(("x" * 400, 2))


def test_silence_is_a_disagreement() -> None:
    """An engine that handles the one handles the other."""
    assert issubclass(RankSilent, RankDisagreement)
