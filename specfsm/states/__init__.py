"""The four machines, each one table. Nothing in this package imports torch."""

from specfsm.states.graph import GRAPH, Graph
from specfsm.states.phase import PHASE, Phase
from specfsm.states.resource import RESOURCE, Freshness, Ledger
from specfsm.states.table import Move, Requirement, Table
from specfsm.states.transfer import TRANSFER, Transfer

TABLES = {table.name: table for table in (PHASE, RESOURCE, GRAPH, TRANSFER)}
"""Every machine by its name."""

__all__ = [
    "GRAPH",
    "PHASE",
    "RESOURCE",
    "TABLES",
    "TRANSFER",
    "Freshness",
    "Graph",
    "Ledger",
    "Move",
    "Phase",
    "Requirement",
    "Table",
    "Transfer",
]
