"""Host buffers on their way to the device: a ring of two, each with a transfer machine and an event of its own.

A source must not be written while its copy is pending (TensorRT-LLM #15546). What a refresh copies lies in one buffer:
it leaves together, with one event behind it, and lands together. An event that was armed again before its waiter had
bound to it would tell of the wrong copy (SGLang #31072): so a buffer is submitted again only after all has landed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from specfsm.errors import PendingTransfer
from specfsm.states.machine import Compiled
from specfsm.states.transfer import TRANSFER, Transfer

__all__ = ["Event", "StagingBuffer", "StagingRing"]


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


class StagingBuffer:
    """Host memory of what one refresh copies, its transfer machine, and the event behind its copies.

    Args:
        name: whom it serves, for errors.
        tensors: the host halves, by the number that each resource has in the ring; pinned where a device reads them.
        event: armed behind the last copy. It is this buffer's alone.

    Attributes:
        notes: for each tensor what a patch noted of its contents; None where nothing is known of them.
    """

    __slots__ = ("event", "machine", "name", "notes", "tensors")

    def __init__(self, name: str, tensors: Sequence[torch.Tensor], event: Event) -> None:
        self.name = name
        self.tensors = tuple(tensors)
        self.notes: list[Any] = [None] * len(self.tensors)
        self.machine = Compiled(TRANSFER, subject=f"the staging buffer of {name}")
        self.event = event

    def fill(self) -> tuple[torch.Tensor, ...]:
        """Take the buffer to write any of it.

        Raises:
            PendingTransfer: its copies have not landed.
        """
        self._require_landed("fill")
        self.machine.fire("fill")
        return self.tensors

    def submit(self) -> None:
        """Its copies were enqueued: arm the event behind them.

        Raises:
            PendingTransfer: it is armed, and what it guards has not landed: it would tell of other copies.
        """
        self._require_landed("submit")
        self.machine.fire("submit")
        self.event.record()

    def abandon(self) -> None:
        self.machine.fire("abandon")

    def poll(self) -> bool:
        """Note copies that have landed; whether the buffer is free."""
        machine = self.machine
        if machine.state is Transfer.IN_FLIGHT and self.event.query():
            machine.fire("land")
        return machine.state is Transfer.FREE

    def wait(self) -> None:
        """Let the host wait for the copies."""
        self.event.synchronize()
        self.poll()

    def _require_landed(self, event: str) -> None:
        if self.machine.state is Transfer.IN_FLIGHT and not self.poll():
            legal = TRANSFER.legal(Transfer.IN_FLIGHT)
            raise PendingTransfer(Transfer.IN_FLIGHT, event, legal=legal, resource=self.name)


class StagingRing:
    """Two staging buffers, so that the host fills one while the device still reads the other.

    What a refresh copies lies in one of them, whatever it is, so one event guards it all.

    Args:
        name: whom it serves, for errors.
        like: a device tensor for each host half: its shape and dtype.
        device: where the copies go; pinned memory is used for a CUDA device.
        event: makes an event.

    Attributes:
        turn: which buffer was taken last.
        waits: how often the host had to wait for a copy.
    """

    DEPTH = 2

    def __init__(
        self, name: str, like: Sequence[torch.Tensor], device: torch.device, event: Callable[[], Event]
    ) -> None:
        pinned = device.type == "cuda"

        def halves() -> list[torch.Tensor]:
            return [torch.zeros(each.shape, dtype=each.dtype, pin_memory=pinned) for each in like]

        self.buffers = [StagingBuffer(name, halves(), event()) for _ in range(self.DEPTH)]
        self.turn = self.waits = 0

    def take(self) -> StagingBuffer:
        """The older of the two, to be filled; waited for if its copies are still pending."""
        self.turn = (self.turn + 1) % self.DEPTH
        buffer = self.buffers[self.turn]
        if buffer.machine.state is Transfer.IN_FLIGHT and not buffer.poll():
            self.waits += 1
            buffer.wait()
        buffer.fill()
        return buffer

    def forget(self) -> None:
        """Whatever the buffers hold, write it whole next time."""
        for buffer in self.buffers:
            buffer.notes = [None] * len(buffer.notes)


def events(device: torch.device) -> Callable[[], Event]:
    """What guards copies to `device`."""
    return (lambda: DeviceEvent(device)) if device.type == "cuda" else Landed
