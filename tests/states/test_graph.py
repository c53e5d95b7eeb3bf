"""The graph machine: a graph replays in READY and nowhere else."""

from __future__ import annotations

import pytest

from specfsm.errors import IllegalTransition
from specfsm.states.graph import GRAPH, Graph
from specfsm.states.machine import Compiled


def test_only_ready_replays() -> None:
    """An invalid graph's baked addresses are dead, and a recording one has run nothing."""
    assert [state for state, move in GRAPH.moves() if move.event == "replay"] == [Graph.READY]


def test_life_of_a_graph() -> None:
    """Recorded, replayed, invalidated by a rebinding, recorded again."""
    machine = Compiled(GRAPH)
    for event in ("record", "seal", "replay", "replay", "invalidate"):
        machine.fire(event)
    with pytest.raises(IllegalTransition, match="INVALID accepts record, invalidate, release, abandon"):
        machine.fire("replay")
    for event in ("record", "seal", "replay", "release"):
        machine.fire(event)
    assert machine.state is Graph.EMPTY


def test_rebinding_during_the_capture_makes_the_recording_useless() -> None:
    """A buffer that is bound elsewhere while it is recorded cannot be sealed."""
    machine = Compiled(GRAPH)
    machine.fire("record")
    machine.fire("invalidate")
    with pytest.raises(IllegalTransition):
        machine.fire("seal")
