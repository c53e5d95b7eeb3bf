"""R8: all ranks take the same decision, and what they agreed on belongs to this step. Two real processes each time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from specfsm import Consensus, RankDisagreement, Trtllm
from tests.cases.case import Case
from tests.cases.engine import Engine
from tests.ranks import PATIENCE, Ranks


@cache
def ranks() -> Ranks:
    """Two processes that wait for scenarios until this one ends."""
    return Ranks(2, Path(mkdtemp()))


def voting(timeout: float = PATIENCE) -> tuple[Engine, Consensus]:
    consensus = Consensus(draft_len=3, timeout=timeout)
    return Engine(Trtllm(), contracts=[consensus]), consensus


class FlagOfTheLastStep(Case):
    """All ranks agree in each step on whether to draft. The flag is applied when a step begins, before its own vote: it
    is last step's, and a rank that changed its mind goes another way than the others."""

    rule, name, refused = "R8", "TensorRT-LLM #17710", RankDisagreement
    facts = {"fields": ("step",), "step": 2, "event": "agreed", "rank": 0}
    words = ("the ranks have not agreed on step 2 yet", "the last that they agreed on is step 1: target_prepare")

    def faulty(self) -> None:
        with self.refusing():
            raise everywhere(read_before_the_vote)

    def corrected(self) -> None:
        assert ranks().run(vote_then_read) == [(2, "target_prepare")] * 2


def read_before_the_vote(rank: int) -> RankDisagreement | None:
    engine, consensus = voting()
    engine.fsm.target_prepare(engine.batch())
    return told(engine, lambda: consensus.agreed(engine.fsm, 2))


def vote_then_read(rank: int) -> tuple[int, str]:
    engine, consensus = voting()
    for _ in range(2):
        engine.fsm.target_prepare(engine.batch())
    agreed = consensus.agreed(engine.fsm, 2)
    return agreed.step, agreed.event


class SomeRanksSkipTheDrafter(Case):
    """Near the length limit a rank leaves the drafter out. The others run it, and wait in its collectives for ever."""

    rule, name, refused = "R8", "vLLM #27837", RankDisagreement
    facts = {"fields": ("event",), "event": "draft_forward", "rank": 0}
    words = (
        "the ranks differ in event; this is rank 0",
        "rank 0: step 1: draft_forward, batch 2, draft length 3",
        "rank 1: step 1: skip, batch 2, draft length 3",
        "a rank that goes without the draft says so with skip()",
    )

    def faulty(self) -> None:
        with self.refusing():
            raise everywhere(one_skips)

    def corrected(self) -> None:
        assert ranks().run(all_skip) == ["skip"] * 2


def one_skips(rank: int) -> RankDisagreement | None:
    engine, consensus = voting()
    engine.fsm.target_prepare(engine.batch())
    return told(engine, engine.fsm.draft_forward if rank == 0 else lambda: consensus.skip(engine.fsm))


def all_skip(rank: int) -> str:
    engine, consensus = voting()
    engine.fsm.target_prepare(engine.batch())
    consensus.skip(engine.fsm)
    return consensus.agreed(engine.fsm, 1).event


def everywhere(scenario: Callable[[int], RankDisagreement | None]) -> RankDisagreement:
    """The refusal on the first rank; the other has its own."""
    errors = ranks().run(scenario)
    assert [error.rank for error in errors] == [0, 1]
    assert len({error.fields for error in errors}) == 1
    first: RankDisagreement = errors[0]
    return first


def told(engine: Engine, event: Callable[[], object]) -> RankDisagreement | None:
    """What the event is refused with on this rank; nothing that it shows has changed."""
    try:
        with Case().refusing(engine.fsm):
            event()
    except RankDisagreement as error:
        return error
    return None
