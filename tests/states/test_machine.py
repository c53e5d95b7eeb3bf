"""`transitions` and the compiled mapping are one machine; and what `transitions` lets pass, the checks do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transitions import Machine, MachineError

from specfsm.errors import IllegalTransition, InvalidTable
from specfsm.states import PHASE, TABLES, Phase, Table
from specfsm.states.machine import Compiled, build, compile_machine
from tests.toys import recorder


def pair(table: Table) -> tuple[Machine, list[str], Compiled, list[str]]:
    """The same table twice, through `transitions` and compiled, each with an observer of every hook."""
    slow_calls: list[str] = []
    fast_calls: list[str] = []
    slow = build(table, recorder(table, slow_calls.append))
    fast = Compiled(table, compile_machine(build(table, recorder(table, fast_calls.append)), table))
    return slow, slow_calls, fast, fast_calls


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_compiled_agrees_with_transitions(table: Table) -> None:
    """Random events: the same states, the same refusals, the same callbacks in the same order."""

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.sampled_from(table.events), max_size=25))
    def agree(events: list[str]) -> None:
        slow, slow_calls, fast, fast_calls = pair(table)
        for event in events:
            refused = False
            try:
                slow.model.trigger(event)
            except MachineError:
                refused = True
            try:
                fast.fire(event)
            except IllegalTransition:
                assert refused, f"only the compiled machine refuses {event}"
            else:
                assert not refused, f"only transitions refuses {event}"
            assert fast.state is slow.model.state
            assert fast_calls == slow_calls

    agree()


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_row_calls_back_in_the_documented_order(table: Table) -> None:
    """before_<event>, on_exit_<source>, then the state changes, on_enter_<destination>, after_<event>."""
    for source, move in table.moves():
        _, _, fast, calls = pair(table)
        fast.state = source
        fast.fire(move.event)
        expected = [f"before_{move.event}", f"on_exit_{source.value}", f"on_enter_{move.to.value}"]
        assert calls == [*expected, f"after_{move.event}"]


def test_callbacks_added_through_transitions_are_compiled() -> None:
    """Whatever a user of `transitions` hangs on the machine is kept, machine-wide callbacks outermost."""
    calls: list[str] = []
    machine = build(PHASE)
    machine.model.told_by_name = lambda: calls.append("by name")
    machine.before_state_change = [lambda: calls.append("first")]
    machine.after_state_change = [lambda: calls.append("last")]
    machine.get_state(Phase.TARGET_PREPARE).add_callback("enter", "told_by_name")
    machine.events["target_prepare"].transitions["IDLE"][0].add_callback("after", lambda: calls.append("after"))
    Compiled(PHASE, compile_machine(machine, PHASE)).fire("target_prepare")
    compiled, calls[:] = list(calls), []
    machine.model.trigger("target_prepare")
    assert compiled == calls == ["first", "by name", "after", "last"]


class Boom(Exception):
    pass


@pytest.mark.parametrize("hook", ["before_target_prepare", "on_exit_idle", "on_enter_target_prepare"])
def test_raising_callback_leaves_the_state(hook: str) -> None:
    def explode(name: str) -> None:
        if name == hook:
            raise Boom

    machine = Compiled(PHASE, compile_machine(build(PHASE, recorder(PHASE, explode)), PHASE))
    with pytest.raises(Boom):
        machine.fire("target_prepare")
    assert machine.state is Phase.IDLE


@pytest.mark.parametrize(
    "stray",
    ["on_enter_draft_foward", "on_exit_nowhere", "before_restor", "after_", "on_enter_target_prepared"],
)
def test_observer_with_a_mistyped_hook_is_refused(stray: str) -> None:
    """`transitions` would never call it and never say so."""
    observer = type("Observer", (), {stray: lambda self: None})()
    with pytest.raises(InvalidTable, match=f"Observer.{stray} fits no state or event; did you mean one of "):
        build(PHASE, observer)


def test_a_mistyped_hook_is_told_what_comes_close() -> None:
    observer = type("Observer", (), {"on_enter_draft_foward": lambda self: None, "after_": lambda self: None})()
    with pytest.raises(InvalidTable) as caught:
        build(PHASE, observer)
    first, second = caught.value.offenders
    assert first.startswith("Observer.after_ fits no state or event; did you mean one of after_")
    assert "did you mean one of on_enter_draft_forward, " in second
    assert "fault" not in second


def test_a_machine_says_whose_state_it_is() -> None:
    with pytest.raises(IllegalTransition) as caught:
        Compiled(PHASE, subject="the seventh").fire("restore")
    assert caught.value.subject == "the seventh"
    assert "the seventh: IDLE accepts target_prepare, fault" in str(caught.value)


def test_observer_may_have_other_methods() -> None:
    """Only names that look like hooks are held to the table."""
    observer = type("Observer", (), {"report": lambda self: None, "on_enter_idle": lambda self: None})()
    assert build(PHASE, observer).get_state(Phase.IDLE).on_enter


def no_automatic_jumps(machine: Machine) -> None:
    machine.add_transition("to_idle", "*", Phase.IDLE)


FOREIGN: dict[str, tuple[Callable[[Machine], Any], str]] = {
    "another row": (
        lambda m: m.add_transition("restore", Phase.IDLE, Phase.RESTORE),
        "IDLE --restore--> RESTORE stands in only one of table and machine",
    ),
    "a mistyped destination": (
        lambda m: m.add_transition("restore", Phase.IDLE, "RESTROE"),
        "IDLE --restore--> RESTROE stands in only one",
    ),
    "a mistyped source": (
        lambda m: m.add_transition("restore", "IDEL", Phase.RESTORE),
        "IDEL --restore--> RESTORE stands in only one",
    ),
    "a row twice": (
        lambda m: m.add_transition("draft_step", Phase.DRAFT_FORWARD, Phase.DRAFT_FORWARD),
        "a row stands twice in the machine",
    ),
    "an internal transition": (
        lambda m: m.add_transition("draft_step", Phase.DRAFT_FORWARD, None),
        "DRAFT_FORWARD --draft_step--> None stands in only one",
    ),
    "jumps from everywhere": (no_automatic_jumps, "FAULTED --to_idle--> IDLE stands in only one"),
    "a row removed": (lambda m: m.remove_transition("finish"), "RESTORE --finish--> IDLE stands in only one"),
    "a guard": (
        lambda m: m.events["restore"].transitions["DRAFT_FORWARD"][0].add_callback("prepare", print),
        "(DRAFT_FORWARD, restore) has a guard",
    ),
    "a condition": (
        lambda m: m.events["restore"].transitions["DRAFT_FORWARD"][0].conditions.append(lambda: False),
        "(DRAFT_FORWARD, restore) has a guard",
    ),
    "an exception handler": (lambda m: setattr(m, "on_exception", "ignore"), "the machine has on_exception callbacks"),
    "a finaliser": (lambda m: setattr(m, "finalize_event", "note"), "the machine has finalize_event callbacks"),
    "a preparation": (lambda m: setattr(m, "prepare_event", "note"), "the machine has prepare_event callbacks"),
    "silenced refusals": (lambda m: setattr(m, "ignore_invalid_triggers", True), "ignores invalid triggers"),
    "a state that silences refusals": (
        lambda m: setattr(m.get_state(Phase.IDLE), "ignore_invalid_triggers", True),
        "IDLE ignores invalid triggers",
    ),
    "a queue": (lambda m: setattr(m, "_queued", True), "the machine queues its events"),
}


@pytest.mark.parametrize("change", FOREIGN)
def test_what_transitions_accepts_silently_is_refused(change: str) -> None:
    """`transitions` takes each of these without a word; compiling the machine does not."""
    grow, offence = FOREIGN[change]
    machine = build(PHASE)
    grow(machine)
    with pytest.raises(InvalidTable) as caught:
        compile_machine(machine, PHASE)
    assert offence in str(caught.value)


def test_untouched_machine_compiles_to_exactly_its_rows() -> None:
    arcs = compile_machine(build(PHASE), PHASE)
    assert [(state, arc.move) for (state, _), arc in arcs.items()] == list(PHASE.moves())
    assert not any(arc.before or arc.after for arc in arcs.values())


def test_no_automatic_jumps() -> None:
    """`transitions` adds a ``to_<state>`` event for every state unless told otherwise."""
    assert set(build(PHASE).events) == set(PHASE.events)
