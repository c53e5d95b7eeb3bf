"""Poison mode: what is stale holds nothing that could pass for right, so that a use that slipped through is loud.

A buffer that goes stale is filled, once, when a transition is through: with its sentinel where that is negative or the
buffer holds no places, since a kernel that knows the sentinel goes nowhere with it; and with `OUT_OF_RANGE` where the
sentinel is a place of the pool (block 0, say), so that a kernel that checks bounds refuses it, and one that does not
faults instead of reading somebody's page.

What is stale is needed by nobody: its next refresh writes all of it, and a transition that is undone finds it as stale
as before. Left alone is what a graph that replays next reads or writes itself, what is being recorded, and a `Shared`
buffer of the cache that is not served, because the other one's contents are in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specfsm.backends.resource import Buffer, Shared
from specfsm.domain import Domain, Unit
from specfsm.states.resource import bits

if TYPE_CHECKING:
    from specfsm.graph import Graph
    from specfsm.orchestrator import Orchestrator

__all__ = ["OUT_OF_RANGE", "Poison", "poison_of"]

OUT_OF_RANGE = 2**31 - 1
"""Beyond every pool that int32 places can count."""
PLACES = {Unit.SLOT, Unit.PAGE, Unit.TOKEN, Unit.BYTE, Unit.REQUEST}


def poison_of(resource: Buffer) -> int:
    """What a stale buffer of this resource is filled with."""
    space = resource.space
    legal = space is not None and space.unit in PLACES and resource.sentinel >= 0
    return OUT_OF_RANGE if legal else resource.sentinel


class Poison:
    """Fills what is stale.

    Args:
        fsm: whose buffers.

    Raises:
        ValueError: the machine only guards: an engine that refreshes by itself writes before it reports.

    Attributes:
        filled: for each domain, mask of what is stale and was filled since it is.
    """

    def __init__(self, fsm: Orchestrator) -> None:
        if fsm.guard:
            raise ValueError("poison is for a machine that drives: in guard mode the engine writes before it reports")
        self.fsm = fsm
        self.filled = [0 for _ in Domain]
        resources = fsm.backend.resources
        self._values = {place: poison_of(each) for place, each in enumerate(resources) if isinstance(each, Buffer)}
        self._buffers = sum(1 << place for place in self._values)
        self._shared = sum(1 << place for place, each in enumerate(resources) if isinstance(each, Shared))

    def fill(self, graph: Graph | None) -> None:
        """A transition is through: fill what became stale, except what `graph` reads or writes itself."""
        fsm = self.fsm
        if fsm.recording is not None:
            return
        for binding in dict.fromkeys(fsm.bindings):
            side = binding.side
            stale = fsm.ledger.stale[side] & fsm.ledger.bound[side] & self._buffers
            due = stale & ~self.filled[side]
            if graph is not None:
                due &= ~(graph.reads[side] | graph.writes[side])
            if binding is not fsm.switch.active:
                due &= ~self._shared
            for place in bits(due):
                binding.values[place].fill_(self._values[place])
            self.filled[side] = (self.filled[side] | due) & stale
            if due:
                fsm._note_versions(binding, due)
