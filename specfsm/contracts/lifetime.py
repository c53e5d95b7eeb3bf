"""Lifetimes: whose results count, and when pages may be freed.

A request id is a name that is used again; a *generation* is one life under it. A phase that was launched and whose
results were not taken yet is a *flight*: it may write to the pages of every request that it was launched with, so none
of them is freed before it lands, and a result counts only for the generation that it was computed for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from enum import Enum, unique
from itertools import count
from typing import TYPE_CHECKING, ClassVar, Protocol

from attrs import define, field

from specfsm.domain import Batch, Domain
from specfsm.errors import RetiredRequest
from specfsm.states.phase import PHASE, Phase

if TYPE_CHECKING:
    from specfsm.orchestrator import Orchestrator

__all__ = ["Done", "Flight", "Life", "Lifetime"]


@unique
class Life(Enum):
    LIVE = "live"
    RETIRED = "retired"  # finished, preempted or aborted: nothing of it counts any more, but its pages may be written
    FREED = "freed"  # the fence has passed: its pages are anybody's, and its id may begin again


class Done(Protocol):
    """Tells whether the device has passed a point: a `torch.cuda.Event`, say."""

    def query(self) -> bool: ...


@define(eq=False)
class Flight:
    """One launched phase. `land` it when its results have been read; its rows are then taken with `claim` or `live`.

    Args:
        step: counts the flights of a `Lifetime`.
        rows: (request, generation) of each row.
    """

    lifetime: Lifetime = field(repr=False)
    step: int
    rows: tuple[tuple[int, int], ...]
    done: Done | None = field(default=None, repr=False)
    _landed: bool = False

    @property
    def landed(self) -> bool:
        """Whether nothing of it can write any more."""
        return self._landed or (self.done is not None and self.done.query())

    def land(self) -> None:
        """The host has waited for it."""
        self._landed = True

    def claim(self, row: int) -> int:
        """The request whose result stands in `row`.

        Raises:
            RetiredRequest: that life is over. The other rows are as good as before.
        """
        request, generation = self.rows[row]
        if not self.lifetime.counts(request, generation):
            raise RetiredRequest(Life.RETIRED, "claim", request=request, generation=generation, steps=(self.step,))
        return request

    def live(self) -> Iterator[tuple[int, int]]:
        """(row, request) of every row whose result counts, looked up as it is reached."""
        for row, (request, generation) in enumerate(self.rows):
            if self.lifetime.counts(request, generation):
                yield row, request


class Lifetime:
    """Refuses batches with requests that do not live, results of lives that are over, and pages freed too early.

    A request begins with `begin`, ends with `retire`, and its pages are freed when `fence` names it. What runs behind
    the host's back is launched (`launch`) and landed. The draft phase of the orchestrator counts as in flight while it
    is active, without being launched.
    """

    events: ClassVar[tuple[str, ...]] = ("target_prepare", "draft_forward", "draft_step", "draft_replay")

    def __init__(self) -> None:
        self._living: dict[int, int] = {}  # request → its generation
        self._retired: dict[int, int] = {}  # the same of those whose pages are not freed yet
        self._flights: list[Flight] = []
        self._generations, self._steps = count(1), count(1)
        self._fsm: weakref.ref[Orchestrator] | None = None

    def admit(self, fsm: Orchestrator, event: str, batch: Batch | None) -> None:
        """Refuse a batch that names a request which does not live.

        Raises:
            RetiredRequest: with the first such request.
        """
        self._fsm = weakref.ref(fsm)
        if batch is None or all(map(self._living.__contains__, batch.request_ids)):
            return
        request = next(each for each in batch.request_ids if each not in self._living)
        move, generation = PHASE.find(fsm.state, event), self._retired.get(request)
        raise RetiredRequest(fsm.state, event, move.to if move else None, request=request, generation=generation)

    # A request's life.

    def begin(self, request: int) -> int:
        """A request starts to live; its generation.

        Raises:
            ValueError: it lives already.
            RetiredRequest: a former life under this id still has pages that may be written.
        """
        if request in self._living:
            since = self._living[request]
            raise ValueError(f"request {request} lives already, since generation {since}: retire it first")
        if request in self._retired:
            raise self._refusal("begin", request)
        generation = self._living[request] = next(self._generations)
        return generation

    def retire(self, request_ids: Iterable[int]) -> None:
        """These requests finished, or were preempted or aborted: from now on no result of theirs counts.

        Raises:
            KeyError: one of them does not live; none is retired.
        """
        requests = tuple(dict.fromkeys(request_ids))
        gone = [each for each in requests if each not in self._living]
        if gone:
            raise KeyError(f"requests {gone} do not live: they never began, or were retired already; retire each once")
        for request in requests:
            self._retired[request] = self._living.pop(request)

    def counts(self, request: int, generation: int) -> bool:
        """Whether this life of the request goes on."""
        return self._living.get(request) == generation

    def life(self, request: int) -> Life:
        """Where the request is in its life. One that never began counts as freed: it has no pages."""
        if request in self._living:
            return Life.LIVE
        return Life.RETIRED if request in self._retired else Life.FREED

    # What is in flight.

    def launch(self, request_ids: Iterable[int], done: Done | None = None) -> Flight:
        """A phase over these requests is on its way; it may write to their pages until it lands.

        Args:
            done: tells by itself when it is over; without one, `Flight.land` says so.

        Raises:
            KeyError: one of them does not live.
        """
        requests = tuple(request_ids)
        gone = [each for each in requests if each not in self._living]
        if gone:
            raise KeyError(
                f"requests {gone} do not live: nothing is launched for them; leave them out, or begin() them"
            )
        rows = tuple((each, self._living[each]) for each in requests)
        flight = Flight(self, next(self._steps), rows, done)
        self._flights.append(flight)
        return flight

    def fence(self) -> tuple[int, ...]:
        """The retired requests whose pages may be freed now: nothing in flight can write to them. Each is told once."""
        self._flights = [flight for flight in self._flights if not flight.landed]
        passed = tuple(
            request for request in self._retired if not self._holders(request) and request not in self._drafting()
        )
        for request in passed:
            del self._retired[request]
        return passed

    def require_free(self, request: int, ends: bool = True) -> None:
        """What a cache asks before it frees a request's pages.

        Args:
            ends: the request is over, so that `fence` must have named it. False: it lives on and gets other pages, so
                it is enough that nothing in flight may write to these.

        Raises:
            RetiredRequest: it lives, or something in flight may still write to its pages.
        """
        if self.life(request) is Life.FREED:
            return
        if ends or self._holders(request) or request in self._drafting():
            raise self._refusal("free", request)

    def _refusal(self, event: str, request: int) -> RetiredRequest:
        return RetiredRequest(
            self.life(request),
            event,
            request=request,
            generation=self._living.get(request, self._retired.get(request)),
            steps=self._holders(request),
            drafting=request in self._drafting(),
        )

    def _holders(self, request: int) -> tuple[int, ...]:
        """The steps in flight that were launched with this request, in any life of it."""
        return tuple(
            flight.step
            for flight in self._flights
            if not flight.landed and any(row[0] == request for row in flight.rows)
        )

    def _drafting(self) -> tuple[int, ...]:
        """The requests of the draft phase, while it is active."""
        fsm = None if self._fsm is None else self._fsm()
        if fsm is None or fsm.state not in (Phase.DRAFT_FORWARD, Phase.DRAFT_REPLAY):
            return ()
        batches = (fsm.batch(domain) for domain in Domain)
        return tuple(request for batch in batches if batch is not None for request in batch.request_ids)
