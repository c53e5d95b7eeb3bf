"""`explain()`: every resource in both domains, what it was refreshed from, and the verdict; touching none."""

from __future__ import annotations

import pytest

from specfsm.backends.resource import ACTIONS, Path
from specfsm.domain import Domain
from specfsm.explain import matrix, text_table
from specfsm.states.resource import Freshness
from tests.toys import BACKENDS, snapshot, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_pair_has_a_line_that_agrees_with_the_ledger(backend: str) -> None:
    at = world(backend)
    at.round_trip()
    at.fsm.moved("lengths", DRAFT)
    explanation = at.fsm.explain()
    assert len(explanation.lines) == 2 * len(at.fsm.backend.resources)
    for line in explanation.lines:
        assert line.state is at.fsm.ledger.state(line.domain, line.resource)
        assert line.kind == at.fsm.backend.resource(line.resource).kind
        if line.state is Freshness.FRESH:
            assert (line.verdict, line.moved) == ("fresh", {})
        if line.state is Freshness.STALE:
            assert line.verdict.startswith("stale: ")


def test_text_says_what_moved() -> None:
    """A reader sees phase, domain, stamps and what would be refused."""
    at = world()
    at.prepare()
    text = str(at.fsm.explain())
    head, columns, rule, *rows = text.splitlines()
    assert head == "toy in TARGET_PREPARE, serving the target's cache"
    assert columns.split() == ["resource", "kind", "domain", "state", "refreshed", "from", "verdict"]
    assert set(rule) == {"─", " "}
    table = {tuple(row.split()[:3:2]): " ".join(row.split()[3:]) for row in rows}
    assert table["rows", "target"] == "FRESH manager 1, blocks 1, batch 1 fresh"
    assert table["rows", "draft"] == "STALE – never refreshed; derived from manager, blocks, batch"
    assert table["plan", "target"] == "UNBOUND – dropped; made by whoever needs it first"
    at.target.swap()
    assert "stale: blocks 1 → 2" in str(at.fsm.explain()), "it looks at the manager first"


def test_edit_is_called_stale_by_its_own_version() -> None:
    at = world()
    at.prepare()
    at.fsm.dirty("block_table")
    [line] = [each for each in at.fsm.explain().lines if (each.resource, each.domain) == ("block_table", TARGET)]
    assert line.verdict.startswith("stale: block_table ")


def test_explaining_changes_nothing() -> None:
    at = world()
    at.round_trip()
    at.fsm.explain()
    was = snapshot(at.fsm)
    at.fsm.explain()
    assert was.differences(snapshot(at.fsm)) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_matrix_is_the_actions_table(backend: str) -> None:
    """What documents print is what runs."""
    made = BACKENDS[backend].make()
    head, rows = matrix(made)
    assert head[-len(Path) :] == tuple(path.value for path in Path)
    assert len(rows) == len(made.resources)
    for resource, row in zip(made.resources, rows, strict=True):
        assert row[0].split()[0] == resource.name
        expected = [" + ".join(each.value for each in ACTIONS[type(resource)][path]) or "–" for path in Path]
        if resource.refreshed_by == "host":
            assert list(row[-len(Path) :]) == expected


def test_columns_are_aligned() -> None:
    text = text_table(("a", "long head"), [("wide cell", "b"), ("c", "d")])
    assert text.splitlines() == [
        "a          long head",
        "─────────  ─────────",
        "wide cell  b",
        "c          d",
    ]


def test_batch_is_not_needed() -> None:
    """Before the first event there is something to explain too."""
    assert "never refreshed" in str(world().fsm.explain())
