"""What happened: one row a transition, a summary by event, and an export that Perfetto opens."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from specfsm.domain import Domain
from specfsm.errors import StaleResource
from specfsm.trace import Trace
from tests.toys import BACKENDS, BATCH, OTHER, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_transition_is_noted_with_what_it_refreshed(backend: str) -> None:
    """Everything the first time; afterwards only what an input moved, and the rest is proven unnecessary."""
    at = world(backend)
    lazy = {each.name for each in at.fsm.backend.resources if each.lazy}
    shared = {each.name for each in at.fsm.backend.resources if each.kind == "Shared"}
    everything = set(at.fsm.ledger.names) - lazy
    drafts = {each.name for each in at.fsm.backend.resources if DRAFT in each.domains} - lazy
    at.prepare()
    at.prepare()
    at.fsm.target_prepare(OTHER["lengths"])
    with at.fsm.draft_forward(BATCH):
        pass
    at.prepare(OTHER["lengths"])
    with at.fsm.draft_forward(BATCH):
        pass
    at.fsm.finish()
    noted = list(at.fsm.trace)
    names = at.fsm.trace.resources
    assert [one.event for one in noted] == [
        *("target_prepare", "target_prepare", "target_prepare", "draft_forward", "restore"),
        *("target_prepare", "draft_forward", "restore", "finish"),
    ]
    assert [one.state for one in noted][-2:] == ["restore", "idle"]
    assert set(names(noted[0].refreshed)) == everything
    assert noted[0].proven == 0
    assert (names(noted[1].refreshed), set(names(noted[1].proven))) == ((), everything)
    read_lengths = {name for name in everything if "lengths" in at.fsm.ledger.sources[name]}
    assert set(names(noted[2].refreshed)) == read_lengths
    assert set(names(noted[6].refreshed)) == shared
    assert set(names(noted[6].proven)) == drafts - shared
    assert [one.domain for one in noted] == [TARGET, TARGET, TARGET, DRAFT, None, TARGET, DRAFT, None, None]
    assert all(one.start_ns <= one.end_ns for one in noted)
    assert all(one.end_ns <= other.start_ns for one, other in pairwise(noted))


def test_refused_transition_is_not_noted() -> None:
    at = world(drop=["rows"])
    with pytest.raises(StaleResource):
        at.prepare()
    assert len(at.fsm.trace) == 0


def test_ring_keeps_the_last() -> None:
    """It stays on for the life of an engine, so it must not grow."""
    trace = Trace(capacity=3)
    at = world(trace=trace)
    for _ in range(5):
        at.prepare()
    assert at.fsm.trace is trace
    assert len(trace) == 3
    unbounded = world(trace=Trace(capacity=None))
    for _ in range(5):
        unbounded.prepare()
    assert len(unbounded.fsm.trace) == 5
    trace.clear()
    assert len(trace) == 0


def test_summary_adds_up_by_event() -> None:
    at = world()
    at.prepare()
    at.prepare()
    with at.fsm.draft_forward(BATCH):
        at.fsm.draft_step()
    rows = {row.event: row for row in at.fsm.trace.summary()}
    assert list(rows) == ["target_prepare", "draft_forward", "draft_step", "restore"]
    prepare = rows["target_prepare"]
    assert (prepare.count, prepare.refreshed, prepare.proven) == (2, 8, 8)
    assert prepare.total_ns == sum(
        each.end_ns - each.start_ns for each in at.fsm.trace if each.event == "target_prepare"
    )
    assert (rows["restore"].refreshed, rows["restore"].proven) == (0, 0)


def test_perfetto_reads_the_export(tmp_path: Path) -> None:
    """A slice for each transition with what it refreshed by name, and one for each phase between two of them."""
    at = world()
    at.round_trip()
    at.fsm.finish()
    path = tmp_path / "trace.json"
    at.fsm.trace.save(path)
    trace = json.loads(path.read_text())
    events: list[dict[str, Any]] = trace["traceEvents"]
    names = {each["tid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    slices = [each for each in events if each["ph"] == "X"]
    fired = [each["name"] for each in slices if names[each["tid"]] == "transitions"]
    phases = [each["name"] for each in slices if names[each["tid"]] == "phases"]
    assert fired == ["target_prepare", "draft_forward", "draft_step", "restore", "finish"]
    assert phases == ["target_prepare", "draft_forward", "draft_forward", "restore"]
    assert slices[0]["args"]["domain"] == "target"
    assert "block_table" in slices[0]["args"]["refreshed"]
    assert all(each["dur"] >= 0 and each["ts"] > 0 and each["pid"] == 1 for each in slices)


def test_empty_trace_is_a_trace() -> None:
    assert Trace().summary() == []
    assert [each["ph"] for each in Trace().to_perfetto()["traceEvents"]] == ["M", "M"]
