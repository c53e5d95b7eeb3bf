"""Lives of requests: whose results count, which batches may name them, and when their pages are free."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specfsm.contracts.lifetime import Flight, Life, Lifetime
from specfsm.errors import RetiredRequest
from specfsm.states.phase import Phase
from tests.toys import BATCH, REQUESTS, World, snapshot, world


def living(*requests: int) -> Lifetime:
    lifetime = Lifetime()
    for request in requests or REQUESTS:
        lifetime.begin(request)
    return lifetime


def driven(lifetime: Lifetime) -> World:
    return world(contracts=[lifetime])


class Mark:
    """A device event that the test lets pass."""

    passed = False

    def query(self) -> bool:
        return self.passed


# Results.


def test_results_of_retracted_requests_are_refused_row_by_row() -> None:
    """SGLang #23456: a request is retracted while its step runs. Its row is refused, the others are taken."""
    lifetime = living()
    flight = lifetime.launch(REQUESTS)
    lifetime.retire([3])
    flight.land()
    assert [flight.claim(0), flight.claim(2)] == [7, 9]
    with pytest.raises(RetiredRequest) as caught:
        flight.claim(1)
    assert (caught.value.request, caught.value.generation, caught.value.steps) == (3, 2, (flight.step,))
    assert list(flight.live()) == [(0, 7), (2, 9)]


def test_results_of_a_former_life_are_refused() -> None:
    """The id lives again, but the result was computed for the life before."""
    lifetime = living(7)
    flight = lifetime.launch([7])
    flight.land()
    lifetime.retire([7])
    assert lifetime.fence() == (7,)
    lifetime.begin(7)
    with pytest.raises(RetiredRequest, match="generation 1"):
        flight.claim(0)
    assert lifetime.launch([7]).claim(0) == 7


def test_a_row_that_ends_while_rows_are_taken_is_not_taken() -> None:
    """Taking one row's result may end another request (both share a budget, say)."""
    lifetime = living()
    flight = lifetime.launch(REQUESTS)
    taken = []
    for _, request in flight.live():
        taken.append(request)
        if request == 7:
            lifetime.retire([3])
    assert taken == [7, 9]


# Pages.


def test_pages_are_not_reused_under_a_step_in_flight() -> None:
    """vLLM #45357: a request ends while a step that writes to its pages runs. They are freed when it has landed."""
    lifetime = living()
    first, second = lifetime.launch(REQUESTS), lifetime.launch(REQUESTS)
    lifetime.retire([3])
    assert lifetime.fence() == ()
    first.land()
    assert lifetime.fence() == ()
    with pytest.raises(RetiredRequest) as caught:
        lifetime.require_free(3)
    assert (caught.value.request, caught.value.steps, caught.value.state) == (3, (second.step,), Life.RETIRED)
    second.land()
    assert lifetime.fence() == (3,)
    lifetime.require_free(3)
    assert (lifetime.fence(), lifetime.life(3)) == ((), Life.FREED)


def test_device_event_lands_a_flight_by_itself() -> None:
    lifetime, mark = living(), Mark()
    lifetime.launch(REQUESTS, mark)
    lifetime.retire(REQUESTS)
    assert lifetime.fence() == ()
    mark.passed = True
    assert lifetime.fence() == REQUESTS


def test_flights_without_the_request_do_not_hold_it() -> None:
    lifetime = living()
    lifetime.launch([7, 9])
    lifetime.retire([3, 7])
    assert lifetime.fence() == (3,)


def test_pages_of_a_living_request_are_not_freed() -> None:
    lifetime = living(7)
    with pytest.raises(RetiredRequest, match="it is live, and fence\\(\\) has not named it"):
        lifetime.require_free(7)
    lifetime.require_free(8)  # never began: it holds nothing that anybody guards


def test_active_draft_phase_holds_its_requests() -> None:
    """Nobody launched it, but until it is left it may write: aborting within it frees nothing."""
    lifetime = living()
    at = driven(lifetime)
    at.fsm.target_prepare(BATCH)
    with at.fsm.draft_forward():
        lifetime.retire([3])
        assert lifetime.fence() == ()
        with pytest.raises(RetiredRequest, match="the draft phase that is active may write to them"):
            lifetime.require_free(3)
    assert lifetime.fence() == (3,)


def test_id_begins_again_only_when_its_pages_are_free() -> None:
    lifetime = living(7)
    flight = lifetime.launch([7])
    lifetime.retire([7])
    with pytest.raises(RetiredRequest, match=f"step {flight.step} in flight") as caught:
        lifetime.begin(7)
    assert (caught.value.generation, caught.value.state) == (1, Life.RETIRED)
    flight.land()
    lifetime.fence()
    assert lifetime.begin(7) == 2


# Batches.


@pytest.mark.parametrize("event", ["draft_forward", "draft_step"])
def test_batch_with_a_retired_request_is_refused(event: str) -> None:
    """Nothing changes; without the request the event passes."""
    lifetime = living()
    at = driven(lifetime)
    at.fsm.target_prepare(BATCH)
    if event == "draft_step":
        at.fsm.draft_forward()
    lifetime.retire([9])
    at.fsm.explain()  # takes note of what the managers did
    before = snapshot(at.fsm)
    with pytest.raises(RetiredRequest) as caught:
        getattr(at.fsm, event)(BATCH)
    assert (caught.value.request, caught.value.generation, caught.value.event) == (9, 3, event)
    assert before.differences(snapshot(at.fsm)) == []


def test_batch_with_an_unknown_request_is_refused() -> None:
    """It never began, or its pages are freed: either way its table row is nobody's."""
    at = driven(living(7, 3))
    with pytest.raises(RetiredRequest, match="the batch names request 9, which does not live"):
        at.fsm.target_prepare(BATCH)
    assert at.fsm.state is Phase.IDLE


# What it cannot take.


def test_what_does_not_live_cannot_be_retired_or_launched() -> None:
    """All or nothing: the good ones among them are left as they were."""
    lifetime = living(7)
    with pytest.raises(KeyError, match=r"requests \[8\] do not live"):
        lifetime.retire([7, 8])
    with pytest.raises(KeyError, match=r"requests \[8\] do not live"):
        lifetime.launch([7, 8])
    assert (lifetime.life(7), lifetime.fence()) == (Life.LIVE, ())
    with pytest.raises(ValueError, match="request 7 lives already, since generation 1: retire it first"):
        lifetime.begin(7)
    lifetime.retire([7, 7])
    with pytest.raises(KeyError, match=r"requests \[7\] do not live"):
        lifetime.retire([7])


# Any order.


class Pages(RuleBasedStateMachine):
    """A pool of three pages, one a request. A launched step writes its requests' pages when it lands: whatever the
    order of events, it writes only pages that are still theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.lifetime = Lifetime()
        self.owner: dict[int, int] = {}  # request → life that holds its page
        self.flights: list[tuple[Flight, dict[int, int]]] = []
        self.alive: set[int] = set()

    @rule(request=st.integers(1, 3))
    def begin(self, request: int) -> None:
        if request in self.owner:
            with pytest.raises((ValueError, RetiredRequest)):
                self.lifetime.begin(request)
        else:
            self.owner[request] = self.lifetime.begin(request)
            self.alive.add(request)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def launch(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.alive)), min_size=1, unique=True))
        self.flights.append((self.lifetime.launch(rows), {row: self.owner[row] for row in rows}))

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        flight, wrote = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        flight.land()
        assert all(self.owner.get(request) == life for request, life in wrote.items()), "it wrote another's page"
        assert [request for _, request in flight.live()] == [each for each in wrote if each in self.alive]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.alive)))
        self.lifetime.retire([request])
        self.alive.remove(request)

    @rule()
    def free(self) -> None:
        for request in self.lifetime.fence():
            del self.owner[request]

    @invariant()
    def early_frees_are_refused(self) -> None:
        for request in self.owner:
            with pytest.raises(RetiredRequest):
                self.lifetime.require_free(request)

    def teardown(self) -> None:
        """Nothing is held for ever."""
        self.lifetime.retire(self.alive)
        for flight, _ in self.flights:
            flight.land()
        assert set(self.lifetime.fence()) == set(self.owner)


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
