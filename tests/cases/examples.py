"""One real error of each class, for `docs/errors.md`: of a public case if one raises it, else of a situation here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from attrs import frozen

from specfsm import (
    Backend,
    Batch,
    Consensus,
    FlashMLA,
    Padding,
    RankSilent,
    SpecFSMError,
    Table,
    Trtllm,
)
from tests.cases import agreement, capture, content, lives, owner, snapshot, spaces, transfers, window
from tests.cases.case import Case
from tests.cases.engine import SIZES, TARGET, Engine

__all__ = ["EXAMPLES", "Example", "example"]


def mistyped_hook() -> None:
    """An observer has a hook with a typing error, which would never be called."""

    class Log:
        def on_enter_draft_foward(self) -> None: ...

    Engine(Trtllm(), observer=Log())


def missing_twin() -> None:
    """The engine allocates its buffers by itself, and none for the draft's block table."""
    metadata: Any = type("Metadata", (), {})()
    made = Engine(FlashMLA())
    FlashMLA().allocate(metadata, made.target, made.draft, SIZES, "cpu")
    del metadata.draft_block_ids_per_seq
    Engine(FlashMLA(), metadata=metadata)


def step_before_restore() -> None:
    """The next step begins while the draft phase of the last one is active."""
    engine = Engine(Trtllm())
    engine.fsm.target_prepare(engine.batch())
    engine.fsm.draft_forward()
    engine.fsm.target_prepare()


def event_in_a_callback() -> None:
    """An observer fires the next event by itself."""

    class Eager:
        def after_target_prepare(self) -> None:
            engine.fsm.draft_forward()

    engine = Engine(Trtllm(), observer=Eager())
    engine.fsm.target_prepare(engine.batch())


def event_of_another_thread() -> None:
    """The thread that samples prepares the next step."""
    engine = Engine(Trtllm())
    raised: list[SpecFSMError] = []

    def sample() -> None:
        try:
            engine.fsm.target_prepare(engine.batch())
        except SpecFSMError as error:
            raised.append(error)

    thread = threading.Thread(target=sample, name="sampler")
    thread.start()
    thread.join()
    raise raised[0]


def table_kept_from_before() -> None:
    """Code of the draft writes to the block table that it took from the metadata before the switch. Found at
    level "tensors"."""
    engine = Engine(FlashMLA(), check="tensors")
    engine.fsm.target_prepare(engine.batch())
    kept = engine.metadata.block_ids_per_seq
    engine.fsm.draft_forward()
    kept[0, 0] = 7
    engine.fsm.restore()


def write_that_nobody_sees() -> None:
    """Code writes another request's page into the block table through NumPy, which moves no version counter. Found at
    level "contents"."""
    engine = Engine(FlashMLA(), check="contents")
    engine.fsm.target_prepare(engine.batch())
    engine.metadata.block_ids_per_seq.numpy()[0, 1] = engine.target.slots[9][0]
    engine.fsm.target_prepare()
    engine.fsm.draft_forward()


def dummy_in_a_former_row() -> None:
    """A rank without requests steps with a dummy. In the draft's cache it is looked up where request 9 stood, whose
    pages request 21 has now."""
    engine = Engine(Trtllm(), contracts=[Padding()])
    engine.target.reserve(-1, 4)
    engine.draft.slots[-1] = engine.draft.slots[21] = engine.draft.slots.pop(9)
    idle = Batch((-1,), kv_lens=(2,), tokens=(1,), dummies=[-1])
    engine.fsm.target_prepare(idle)
    engine.fsm.draft_forward(idle)


def rank_that_does_not_vote() -> None:
    """Rank 1 takes a path on which it does not vote."""
    raise agreement.ranks().run(one_votes)[0]


def one_votes(rank: int) -> RankSilent | None:
    consensus = Consensus(draft_len=3, timeout=0.5)
    engine = Engine(Trtllm(), contracts=[consensus])
    try:
        if rank == 0:
            engine.fsm.target_prepare(engine.batch())
    except RankSilent as error:
        return error
    return None


class Broken:
    """Metadata on which, from some moment on, nothing can be set."""

    def __init__(self) -> None:
        self.frozen = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "frozen" and self.frozen:
            raise AttributeError(f"{name} cannot be set")
        super().__setattr__(name, value)


def undo_that_fails() -> None:
    """A refresh fails, and the metadata does not let itself be put back."""

    def fail(view: Any, buffer: torch.Tensor) -> torch.Tensor:
        if view.domain is TARGET:
            return buffer
        metadata.frozen = True
        raise MemoryError("no room for the plan")

    metadata: Any = Broken()
    plan = Table("plan", reads=("batch", "lengths"), dtype="int32", shape=("S",), sentinel=0, refresh=fail)
    backend = Backend("planned", (plan,))
    made = Engine(backend)
    backend.allocate(metadata, made.target, made.draft, SIZES, "cpu")
    engine = Engine(backend, metadata=metadata)
    engine.fsm.target_prepare(engine.batch())
    engine.fsm.draft_forward()


EXAMPLES: dict[str, type[Case] | Callable[[], None]] = {
    "ContentsViolated": write_that_nobody_sees,
    "DraftContentInvalid": content.PrefixHitOfTheTarget,
    "GraphContractBroken": capture.LengthBakedIn,
    "IllegalTransition": step_before_restore,
    "IncompleteBackend": spaces.BlockIdsAsSlots,
    "InvalidTable": mistyped_hook,
    "NestedEvent": event_in_a_callback,
    "NestedPhase": snapshot.LeftBehindByAWarmUp,
    "PaddingViolated": dummy_in_a_former_row,
    "PendingTransfer": transfers.PinnedBufferRewritten,
    "RankDisagreement": agreement.SomeRanksSkipTheDrafter,
    "RankSilent": rank_that_does_not_vote,
    "RefreshDeclined": owner.DeclinedRefresh,
    "RestoreFailed": undo_that_fails,
    "RetiredRequest": lives.PagesOfAStepInFlight,
    "StaleResource": owner.BlockTableOfTheOtherCache,
    "TargetMutated": table_kept_from_before,
    "UnknownMetadata": missing_twin,
    "WindowOverflow": window.LastPageTooShort,
    "WrongThread": event_of_another_thread,
}
"""Error class → what raises it. A class that is added to `specfsm.errors` needs a line here."""


@frozen
class Example:
    """A raised error, and what happened.

    Args:
        name, link: of the public report; empty where there is none.
    """

    error: SpecFSMError
    situation: str
    name: str = ""
    link: str = ""

    @property
    def message(self) -> str:
        """What is printed. A group's errors stand behind it."""
        inner = self.error.exceptions if isinstance(self.error, ExceptionGroup) else ()
        return "\n".join((str(self.error), *(f"  {type(each).__name__}: {each}" for each in inner)))


@cache
def example(kind: str) -> Example:
    """The error of this class, raised now.

    Raises:
        KeyError: no scenario raises it.
    """
    if kind not in EXAMPLES:
        raise KeyError(f"no scenario raises {kind}: name one in EXAMPLES of tests/cases/examples.py")
    scenario = EXAMPLES[kind]
    if isinstance(scenario, type):
        return Example(scenario().error(), scenario.situation(), scenario.name, scenario.link())
    try:
        scenario()
    except SpecFSMError as error:
        return Example(error, " ".join((scenario.__doc__ or "").split()))
    raise AssertionError(f"{scenario.__name__} raised nothing")
