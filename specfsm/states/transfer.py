"""The transfer machine: one for each staging buffer. A buffer whose copy is in flight may not be filled."""

from __future__ import annotations

from enum import unique

from specfsm.states.table import Move, States, Table

__all__ = ["TRANSFER", "Transfer"]


@unique
class Transfer(States):
    FREE = "free"
    FILLING = "filling"
    IN_FLIGHT = "in_flight"


FILL = Move("fill", Transfer.FILLING, why="the host takes the buffer to write it")
ABANDON = Move("abandon", Transfer.FREE, why="the write failed: no copy was started")
SUBMIT = Move("submit", Transfer.IN_FLIGHT, why="the copy was enqueued behind an event of its own")
LAND = Move("land", Transfer.FREE, why="the event passed: the device has what the buffer held")

TRANSFER = Table(
    name="transfer",
    initial=Transfer.FREE,
    rows=(
        (Transfer.FREE, (FILL,)),
        (Transfer.FILLING, (SUBMIT, ABANDON)),
        (Transfer.IN_FLIGHT, (LAND,)),
    ),
)
