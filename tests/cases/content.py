"""R11: what the draft's cache holds is a fact of its own, whatever the target's cache holds."""

from __future__ import annotations

from attrs import evolve

from specfsm import DraftContent, DraftContentInvalid, Trtllm
from tests.cases.case import Case
from tests.cases.engine import Engine


def drafting(**rows: int) -> tuple[Engine, DraftContent]:
    """An engine in a target phase; the draft's cache holds so many rows of request 7, and 4 of request 9."""
    content = DraftContent()
    engine = Engine(Trtllm(), contracts=[content])
    content.begin(7, rows.get("of_7", 4))
    content.begin(9, 4)
    engine.fsm.target_prepare(engine.batch())
    return engine, content


class PrefixHitOfTheTarget(Case):
    """A new request finds its prefix in the cache, so the target skips it, and the draft with it. Its pages in the
    draft's cache were never written for these tokens: it only guesses badly."""

    rule, name, refused = "R11", "SGLang #19897", DraftContentInvalid
    facts = {"request": 7, "short": ((7, 0, 4),), "event": "draft_forward"}
    words = ("request 7 has 0 valid rows in the draft's cache, but the draft would read 4", "a prefix hit")

    def faulty(self) -> None:
        engine, _ = drafting(of_7=0)
        with self.refusing(engine.fsm):
            engine.fsm.draft_forward(engine.batch(tokens=4))

    def corrected(self) -> None:
        """The draft's pass begins at the first row that it lacks."""
        engine, content = drafting(of_7=0)
        with engine.fsm.draft_forward(evolve(engine.batch(), tokens=(8, 4))):
            pass
        content.wrote({7: 8, 9: 8})
        assert content.rows(7) == 8


class LoadedBackWithoutTheDraft(Case):
    """A request's pages went to the host and come back, the target's rows alone. The draft reads what another request
    left there: an acceptance length of 4.5 becomes 1.6, until the cache is flushed."""

    rule, name, refused = "R11", "SGLang #32176", DraftContentInvalid
    facts = {"request": 7, "short": ((7, 2, 4),), "event": "draft_forward"}
    words = ("request 7 has 2 valid rows in the draft's cache, but the draft would read 4", "a load-back")

    def offloaded(self, *, saved: bool) -> Engine:
        engine, content = drafting()
        content.offload(7, 2, saved=saved)
        content.load_back(7)
        return engine

    def faulty(self) -> None:
        engine = self.offloaded(saved=False)
        with self.refusing(engine.fsm):
            engine.fsm.draft_forward(engine.batch(tokens=4))

    def corrected(self) -> None:
        engine = self.offloaded(saved=True)
        engine.fsm.draft_forward(engine.batch(tokens=4))


class SavedBeforeTheDraft(Case):
    """The KV connector saves a request's cache when the target's forward is done and the drafter has not run. The
    draft's rows are never copied, and where the cache arrives the draft guesses badly."""

    rule, name, refused = "R11", "vLLM #35158", DraftContentInvalid
    facts = {"request": 7, "short": ((7, 4, 8),), "event": "finalise"}
    words = ("8 rows of request 7 would be saved, but the draft's cache holds 4", "finalise(request, length, hook)")

    def faulty(self) -> None:
        engine, content = drafting()
        with self.refusing(engine.fsm):
            content.require(7, 8)

    def corrected(self) -> None:
        engine, content = drafting()
        saved: list[int] = []
        content.finalise(7, 8, lambda: saved.append(7))
        with engine.fsm.draft_forward():
            assert saved == []
        content.wrote({7: 8, 9: 8})
        assert saved == [7]
