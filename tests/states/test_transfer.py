"""The transfer machine: a buffer whose copy is in flight may not be filled."""

from __future__ import annotations

import pytest

from specfsm.errors import IllegalTransition
from specfsm.states.machine import Compiled
from specfsm.states.transfer import TRANSFER, Transfer


def test_in_flight_may_only_land() -> None:
    """Writing the source of a pending copy changes what the device receives."""
    assert TRANSFER.legal(Transfer.IN_FLIGHT) == ("land",)


def test_failed_write_starts_no_copy() -> None:
    machine = Compiled(TRANSFER)
    machine.fire("fill")
    machine.fire("abandon")
    assert machine.state is Transfer.FREE
    with pytest.raises(IllegalTransition):
        machine.fire("submit")
