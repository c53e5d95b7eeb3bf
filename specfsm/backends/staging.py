"""Host buffers on their way to the device: a ring of two for each resource, each buffer with a transfer machine.

A source must not be written while its copy is pending (TensorRT-LLM #15546). What a refresh copies leaves together, in
a *flight* with one event behind it, and lands together. An event that was armed again before its waiter had bound to it
would tell of the wrong copy (SGLang #31072): so a flight departs again only after all that it carried has landed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from specfsm.errors import PendingTransfer
from specfsm.states.machine import Compiled
from specfsm.states.transfer import TRANSFER, Transfer

__all__ = ["Event", "Flight", "Flights", "StagingBuffer", "StagingRing"]


class Event(Protocol):
    """What guards one copy; `torch.cuda.Event` is one."""

    def record(self) -> Any: ...
    def query(self) -> bool: ...
    def synchronize(self) -> Any: ...


class DeviceEvent:
    """A CUDA event on whatever stream is current. The stream's object is kept: making it takes longer than recording.

    Args:
        device: whose current stream is meant.
    """

    def __init__(self, device: torch.device) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
        self.query, self.synchronize, self._record = event.query, event.synchronize, event.record
        self.device = device
        self.streams: dict[int, Any] = {}

    def record(self) -> None:
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        stream = self.streams.get(handle)
        if stream is None:
            stream = self.streams[handle] = torch.cuda.current_stream(self.device)
        self._record(stream)


class Landed:
    """The event of a copy that is complete when it returns, as host-to-host copies are."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class Flight:
    """The copies of one refresh, guarded by one event.

    Args:
        event: armed behind the last copy.

    Attributes:
        buffers: the sources of those copies, until they have landed.
        departed: whether the event is armed behind them.
    """

    __slots__ = ("buffers", "departed", "event")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.buffers: list[StagingBuffer] = []
        self.departed = False

    def depart(self) -> None:
        """Arm the event behind the copies that were enqueued.

        Raises:
            PendingTransfer: it is armed, and what it guards has not landed: it would tell of other copies.
        """
        self.require_free("depart")
        self.event.record()
        self.departed = bool(self.buffers)

    def require_free(self, event: str) -> None:
        """Refuse `event` while the event is armed behind copies that have not landed."""
        if self.departed:
            state, first = Transfer.IN_FLIGHT, self.buffers[0]
            raise PendingTransfer(state, event, legal=TRANSFER.legal(state), resource=first.resource)

    def poll(self) -> bool:
        """Whether the copies are done; if so, every buffer has landed."""
        if not self.event.query():
            return False
        for buffer in self.buffers:
            buffer.machine.fire("land")
        self.buffers.clear()
        self.departed = False
        return True

    def wait(self) -> None:
        """Let the host wait for the copies."""
        self.event.synchronize()
        self.poll()


class Flights:
    """The flights of one domain: as many as are under way at once.

    Args:
        make: makes an event.
    """

    def __init__(self, make: Callable[[], Event]) -> None:
        self.make = make
        self.all: list[Flight] = []

    def take(self) -> Flight:
        """One that carries nothing."""
        for flight in self.all:
            if not flight.buffers:
                return flight
        self.all.append(Flight(self.make()))
        return self.all[-1]


class StagingBuffer:
    """One host buffer and its transfer machine.

    Args:
        resource: whom it serves, for errors.
        tensor: the host memory, pinned where a device reads it.

    Attributes:
        note: what a patch noted of the contents; None where nothing is known of them.
    """

    __slots__ = ("flight", "machine", "note", "resource", "tensor")

    def __init__(self, resource: str, tensor: torch.Tensor) -> None:
        self.resource = resource
        self.tensor = tensor
        self.note: Any = None
        self.machine = Compiled(TRANSFER, subject=f"the staging buffer of {resource}")
        self.flight: Flight | None = None

    def fill(self) -> torch.Tensor:
        """Take the buffer to write it.

        Raises:
            PendingTransfer: its copy has not landed.
        """
        if self.machine.state is Transfer.IN_FLIGHT and not self.poll():
            raise PendingTransfer(
                Transfer.IN_FLIGHT, "fill", legal=TRANSFER.legal(Transfer.IN_FLIGHT), resource=self.resource
            )
        self.machine.fire("fill")
        return self.tensor

    def submit(self, flight: Flight) -> None:
        """Its copy was enqueued: `flight`, which departs next, guards it.

        Raises:
            PendingTransfer: the flight has departed: its event was armed before this copy.
        """
        if flight.departed:
            flight.require_free("submit")
        self.machine.fire("submit")
        self.flight = flight
        flight.buffers.append(self)

    def abandon(self) -> None:
        self.machine.fire("abandon")

    def poll(self) -> bool:
        """Note a copy that has landed; whether the buffer is free."""
        if self.machine.state is Transfer.IN_FLIGHT:
            assert self.flight is not None, "what is in flight has a flight"
            self.flight.poll()
        return self.machine.state is Transfer.FREE


class StagingRing:
    """Two staging buffers, so that the host fills one while the device still reads the other.

    Whoever fills says which: all rings of a domain turn together, so that what a refresh copies lies on one side.

    Args:
        resource: whom it serves, for errors.
        shape, dtype: of the host half, the same as the device's.
        device: where the copies go; pinned memory is used for a CUDA device.

    Attributes:
        waits: how often the host had to wait for a copy.
    """

    DEPTH = 2

    def __init__(self, resource: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.buffers = [
            StagingBuffer(resource, torch.zeros(shape, dtype=dtype, pin_memory=pinned)) for _ in range(self.DEPTH)
        ]
        self.waits = 0

    def take(self, side: int) -> StagingBuffer:
        """The buffer of this side, waited for if its copy is still pending."""
        buffer = self.buffers[side]
        if buffer.machine.state is Transfer.IN_FLIGHT and not buffer.poll():
            assert buffer.flight is not None, "what is in flight has a flight"
            self.waits += 1
            buffer.flight.wait()
        return buffer

    def forget(self) -> None:
        """Whatever the buffers hold, write them whole next time."""
        for buffer in self.buffers:
            buffer.note = None


def events(device: torch.device) -> Callable[[], Event]:
    """What guards copies to `device`."""
    return (lambda: DeviceEvent(device)) if device.type == "cuda" else Landed
