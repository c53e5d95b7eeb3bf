"""What each kind declares, and the literal that says what a switch does to it."""

from __future__ import annotations

from typing import Any

import pytest

from specfsm.backends.resource import (
    ACTIONS,
    Action,
    Alias,
    Cache,
    DomainView,
    Path,
    Plan,
    Pointer,
    Shared,
    Staged,
    Table,
)
from specfsm.domain import Domain, RowOrder
from tests.toys import BATCH, manager

FACTS: dict[str, Any] = {"dtype": "int32", "shape": ("S",), "reads": ("batch",)}

MATRIX = {
    "Pointer": ("refresh", "rebind + refresh", "rebind", "rebind + refresh", "rebind"),
    "Table": ("refresh", "rebind + refresh", "rebind", "refresh", "rebind"),
    "Staged": ("refresh", "rebind + refresh", "rebind", "refresh", "rebind"),
    "Plan": ("invalidate", "invalidate", "recorded", "invalidate", "invalidate"),
    "Alias": ("re-derive", "re-derive", "re-derive", "", "re-derive"),
    "Cache": ("drop", "drop", "drop", "drop", "drop"),
    "Shared": ("refresh", "snapshot + refresh", "refused", "snapshot + refresh", "copy back"),
}


def test_actions_are_the_matrix_of_the_design() -> None:
    """Written out once more, by hand: kind × (own phase, eager draft, recording, before replay, restore)."""
    drawn = {
        kind.__name__: tuple(" + ".join(action.value for action in row[path]) for path in Path)
        for kind, row in ACTIONS.items()
    }
    assert drawn == MATRIX


def test_twin_is_named_after_the_attribute() -> None:
    assert Table("rows", **FACTS).twin == "draft_rows"
    assert Table("rows", attribute="row_index", **FACTS).twin == "draft_row_index"
    assert Table("rows", attribute=None, **FACTS).twin is None
    assert Table("rows", domains=(Domain.TARGET,), **FACTS).twin is None
    assert Table("rows", twin="twin", **FACTS).twin == "twin"


def test_attributes_that_follow_the_switch() -> None:
    """Both halves of a staged pair; nothing for what the orchestrator keeps itself."""
    fill: Any = None
    assert Staged("rows", host_attribute="host", fill=fill, **FACTS).attributes == ("rows", "host")
    assert Staged("rows", attribute=None, fill=fill, **FACTS).attributes == ()
    assert Plan("plan", reads=("batch",)).attributes == ("plan",)


@pytest.mark.parametrize(
    ("resource", "lazy", "empty"),
    [
        (Pointer("ref", reads=("manager",), of=lambda view: view.manager), False, None),
        (Table("table", **FACTS), False, None),
        (Shared("shared", **FACTS), False, None),
        (Alias("view", of="table", derive=lambda value, view: value), False, None),
        (Plan("plan", reads=("batch",)), True, None),
        (Cache("cache", reads=("manager",)), True, {}),
    ],
    ids=lambda each: getattr(each, "kind", ""),
)
def test_lazy_kinds_may_be_absent(resource: Any, lazy: bool, empty: Any) -> None:
    assert (resource.lazy, resource.empty()) == (lazy, empty)


def test_graph_refreshed_resource_is_recorded() -> None:
    """The captured graph refreshes it itself, so the host's refresh is not baked in."""
    by_graph = Table("table", refreshed_by="graph", **FACTS)
    assert by_graph.actions(Path.RECORDING) == (Action.REBIND, Action.RECORDED)
    assert by_graph.actions(Path.EAGER) == ACTIONS[Table][Path.EAGER]
    assert Table("table", **FACTS).actions(Path.RECORDING) == (Action.REBIND,)


@pytest.mark.parametrize("order", RowOrder)
def test_view_knows_the_managers_rows(order: RowOrder) -> None:
    held = manager(Domain.TARGET, order)
    view = DomainView(Domain.TARGET, held, held.geometry, BATCH, {})
    expected = [0, 1, 2] if order is RowOrder.BATCH else [held.row_of[each] for each in BATCH.request_ids]
    assert view.rows() == expected
    assert DomainView(Domain.TARGET, held, held.geometry, None, {}).rows() == []
