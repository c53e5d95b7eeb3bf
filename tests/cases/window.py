"""R12: there are slots for the whole draft window before it starts, in both caches."""

from __future__ import annotations

from specfsm import Trtllm, Window, WindowOverflow
from tests.cases.case import Case
from tests.cases.engine import DRAFT, Engine

DRAFT_LEN = 3


def windowed(*, at_once: bool) -> Engine:
    """Pages for 8 tokens of each request in both caches; the draft proposes 3."""
    pages: list[Engine] = []
    window = Window(
        lambda request: pages[0].target.capacity(request),
        lambda request: pages[0].draft.capacity(request),
        draft_len=DRAFT_LEN,
        at_once=at_once,
    )
    pages.append(Engine(Trtllm(), contracts=[window]))
    return pages[0]


class LastPageTooShort(Case):
    """The last page of a request has room for its next token, not for the whole draft window. The tokens behind it are
    written by whatever the table holds there."""

    rule, name, refused = "R12", "vLLM #16370", WindowOverflow
    facts = {"request": 7, "domain": DRAFT, "short": ((7, DRAFT, 10, 8), (9, DRAFT, 10, 8)), "event": "draft_forward"}
    words = ("request 7 needs room for 10 tokens in the draft's cache, but its pages hold 8", "shorten the window")

    def faulty(self) -> None:
        engine = windowed(at_once=False)
        engine.fsm.target_prepare(engine.batch(8))
        with self.refusing(engine.fsm):
            engine.fsm.draft_forward()

    def corrected(self) -> None:
        engine = windowed(at_once=False)
        engine.fsm.target_prepare(engine.batch(8))
        for request in engine.REQUESTS:
            engine.draft.reserve(request, 8 + DRAFT_LEN - 1)
        with engine.fsm.draft_forward():
            for _ in range(DRAFT_LEN - 1):
                engine.fsm.draft_step()


class DraftPoolRunsOut(Case):
    """Requests are admitted by the room in the target's pool. The draft's is smaller: it runs out in the middle of a
    step, and the engine dies."""

    rule, name, refused = "R12", "TensorRT-LLM #18660", WindowOverflow
    facts = {"request": 7, "domain": DRAFT, "short": ((7, DRAFT, 11, 8), (9, DRAFT, 11, 8)), "event": "target_prepare"}
    words = (
        "IDLE --target_prepare--> TARGET_PREPARE refused",
        "request 7 needs room for 11 tokens in the draft's cache",
    )

    def faulty(self) -> None:
        engine = windowed(at_once=True)
        with self.refusing(engine.fsm):
            engine.fsm.target_prepare(engine.batch(8))

    def corrected(self) -> None:
        engine = windowed(at_once=True)
        for request in engine.REQUESTS:
            engine.draft.reserve(request, 8 + DRAFT_LEN)
        engine.fsm.target_prepare(engine.batch(8))
        with engine.fsm.draft_forward():
            pass
