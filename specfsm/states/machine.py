"""From table to machine: `transitions` builds it and takes callbacks, then it is compiled to one mapping.

This is the only module that imports `transitions`. A trigger through it costs some 15 µs, most of it bookkeeping for
features these machines forbid (guards, queues, conditions). So the machine, callbacks included, is flattened into
``(state, event) → Arc``, which is all the hot path looks at. A test drives both and demands the same behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from itertools import chain
from typing import Any

from attrs import frozen
from transitions import Machine, State

from specfsm.errors import IllegalTransition, InvalidTable
from specfsm.states.table import Move, States, Table

__all__ = ["Arc", "Compiled", "build", "compile_machine"]

Callback = Callable[[], object]
HOOKS = ("on_enter", "on_exit", "before", "after")


@frozen
class Arc:
    """One compiled row: the move, and the callbacks that run before and after the state changes."""

    move: Move
    before: tuple[Callback, ...] = ()
    after: tuple[Callback, ...] = ()


class _Model:
    """What a `transitions` machine writes its state on. (A slotted class cannot be one.)"""

    state: States


def build(table: Table, observer: object = None) -> Machine:
    """A `transitions` machine with exactly the rows of `table`.

    Args:
        table: the checked rows.
        observer: an object whose methods ``on_enter_<state>``, ``on_exit_<state>``, ``before_<event>`` and
            ``after_<event>`` are called without arguments, in the order `transitions` documents.

    Raises:
        InvalidTable: a method of the observer is named like a hook but fits no state or event.
    """
    _check_observer(table, observer)
    machine = Machine(
        model=_Model(),
        states=[
            State(
                state,
                on_enter=_hooks(observer, f"on_enter_{state.value}"),
                on_exit=_hooks(observer, f"on_exit_{state.value}"),
            )
            for state in table.states
        ],
        initial=table.initial,
        auto_transitions=False,
    )
    for state, move in table.moves():
        machine.add_transition(
            move.event,
            state,
            move.to,
            before=_hooks(observer, f"before_{move.event}"),
            after=_hooks(observer, f"after_{move.event}"),
        )
    return machine


def _hooks(observer: object, name: str) -> list[Any]:
    hook = getattr(observer, name, None)
    return [hook] if callable(hook) else []


def _check_observer(table: Table, observer: object) -> None:
    known = {f"{hook}_{state.value}" for state in table.states for hook in ("on_enter", "on_exit")}
    known |= {f"{hook}_{event}" for event in table.events for hook in ("before", "after")}
    strays = [
        f"{type(observer).__name__}.{name} fits no state or event; did you mean one of {_alike(name, known)}?"
        for name in dir(observer)
        if name.startswith(tuple(f"{hook}_" for hook in HOOKS)) and name not in known
    ]
    if strays:
        raise InvalidTable(table.name, tuple(strays))


def _alike(name: str, known: Iterable[str]) -> str:
    """The names that come closest; all, if none comes close."""
    names = sorted(known)
    return ", ".join(get_close_matches(name, names) or names)


def compile_machine(machine: Machine, table: Table) -> dict[tuple[States, str], Arc]:
    """Flatten `machine` into one mapping. Callbacks added through `transitions` until now are kept, in its order.

    Raises:
        InvalidTable: the machine has grown a guard, a queue or a row that its table does not have.
    """
    offenders = [*_foreign_rows(machine, table), *_guards(machine), *_leniency(machine)]
    if offenders:
        raise InvalidTable(table.name, tuple(offenders))
    return {(state, move.event): _arc(machine, state, move) for state, move in table.moves()}


def _rows(machine: Machine) -> Iterator[tuple[str, str, Any]]:
    for event in machine.events.values():
        for source, rows in event.transitions.items():
            for row in rows:
                yield source, event.name, row


def _foreign_rows(machine: Machine, table: Table) -> Iterator[str]:
    declared = sorted((state.name, move.event, move.to.name) for state, move in table.moves())
    present = sorted((source, event, str(row.dest)) for source, event, row in _rows(machine))
    for row in {*present} ^ {*declared}:
        yield "{} --{}--> {} stands in only one of table and machine".format(*row)
    if len(present) != len(set(present)):
        yield "a row stands twice in the machine"


def _guards(machine: Machine) -> Iterator[str]:
    for source, event, row in _rows(machine):
        if row.conditions or row.prepare:
            yield f"({source}, {event}) has a guard; declare what it requires in the table instead"
    for hook in ("prepare_event", "finalize_event", "on_exception", "on_final"):
        if getattr(machine, hook):
            yield f"the machine has {hook} callbacks, which can hide a refusal"


def _leniency(machine: Machine) -> Iterator[str]:
    if machine.has_queue:
        yield "the machine queues its events: a refusal would reach somebody else"
    each: Any
    for each in (machine, *machine.states.values()):
        if each.ignore_invalid_triggers:
            yield f"{getattr(each, 'name', 'the machine')} ignores invalid triggers: a refusal would pass in silence"


def _arc(machine: Machine, state: States, move: Move) -> Arc:
    [row] = machine.events[move.event].transitions[state.name]
    source, destination = machine.get_state(state), machine.get_state(move.to)
    before = chain(machine.before_state_change, row.before, source.on_exit)
    after = chain(destination.on_enter, row.after, machine.after_state_change)
    return Arc(move, *(tuple(_resolve(machine, hook) for hook in hooks) for hooks in (before, after)))


def _resolve(machine: Machine, hook: str | Callback) -> Callback:
    return hook if callable(hook) else getattr(machine.model, hook)


class Compiled:
    """A running machine over one table: `fire` an event, or be refused with `IllegalTransition` and no change.

    Args:
        subject: whose state it is, for errors.
    """

    __slots__ = ("arcs", "state", "subject", "table")

    def __init__(self, table: Table, arcs: dict[tuple[States, str], Arc] | None = None, subject: str = "") -> None:
        self.table = table
        self.subject = subject
        self.arcs = arcs if arcs is not None else {(state, move.event): Arc(move) for state, move in table.moves()}
        self.state: Any = table.initial

    def find(self, event: str) -> Arc:
        """The row of `event` in this state, asked before any side effect."""
        arc = self.arcs.get((self.state, event))
        if arc is None:
            raise IllegalTransition(self.state, event, legal=self.table.legal(self.state), subject=self.subject)
        return arc

    def fire(self, event: str) -> Any:
        """Take `event` and return the new state. A callback that raises leaves the old one."""
        arc = self.arcs.get((self.state, event)) or self.find(event)
        source = self.state
        for callback in arc.before:
            callback()
        self.state = arc.move.to
        if not arc.after:
            return self.state
        try:
            for callback in arc.after:
                callback()
        except BaseException:
            self.state = source
            raise
        return self.state
