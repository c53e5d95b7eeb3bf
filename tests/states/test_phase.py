"""The phase table's declared data: what each row activates, refreshes and requires."""

from __future__ import annotations

import pytest

from specfsm.domain import Domain
from specfsm.states import PHASE, Phase, Requirement

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT
FRESH_TARGET, FRESH_DRAFT = Requirement.FRESH_TARGET, Requirement.FRESH_DRAFT

ROWS = {
    "target_prepare": (TARGET, (TARGET,), (FRESH_TARGET,)),
    "draft_forward": (DRAFT, (DRAFT,), (FRESH_DRAFT,)),
    "draft_step": (None, (DRAFT,), (FRESH_DRAFT,)),
    "draft_replay": (DRAFT, (DRAFT,), (Requirement.GRAPH, FRESH_DRAFT)),
    "restore": (TARGET, (), (Requirement.TARGET_INTACT,)),
    "finish": (None, (), ()),
    "fault": (None, (), ()),
    "reset": (None, (), ()),
}


@pytest.mark.parametrize("event", PHASE.events)
def test_rows_of_an_event_ask_the_same_everywhere(event: str) -> None:
    """An event activates, refreshes and requires the same from whichever state it is fired."""
    moves = [move for _, move in PHASE.moves() if move.event == event]
    assert {(move.activates, move.refreshes, move.requires) for move in moves} == {ROWS[event]}
    assert len({move.to for move in moves}) == 1
    assert all(move.why for move in moves)


def test_whatever_is_refreshed_is_required_fresh() -> None:
    """A refresh that is not verified could be dropped without a word."""
    for _, move in PHASE.moves():
        fresh = {FRESH_TARGET: TARGET, FRESH_DRAFT: DRAFT}
        assert set(move.refreshes) <= {fresh[each] for each in move.requires if each in fresh}


def test_whatever_is_refreshed_ahead_is_required_by_the_phase_that_needs_it() -> None:
    """The row that refreshes it does not verify it, so every row that activates its domain must."""
    ahead = {move.ahead for _, move in PHASE.moves()} - {None}
    assert ahead == {DRAFT}
    for _, move in PHASE.moves():
        assert move.activates not in ahead or FRESH_DRAFT in move.requires


def test_every_state_but_faulted_can_fault() -> None:
    """A failed undo may happen anywhere, and only `reset` leaves FAULTED."""
    faulting = {state for state, move in PHASE.moves() if move.event == "fault"}
    assert faulting == set(Phase) - {Phase.FAULTED}
    assert PHASE.legal(Phase.FAULTED) == ("reset",)


def test_draft_phases_are_left_by_restore_alone() -> None:
    """Nothing but `restore` (or a fault) leads from the draft's cache to the target's."""
    draft = {Phase.DRAFT_FORWARD, Phase.DRAFT_REPLAY}
    ways_out = {move.event for state, move in PHASE.moves() if state in draft and move.to not in draft}
    assert ways_out == {"restore", "fault"}
