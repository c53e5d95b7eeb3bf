"""The one shape that all four machines are declared in, and the checks that run when a table is built.

The rules:

1. every transition is a row of a table; no code changes a state outside it;
2. no guards: different outcomes are different events, and what a row must find true is declared in its ``requires``;
3. closed, no (state, event) twice, every state reachable, no trap but declared terminals, a state without exits has
   an empty row;
4. a refused event changes nothing.

The rows are a tuple, not a dict: a dict literal drops a repeated key without a word, and rule 3 could not see it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum, unique

from attrs import field, frozen

from specfsm.domain import Domain
from specfsm.errors import InvalidTable

__all__ = ["Move", "Requirement", "States", "Table"]


class States(Enum):
    """Base of every machine's states. Hashed by identity in C: Enum's own hash is a Python call on the hot path."""

    __hash__ = object.__hash__


@unique
class Requirement(Enum):
    """What a row must find true before it may complete. Each is answered by one contract."""

    FRESH_TARGET = "target fresh"
    FRESH_DRAFT = "draft fresh"
    TARGET_INTACT = "target intact"
    GRAPH = "graph contract"


OF_DOMAIN = {
    Requirement.FRESH_TARGET: Domain.TARGET,
    Requirement.TARGET_INTACT: Domain.TARGET,
    Requirement.FRESH_DRAFT: Domain.DRAFT,
}
"""The domain that a requirement speaks of, where it speaks of one."""


@frozen
class Move:
    """One row: an event, where it leads, and what the protocol does on the way.

    Args:
        event: name of the event; also the method's name and the diagram's label.
        to: the state it leads to.
        why: reason for the arc, for documents and diagrams.
        activates: the domain whose bindings the metadata carries afterwards; None leaves them.
        refreshes: domains in which whatever is stale is refreshed.
        ahead: a domain in which it is refreshed along, if the engine says what the next phase there will run. The row
            requires nothing of it: that phase does.
        requires: what must hold before the row may complete.
    """

    event: str
    to: States
    why: str = field(default="", kw_only=True)
    activates: Domain | None = field(default=None, kw_only=True)
    refreshes: tuple[Domain, ...] = field(default=(), kw_only=True)
    ahead: Domain | None = field(default=None, kw_only=True)
    requires: tuple[Requirement, ...] = field(default=(), kw_only=True)


Rows = tuple[tuple[States, tuple[Move, ...]], ...]


@frozen
class Table:
    """A machine as literal data. Building one checks it; `InvalidTable` lists every offender at once."""

    name: str
    initial: States
    rows: Rows = field(repr=False)
    terminal: tuple[States, ...] = ()

    def __attrs_post_init__(self) -> None:
        offenders = [offence for check in CHECKS for offence in check(self)]
        if offenders:
            raise InvalidTable(self.name, tuple(offenders))

    @property
    def states(self) -> tuple[States, ...]:
        return tuple(type(self.initial))

    @property
    def events(self) -> tuple[str, ...]:
        """Every event, in order of first appearance."""
        return tuple(dict.fromkeys(move.event for _, move in self.moves()))

    def moves(self) -> Iterator[tuple[States, Move]]:
        """Every (state, move) of the table, row by row."""
        for state, row in self.rows:
            for move in row:
                yield state, move

    def legal(self, state: States) -> tuple[str, ...]:
        """The events that `state` accepts."""
        return tuple(move.event for source, move in self.moves() if source is state)

    def find(self, state: States, event: str) -> Move | None:
        """The row of (state, event), or None where the event is refused."""
        return next((move for source, move in self.moves() if source is state and move.event == event), None)


# One function a rule, each yielding its offenders as readable lines.


def _rows_name_states(table: Table) -> Iterator[str]:
    for state, _ in table.rows:
        if state not in table.states:
            yield f"row {state!r} is not a {type(table.initial).__name__}"


def _rows_are_complete(table: Table) -> Iterator[str]:
    named = [state for state, _ in table.rows]
    for state in table.states:
        if state not in named:
            yield f"{state.name} has no row; a state without exits has an empty one"


def _rows_stand_once(table: Table) -> Iterator[str]:
    for state, count in Counter(state for state, _ in table.rows).items():
        if count > 1:
            yield f"{state.name} has {count} rows"


def _moves_are_closed(table: Table) -> Iterator[str]:
    for state, move in table.moves():
        if move.to not in table.states:
            yield f"{state.name} --{move.event}--> {move.to!r} leaves the table"


def _moves_stand_once(table: Table) -> Iterator[str]:
    for (state, event), count in Counter((state, move.event) for state, move in table.moves()).items():
        if count > 1:
            yield f"({state.name}, {event}) stands {count} times"


def _events_are_names(table: Table) -> Iterator[str]:
    for event in table.events:
        if not event.isidentifier():
            yield f"event {event!r} cannot be a method's name"


def _states_are_reachable(table: Table) -> Iterator[str]:
    seen, frontier = {table.initial}, [table.initial]
    while frontier:
        here = frontier.pop()
        for state, move in table.moves():
            if state is here and move.to not in seen:
                seen.add(move.to)
                frontier.append(move.to)
    for state in table.states:
        if state not in seen:
            yield f"{state.name} cannot be reached from {table.initial.name}"


def _no_undeclared_trap(table: Table) -> Iterator[str]:
    for state in table.states:
        leaves = any(source is state and move.to is not state for source, move in table.moves())
        if leaves and state in table.terminal:
            yield f"{state.name} is declared terminal but has an exit"
        if not leaves and state not in table.terminal:
            yield f"{state.name} is a trap: nothing leaves it, and it is not declared terminal"


def _activation_is_verified(table: Table) -> Iterator[str]:
    for state, move in table.moves():
        verified = {OF_DOMAIN[requirement] for requirement in move.requires if requirement in OF_DOMAIN}
        if move.activates is not None and move.activates not in verified:
            yield f"{state.name} --{move.event}--> activates {move.activates} and requires nothing of it"


CHECKS: tuple[Callable[[Table], Iterator[str]], ...] = (
    _rows_name_states,
    _rows_are_complete,
    _rows_stand_once,
    _moves_are_closed,
    _moves_stand_once,
    _events_are_names,
    _states_are_reachable,
    _no_undeclared_trap,
    _activation_is_verified,
)
