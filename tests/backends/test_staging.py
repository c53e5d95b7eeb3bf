"""Host buffers on their way to the device: an early rewrite is refused, and the ring waits instead."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from attrs import define, field

from specfsm.backends.backend import Backend
from specfsm.backends.staging import Flight, Flights, StagingBuffer, StagingRing, events
from specfsm.domain import Domain
from specfsm.errors import IllegalTransition, PendingTransfer
from specfsm.states.transfer import Transfer
from tests.toys import BATCH, RESOURCES, Injected, world

CPU = torch.device("cpu")


@define
class Clock:
    """A device's timeline, moved by the test. A copy lands one tick after it was enqueued."""

    now: int = 0
    events: list[Any] = field(factory=list)

    def event(self) -> Event:
        made = Event(self)
        self.events.append(made)
        return made


@define(eq=False)
class Event:
    clock: Clock
    due: int | None = None
    waited: int = 0

    def record(self) -> None:
        self.due = self.clock.now + 1

    def query(self) -> bool:
        return self.due is None or self.clock.now >= self.due

    def synchronize(self) -> None:
        self.waited += 1
        self.due = None


def buffer() -> StagingBuffer:
    return StagingBuffer("rows", torch.zeros(3, dtype=torch.int32))


def send(device: torch.Tensor, flight: Flight, *staged: StagingBuffer) -> None:
    """Copies, and the event behind them."""
    for each in staged:
        device.copy_(each.tensor)
        each.submit(flight)
    flight.depart()


def test_buffer_is_copied_and_free_once_the_copy_landed() -> None:
    clock = Clock()
    staged, device = buffer(), torch.zeros(3, dtype=torch.int32)
    staged.fill().fill_(7)
    assert staged.machine.state is Transfer.FILLING
    send(device, Flight(clock.event()), staged)
    assert device.tolist() == [7, 7, 7]
    assert staged.machine.state is Transfer.IN_FLIGHT
    assert not staged.poll()
    clock.now += 1
    assert staged.poll()
    assert staged.machine.state is Transfer.FREE


def test_early_rewrite_is_refused() -> None:
    """What the device receives would change; the error names the resource and the buffer is as it was."""
    clock = Clock()
    staged = buffer()
    staged.fill()
    send(torch.zeros(3, dtype=torch.int32), Flight(clock.event()), staged)
    with pytest.raises(PendingTransfer, match="the staging buffer of rows still feeds a copy") as caught:
        staged.fill()
    assert (caught.value.resource, caught.value.state, caught.value.legal) == ("rows", Transfer.IN_FLIGHT, ("land",))
    assert staged.machine.state is Transfer.IN_FLIGHT
    clock.now += 1
    assert staged.fill() is staged.tensor


def test_submit_without_a_fill_is_refused() -> None:
    staged, flight = buffer(), Flight(Clock().event())
    with pytest.raises(IllegalTransition, match="FREE --submit-->"):
        staged.submit(flight)
    assert not flight.buffers


def test_buffer_cannot_be_filled_twice() -> None:
    staged = buffer()
    staged.fill()
    with pytest.raises(IllegalTransition, match="FILLING --fill-->"):
        staged.fill()


def test_abandoned_fill_frees_the_buffer() -> None:
    staged = buffer()
    staged.fill()
    staged.abandon()
    assert staged.machine.state is Transfer.FREE


def test_ring_takes_its_buffers_in_turn_and_waits_for_the_oldest() -> None:
    """The host fills one while the device reads the other; the third fill waits for the first copy."""
    clock = Clock()
    ring, flights = StagingRing("rows", (3,), torch.int32, CPU), Flights(clock.event)
    device = torch.zeros(3, dtype=torch.int32)
    taken = []
    for value in range(3):
        staged = ring.take(value % 2)
        taken.append(staged)
        staged.fill().fill_(value)
        send(device, flights.take(), staged)
    assert len(clock.events) == 2, "an event for each flight: one alone would be re-armed before its waiter"
    assert taken[0] is not taken[1]
    assert taken[2] is taken[0]
    assert ring.waits == 1
    assert [event.waited for event in clock.events] == [1, 0]
    assert device.tolist() == [2, 2, 2]


def test_ring_does_not_wait_for_what_has_landed() -> None:
    clock = Clock()
    ring, flights = StagingRing("rows", (3,), torch.int32, CPU), Flights(clock.event)
    for turn in range(4):
        staged = ring.take(turn % 2)
        staged.fill()
        send(torch.zeros(3, dtype=torch.int32), flights.take(), staged)
        clock.now += 1
    assert ring.waits == 0


def test_flight_lands_whole_and_departs_again_only_then() -> None:
    """Two buffers of one refresh: whoever asks first lands both, and until then the flight carries nothing else."""
    clock = Clock()
    flights = Flights(clock.event)
    pair = buffer(), buffer()
    for staged in pair:
        staged.fill()
    flight = flights.take()
    send(torch.zeros(3, dtype=torch.int32), flight, *pair)
    assert flights.take() is not flight
    clock.now += 1
    assert pair[1].poll()
    assert [staged.machine.state for staged in pair] == [Transfer.FREE] * 2
    assert flights.take() is flight
    assert len(clock.events) == 2


def test_event_of_an_earlier_copy_says_nothing_of_a_later_one() -> None:
    """A ring that wraps: its buffer was carried by one flight, then by another. Only the latest one lands it, and the
    first, which carries another buffer by now, neither frees nor holds it."""
    clock = Clock()
    flights, device = Flights(clock.event), torch.zeros(3, dtype=torch.int32)
    ring, other = StagingRing("rows", (3,), torch.int32, CPU), buffer()
    staged = ring.take(0)
    staged.fill().fill_(1)
    first = flights.take()
    send(device, first, staged)
    clock.now += 1
    assert staged.poll()
    other.fill()
    send(device, first, other)  # the same event, armed anew
    ring.take(1)
    assert ring.take(0) is staged, "two deep"
    assert ring.waits == 0
    staged.fill().fill_(2)
    second = flights.take()
    assert second is not first
    clock.now += 1
    send(device, second, staged)
    assert (other.poll(), staged.poll()) == (True, False)
    with pytest.raises(PendingTransfer):
        staged.fill()
    clock.now += 1
    assert staged.fill() is staged.tensor


@pytest.mark.parametrize("landed", [True, False])
def test_waiting_lands_exactly_what_was_waited_for(landed: bool) -> None:
    """The wrapped ring waits for the flight of its own buffer; a flight that left later stays in the air."""
    clock = Clock()
    flights, device = Flights(clock.event), torch.zeros(3, dtype=torch.int32)
    ring = StagingRing("rows", (3,), torch.int32, CPU)
    pair = [ring.take(0), ring.take(1)]
    for staged in pair:
        staged.fill()
        send(device, flights.take(), staged)
        clock.now += landed
    assert ring.take(0) is pair[0]
    states = [Transfer.FREE, Transfer.IN_FLIGHT]
    assert [each.machine.state for each in pair] == states
    assert (ring.waits, [event.waited for event in clock.events]) == ((0, [0, 0]) if landed else (1, [1, 0]))


def test_an_armed_event_takes_no_further_copy() -> None:
    """SGLang #31072: until it has landed nothing joins a flight that has departed, nor is its event armed again."""
    clock = Clock()
    flight, first, second = Flight(clock.event()), buffer(), buffer()
    first.fill()
    send(torch.zeros(3, dtype=torch.int32), flight, first)
    second.fill()
    for refused in (lambda: second.submit(flight), flight.depart):
        with pytest.raises(PendingTransfer, match="the event behind the copy of rows was armed already"):
            refused()
        assert (second.machine.state, second.flight, clock.events[0].due) == (Transfer.FILLING, None, 1)
    clock.now += 1
    assert flight.poll()
    second.submit(flight)
    flight.depart()
    assert clock.events[0].due == 2


def test_copies_within_the_host_land_at_once() -> None:
    ring = StagingRing("rows", (3,), torch.int32, CPU)
    staged = ring.take(0)
    staged.fill()
    send(torch.zeros(3, dtype=torch.int32), Flights(events(CPU)).take(), staged)
    assert staged.poll()
    assert not staged.tensor.is_pinned()


# In the orchestrator.


def test_orchestrator_waits_instead_of_overwriting() -> None:
    """Three refreshes while no copy lands: the third waits for the first, once for all that it copied."""
    clock = Clock()
    at = world(event=clock.event)
    for _ in range(3):
        at.prepare()
        at.target.swap()
    rings = at.fsm.bindings[Domain.TARGET].rings
    assert {at.fsm.ledger.names[place]: ring.waits for place, ring in rings.items()} == {"base": 1, "rows": 0}
    at.prepare()
    assert torch.equal(at.metadata.rows, at.metadata.host_rows)


def test_nobody_may_rewrite_what_the_orchestrator_has_in_the_air() -> None:
    """Every buffer of the last refresh, until the clock has moved on; then each may be filled."""
    clock = Clock()
    at = world(event=clock.event)
    at.round_trip()
    rings = [ring for binding in at.fsm.bindings for ring in binding.rings.values()]
    flying = [each for ring in rings for each in ring.buffers if not each.poll()]
    assert len(flying) >= len(rings) > 2
    for staged in flying:
        sent = staged.tensor.clone()
        with pytest.raises(PendingTransfer, match=f"the staging buffer of {staged.resource} still feeds a copy"):
            staged.fill()
        assert torch.equal(staged.tensor, sent)
    clock.now += 1
    for staged in flying:
        assert staged.fill() is staged.tensor
        staged.abandon()


def test_failing_fill_leaves_the_buffer_free() -> None:
    """No copy was started: the same fill succeeds afterwards."""
    at = world()
    at.fuse.arm("fill rows", late=True)
    with pytest.raises(Injected):
        at.prepare()
    at.fuse.disarm()
    ring = at.fsm.bindings[Domain.TARGET].rings[at.fsm.ledger.index["rows"]]
    assert [each.machine.state for each in ring.buffers] == [Transfer.FREE] * 2
    at.prepare()


def decline(_: Any, host: torch.Tensor) -> None:
    """Writes, then thinks better of it."""
    host.fill_(9)


def test_declined_fill_sends_nothing() -> None:
    """The device keeps what it had."""
    resources = tuple(attrs.evolve(each, fill=decline) if each.name == "rows" else each for each in RESOURCES)
    at = world(Backend("toy", resources, {"adapter": "the adapter"}), check="off")
    at.prepare(BATCH)
    assert at.metadata.rows.tolist() == [-1] * 5
    ring = at.fsm.bindings[Domain.TARGET].rings[at.fsm.ledger.index["rows"]]
    assert [each.machine.state for each in ring.buffers] == [Transfer.FREE] * 2
