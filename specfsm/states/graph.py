"""The graph machine: one for each captured graph. A graph may be replayed in READY, and nowhere else."""

from __future__ import annotations

from enum import unique

from specfsm.states.table import Move, States, Table

__all__ = ["GRAPH", "Graph"]


@unique
class Graph(States):
    EMPTY = "empty"
    RECORDING = "recording"
    READY = "ready"
    INVALID = "invalid"


RECORD = Move("record", Graph.RECORDING, why="the capture begins: phases activate, nothing becomes fresh")
SEAL = Move("seal", Graph.READY, why="the capture ended: what it reads is now a contract")
ABANDON = Move("abandon", Graph.EMPTY, why="the capture failed: nothing was kept")
REPLAY = Move("replay", Graph.READY, why="the contract holds: the graph runs as it was recorded")
INVALIDATE = Move("invalidate", Graph.INVALID, why="a buffer it reads was bound elsewhere: its baked address is dead")
RELEASE = Move("release", Graph.EMPTY, why="the engine dropped the graph")

GRAPH = Table(
    name="graph",
    initial=Graph.EMPTY,
    rows=(
        (Graph.EMPTY, (RECORD,)),
        (Graph.RECORDING, (SEAL, ABANDON, INVALIDATE)),
        (Graph.READY, (REPLAY, RECORD, INVALIDATE, RELEASE)),
        (Graph.INVALID, (RECORD, INVALIDATE, RELEASE, ABANDON)),
    ),
)
