"""Host buffers on their way to the device: an early rewrite is refused, and the ring waits instead."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from attrs import define, field

from specfsm.backends.backend import Backend
from specfsm.backends.resource import Staged
from specfsm.backends.staging import StagingBuffer, StagingRing, events
from specfsm.errors import IllegalTransition, PendingTransfer
from specfsm.states.transfer import Transfer
from tests.toys import BATCH, RESOURCES, Injected, world

CPU = torch.device("cpu")
ROWS = torch.zeros(3, dtype=torch.int32)


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


def buffer(clock: Clock, name: str = "rows") -> StagingBuffer:
    return StagingBuffer(name, [torch.zeros(3, dtype=torch.int32)], clock.event())


def send(device: torch.Tensor, staged: StagingBuffer) -> None:
    """The copy, and the event behind it."""
    device.copy_(staged.tensors[0])
    staged.submit()


def ring(clock: Clock) -> StagingRing:
    return StagingRing("rows", [ROWS], CPU, clock.event)


def test_buffer_is_copied_and_free_once_the_copy_landed() -> None:
    clock = Clock()
    staged, device = buffer(clock), torch.zeros(3, dtype=torch.int32)
    staged.fill()[0].fill_(7)
    assert staged.machine.state is Transfer.FILLING
    send(device, staged)
    assert device.tolist() == [7, 7, 7]
    assert staged.machine.state is Transfer.IN_FLIGHT
    assert not staged.poll()
    clock.now += 1
    assert staged.poll()
    assert staged.machine.state is Transfer.FREE


def test_early_rewrite_is_refused() -> None:
    """What the device receives would change; the error names whom it serves and the buffer is as it was."""
    clock = Clock()
    staged = buffer(clock)
    staged.fill()
    send(ROWS.clone(), staged)
    with pytest.raises(PendingTransfer, match="the staging buffer of rows still feeds a copy") as caught:
        staged.fill()
    assert (caught.value.resource, caught.value.state, caught.value.legal) == ("rows", Transfer.IN_FLIGHT, ("land",))
    assert staged.machine.state is Transfer.IN_FLIGHT
    clock.now += 1
    assert staged.fill() is staged.tensors


def test_submit_without_a_fill_is_refused() -> None:
    clock = Clock()
    staged = buffer(clock)
    with pytest.raises(IllegalTransition, match="FREE --submit-->"):
        staged.submit()
    assert clock.events[0].due is None


def test_buffer_cannot_be_filled_twice() -> None:
    staged = buffer(Clock())
    staged.fill()
    with pytest.raises(IllegalTransition, match="FILLING --fill-->"):
        staged.fill()


def test_abandoned_fill_frees_the_buffer() -> None:
    staged = buffer(Clock())
    staged.fill()
    staged.abandon()
    assert staged.machine.state is Transfer.FREE


def test_ring_takes_its_buffers_in_turn_and_waits_for_the_oldest() -> None:
    """The host fills one while the device reads the other; the third fill waits for the first copy."""
    clock = Clock()
    rings, device, taken = ring(clock), ROWS.clone(), []
    for value in range(3):
        staged = rings.take()
        taken.append(staged)
        staged.tensors[0].fill_(value)
        send(device, staged)
    assert len(clock.events) == 2, "an event for each buffer: one alone would be re-armed before its waiter"
    assert taken[0] is not taken[1]
    assert taken[2] is taken[0]
    assert rings.waits == 1
    assert sorted(event.waited for event in clock.events) == [0, 1]
    assert device.tolist() == [2, 2, 2]


def test_ring_does_not_wait_for_what_has_landed() -> None:
    clock = Clock()
    rings = ring(clock)
    for _ in range(4):
        send(ROWS.clone(), rings.take())
        clock.now += 1
    assert rings.waits == 0


@pytest.mark.parametrize("landed", [True, False])
def test_waiting_lands_exactly_what_was_waited_for(landed: bool) -> None:
    """The ring that wraps waits for the copies of its own buffer; what left later stays in the air."""
    clock = Clock()
    rings = ring(clock)
    pair = []
    for _ in range(2):
        pair.append(rings.take())
        send(ROWS.clone(), pair[-1])
        clock.now += landed
    assert rings.take() is pair[0]
    assert [each.machine.state for each in pair] == [Transfer.FILLING, Transfer.IN_FLIGHT]
    assert (rings.waits, sum(event.waited for event in clock.events)) == ((0, 0) if landed else (1, 1))


def test_an_armed_event_takes_no_further_copy() -> None:
    """SGLang #31072: until its copies have landed a buffer is not submitted again, nor is its event armed."""
    clock = Clock()
    staged = buffer(clock)
    staged.fill()
    send(ROWS.clone(), staged)
    due = clock.events[0].due
    with pytest.raises(PendingTransfer, match="the event behind the copy of rows was armed already"):
        staged.submit()
    assert (staged.machine.state, clock.events[0].due) == (Transfer.IN_FLIGHT, due)


def test_copies_within_the_host_land_at_once() -> None:
    rings = StagingRing("rows", [ROWS], CPU, events(CPU))
    staged = rings.take()
    send(ROWS.clone(), staged)
    assert staged.poll()
    assert not staged.tensors[0].is_pinned()


def test_forgotten_notes_are_gone_on_either_side() -> None:
    rings = ring(Clock())
    for each in rings.buffers:
        each.notes[0] = "noted"
    rings.forget()
    assert [each.notes for each in rings.buffers] == [[None], [None]]


# In the orchestrator.


def test_orchestrator_waits_instead_of_overwriting() -> None:
    """Three refreshes while no copy lands: the third waits for the first, once for all that it copied."""
    clock = Clock()
    at = world(event=clock.event)
    for _ in range(3):
        at.prepare()
        at.target.swap()
    assert at.fsm.refresher.ring.waits == 1
    at.prepare()
    assert torch.equal(at.metadata.rows, at.metadata.host_rows)


def test_nobody_may_rewrite_what_the_orchestrator_has_in_the_air() -> None:
    """Every buffer of the last refreshes, until the clock has moved on; then each may be filled."""
    clock = Clock()
    at = world(event=clock.event)
    at.round_trip()
    flying = [each for each in at.fsm.refresher.ring.buffers if not each.poll()]
    assert len(flying) == 2, "the target's and the draft's"
    for staged in flying:
        sent = [each.clone() for each in staged.tensors]
        with pytest.raises(PendingTransfer, match="the staging buffer of toy still feeds a copy"):
            staged.fill()
        assert all(map(torch.equal, staged.tensors, sent))
    clock.now += 1
    for staged in flying:
        assert staged.fill() is staged.tensors
        staged.abandon()


def test_failing_fill_leaves_the_buffer_free() -> None:
    """No copy was started: the same fill succeeds afterwards."""
    at = world()
    at.fuse.arm("fill rows", late=True)
    with pytest.raises(Injected):
        at.prepare()
    at.fuse.disarm()
    assert [each.machine.state for each in at.fsm.refresher.ring.buffers] == [Transfer.FREE] * 2
    at.prepare()


def decline(_: Any, host: torch.Tensor) -> None:
    """Writes, then thinks better of it."""
    host.fill_(9)


def test_declined_fill_sends_nothing() -> None:
    """The device keeps what it had."""
    resources = tuple(attrs.evolve(each, fill=decline) if isinstance(each, Staged) else each for each in RESOURCES)
    at = world(Backend("toy", resources, {"adapter": "the adapter"}), check="off")
    at.prepare(BATCH)
    assert at.metadata.rows.tolist() == [-1] * 5
    assert at.metadata.host_rows is None
    assert [each.machine.state for each in at.fsm.refresher.ring.buffers] == [Transfer.FREE] * 2
