"""R10: results of a life that is over count for nobody; pages are not given away while something may write to them."""

from __future__ import annotations

from specfsm import Lifetime, RetiredRequest, Trtllm
from specfsm.contracts.lifetime import Life
from tests.cases.case import Case
from tests.cases.engine import Engine


def living() -> tuple[Engine, Lifetime]:
    """An engine in a target phase, both of whose requests live."""
    lifetime = Lifetime()
    engine = Engine(Trtllm(), contracts=[lifetime])
    for request in engine.REQUESTS:
        lifetime.begin(request)
    engine.fsm.target_prepare(engine.batch())
    return engine, lifetime


class PagesOfAStepInFlight(Case):
    """A request ends while a step that was launched with it still runs. Its pages are given to another request, and the
    step writes to them."""

    rule, name, refused = "R10", "vLLM #45357", RetiredRequest
    facts = {"request": 9, "generation": 2, "steps": (1,), "state": Life.RETIRED, "event": "free"}
    words = ("the pages of request 9 (generation 2) cannot be given away: step 1 in flight may write to them",)

    def faulty(self) -> None:
        engine, lifetime = living()
        lifetime.launch(engine.REQUESTS)
        lifetime.retire([9])
        with self.refusing(engine.fsm):
            lifetime.require_free(9)
            engine.target.release(9)

    def corrected(self) -> None:
        engine, lifetime = living()
        flight = lifetime.launch(engine.REQUESTS)
        lifetime.retire([9])
        assert lifetime.fence() == ()
        flight.land()
        for request in lifetime.fence():
            lifetime.require_free(request)
            engine.target.release(request)
        assert 9 not in engine.target.slots


class ResultsOfARetractedRequest(Case):
    """A request is retracted to make room while its step runs. When the results arrive they are applied to it all the
    same, by its row."""

    rule, name, refused = "R10", "SGLang #23456", RetiredRequest
    facts = {"request": 9, "generation": 2, "steps": (1,), "event": "claim"}
    words = ("request 9 (generation 2) was retired while step 1 computed this result", "drop this row")

    def faulty(self) -> None:
        engine, lifetime = living()
        flight = lifetime.launch(engine.REQUESTS)
        lifetime.retire([9])
        flight.land()
        with self.refusing(engine.fsm):
            for row in range(2):
                flight.claim(row)

    def corrected(self) -> None:
        engine, lifetime = living()
        flight = lifetime.launch(engine.REQUESTS)
        lifetime.retire([9])
        flight.land()
        assert list(flight.live()) == [(0, 7)]
