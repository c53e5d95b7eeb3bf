"""The rules of a table: one small broken table for each, and the full state × event product of the real ones."""

from __future__ import annotations

from enum import unique

import pytest

from specfsm.domain import Domain
from specfsm.errors import IllegalTransition, InvalidTable
from specfsm.states import TABLES, Move, Requirement, Table, table
from specfsm.states.machine import Compiled
from specfsm.states.table import CHECKS, States


@unique
class Lamp(States):
    OFF = "off"
    ON = "on"


@unique
class Other(States):
    ELSEWHERE = "elsewhere"


ON, OFF = Move("switch_on", Lamp.ON), Move("switch_off", Lamp.OFF)
SOUND = ((Lamp.OFF, (ON,)), (Lamp.ON, (OFF,)))

BROKEN = {
    "_rows_name_states": (
        ((Lamp.OFF, (ON,)), (Lamp.ON, (OFF,)), (Other.ELSEWHERE, ())),
        (),
        "row <Other.ELSEWHERE: 'elsewhere'> is not a Lamp",
    ),
    "_rows_are_complete": (((Lamp.OFF, (ON,)),), (Lamp.ON,), "ON has no row; a state without exits has an empty one"),
    "_rows_stand_once": (
        ((Lamp.OFF, (ON,)), (Lamp.ON, (OFF,)), (Lamp.ON, ())),
        (),
        "ON has 2 rows",
    ),
    "_moves_are_closed": (
        ((Lamp.OFF, (ON,)), (Lamp.ON, (OFF, Move("wander", Other.ELSEWHERE)))),
        (),
        "ON --wander--> <Other.ELSEWHERE: 'elsewhere'> leaves the table",
    ),
    "_moves_stand_once": (
        ((Lamp.OFF, (ON, Move("switch_on", Lamp.OFF))), (Lamp.ON, (OFF,))),
        (),
        "(OFF, switch_on) stands 2 times",
    ),
    "_events_are_names": (
        ((Lamp.OFF, (Move("switch on", Lamp.ON),)), (Lamp.ON, (OFF,))),
        (),
        "event 'switch on' cannot be a method's name",
    ),
    "_states_are_reachable": (
        ((Lamp.OFF, ()), (Lamp.ON, (OFF,))),
        (Lamp.OFF,),
        "ON cannot be reached from OFF",
    ),
    "_no_undeclared_trap": (
        ((Lamp.OFF, (ON,)), (Lamp.ON, (Move("switch_on", Lamp.ON),))),
        (),
        "ON is a trap: nothing leaves it, and it is not declared terminal",
    ),
    "_activation_is_verified": (
        ((Lamp.OFF, (Move("switch_on", Lamp.ON, activates=Domain.DRAFT),)), (Lamp.ON, (OFF,))),
        (),
        "OFF --switch_on--> activates draft and requires nothing of it",
    ),
}


def test_every_rule_has_a_broken_table() -> None:
    """A rule that is added without a case here is a rule that nobody has seen refuse anything."""
    assert [check.__name__ for check in CHECKS] == list(BROKEN)


@pytest.mark.parametrize("rule", BROKEN)
def test_broken_table_is_refused(rule: str) -> None:
    """The table is refused by the rule it breaks, and the message names the offender."""
    rows, terminal, offence = BROKEN[rule]
    with pytest.raises(InvalidTable) as caught:
        Table("lamp", Lamp.OFF, rows, terminal)
    assert offence in caught.value.offenders
    assert offence in str(caught.value)
    assert "the lamp machine cannot be built as declared" in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("rule", BROKEN)
def test_rule_alone_finds_its_offender(rule: str) -> None:
    """Each check finds its own offence, and has nothing to say about a sound table."""
    rows, terminal, offence = BROKEN[rule]
    unchecked = Table("lamp", Lamp.OFF, SOUND)
    check = getattr(table, rule)
    assert list(check(unchecked)) == []
    object.__setattr__(unchecked, "rows", rows)
    object.__setattr__(unchecked, "terminal", terminal)
    assert offence in list(check(unchecked))


def test_every_offender_is_listed_at_once() -> None:
    """Whoever writes a table mends it in one go."""
    rows = ((Lamp.OFF, (ON, ON, Move("un named", Other.ELSEWHERE))),)
    with pytest.raises(InvalidTable) as caught:
        Table("lamp", Lamp.OFF, rows)
    assert len(caught.value.offenders) == 5


def test_terminal_state_with_an_exit_is_refused() -> None:
    """A terminal is a promise that nothing leaves it."""
    with pytest.raises(InvalidTable, match="ON is declared terminal but has an exit"):
        Table("lamp", Lamp.OFF, SOUND, terminal=(Lamp.ON,))


def test_activation_of_the_wrong_domain_is_refused() -> None:
    """A row that activates the draft and verifies the target verifies nothing."""
    move = Move("switch_on", Lamp.ON, activates=Domain.DRAFT, requires=(Requirement.FRESH_TARGET,))
    with pytest.raises(InvalidTable, match="activates draft and requires nothing of it"):
        Table("lamp", Lamp.OFF, ((Lamp.OFF, (move,)), (Lamp.ON, (OFF,))))


# The four real tables.

PAIRS = [
    pytest.param(declared, state, event, id=f"{declared.name}-{state.name}-{event}")
    for declared in TABLES.values()
    for state in declared.states
    for event in declared.events
]


@pytest.mark.parametrize("declared", TABLES.values(), ids=TABLES)
def test_real_tables_pass_every_rule(declared: Table) -> None:
    assert [offence for check in CHECKS for offence in check(declared)] == []


@pytest.mark.parametrize(("declared", "state", "event"), PAIRS)
def test_every_pair_moves_or_is_refused(declared: Table, state: States, event: str) -> None:
    """The listed move, or a refusal that leaves the state and names what the state accepts."""
    listed = {(source, move.event): move.to for source, row in declared.rows for move in row}
    machine = Compiled(declared)
    machine.state = state
    if (state, event) in listed:
        assert machine.fire(event) is listed[state, event]
        assert machine.state is listed[state, event]
        assert event in declared.legal(state)
        return
    with pytest.raises(IllegalTransition) as caught:
        machine.fire(event)
    assert machine.state is state
    assert (caught.value.state, caught.value.event, caught.value.legal) == (state, event, declared.legal(state))
    assert declared.find(state, event) is None
    assert event not in declared.legal(state)


def test_the_four_tables() -> None:
    """Written out once more, by hand: what a reader expects to find."""
    arcs = {name: sum(len(row) for _, row in declared.rows) for name, declared in TABLES.items()}
    assert arcs == {"phase": 18, "resource": 11, "graph": 12, "transfer": 4}
    assert TABLES["phase"].events == (
        "target_prepare",
        "fault",
        "draft_forward",
        "draft_replay",
        "finish",
        "draft_step",
        "restore",
        "reset",
    )
