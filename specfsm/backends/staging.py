"""Host buffers on their way to the device: a ring of two, each with a transfer machine and an event of its own.

A source must not be written while its copy is pending (TensorRT-LLM #15546), and one reusable event for the whole ring
would be re-armed before its waiter had bound to it (SGLang #31072): so each buffer has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from specfsm.errors import IllegalTransition, PendingTransfer
from specfsm.states.machine import Compiled
from specfsm.states.transfer import TRANSFER, Transfer

__all__ = ["Event", "StagingBuffer", "StagingRing"]


class Event(Protocol):
    """What guards one copy; `torch.cuda.Event` is one."""

    def record(self) -> Any: ...
    def query(self) -> bool: ...
    def synchronize(self) -> Any: ...


class Landed:
    """The event of a copy that is complete when it returns, as host-to-host copies are."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class StagingBuffer:
    """One host buffer, its transfer machine and its event.

    Args:
        resource: whom it serves, for errors.
        tensor: the host memory, pinned where a device reads it.
        event: guards the copy that reads `tensor`.
    """

    def __init__(self, resource: str, tensor: torch.Tensor, event: Event) -> None:
        self.resource = resource
        self.tensor = tensor
        self.event = event
        self.machine = Compiled(TRANSFER)

    def fill(self) -> torch.Tensor:
        """Take the buffer to write it.

        Raises:
            PendingTransfer: its copy has not landed.
        """
        self.poll()
        if self.machine.state is Transfer.IN_FLIGHT:
            raise PendingTransfer(
                Transfer.IN_FLIGHT, "fill", legal=TRANSFER.legal(Transfer.IN_FLIGHT), resource=self.resource
            )
        self.machine.fire("fill")
        return self.tensor

    def submit(self, destination: torch.Tensor) -> None:
        """Enqueue the copy to `destination` and arm the event behind it."""
        if self.machine.state is not Transfer.FILLING:
            raise IllegalTransition(self.machine.state, "submit", legal=TRANSFER.legal(self.machine.state))
        destination.copy_(self.tensor, non_blocking=True)
        self.event.record()
        self.machine.fire("submit")
        self.poll()

    def abandon(self) -> None:
        self.machine.fire("abandon")

    def poll(self) -> bool:
        """Note a copy that has landed; whether the buffer is free."""
        if self.machine.state is Transfer.IN_FLIGHT and self.event.query():
            self.machine.fire("land")
        return self.machine.state is Transfer.FREE


class StagingRing:
    """Two staging buffers taken in turn, so that the host fills one while the device still reads the other.

    Args:
        resource: whom it serves, for errors.
        shape, dtype: of the host half, the same as the device's.
        device: where the copies go; pinned memory and CUDA events are used for a CUDA device.
        event: makes an event; for tests.
    """

    DEPTH = 2

    def __init__(
        self,
        resource: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        event: Callable[[], Event] | None = None,
    ) -> None:
        on_cuda = device.type == "cuda"
        make = event or (torch.cuda.Event if on_cuda else Landed)
        self.buffers = [
            StagingBuffer(resource, torch.zeros(shape, dtype=dtype, pin_memory=on_cuda), make())
            for _ in range(self.DEPTH)
        ]
        self.turn = 0
        self.waits = 0

    def take(self) -> StagingBuffer:
        """The next buffer in turn, waited for if its copy is still pending; `waits` counts how often that happened."""
        buffer = self.buffers[self.turn]
        if not buffer.poll():
            self.waits += 1
            buffer.event.synchronize()
        self.turn = (self.turn + 1) % self.DEPTH
        return buffer
