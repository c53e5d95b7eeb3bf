"""`ACTIONS`, flattened: what each path rebinds, clears, refreshes and requires."""

from __future__ import annotations

import attrs
import pytest

from specfsm.backends.backend import Backend
from specfsm.backends.resource import ACTIONS, Action, Path
from specfsm.backends.script import script
from specfsm.domain import Domain
from specfsm.states.resource import bits
from tests.toys import BACKENDS, RESOURCES, world

DRAFT = Domain.DRAFT


@pytest.mark.parametrize("path", Path)
@pytest.mark.parametrize("backend", BACKENDS)
def test_script_is_what_actions_say(backend: str, path: Path) -> None:
    """Each mask holds the resources whose kind takes such an action on the path, and no others."""
    fsm = world(backend).fsm
    steps = script(fsm.bindings[DRAFT], path, 0)
    taken = [set(resource.actions(path)) if DRAFT in resource.domains else set() for resource in fsm.backend.resources]

    def having(*actions: Action) -> list[int]:
        return [place for place, each in enumerate(taken) if each & set(actions)]

    device = [p for p, each in enumerate(fsm.backend.resources) if getattr(each, "on_device", False)]
    assert list(bits(steps.recorded)) == [p for p in having(Action.RECORDED) if p in device]
    lazily_recorded = [p for p in having(Action.RECORDED) if fsm.backend.resources[p].lazy]
    refreshed = having(Action.REFRESH, Action.DERIVE, Action.INVALIDATE, Action.DROP)
    assert list(bits(steps.refreshable)) == sorted({*refreshed, *lazily_recorded})
    assert list(bits(steps.required)) == [place for place, each in enumerate(taken) if each]
    assert list(bits(steps.refused)) == having(Action.REFUSED)
    assert steps.missing == 0
    if path is not Path.PREPARE:
        switched = having(Action.REBIND, Action.DERIVE)
        attributes = [name for place in switched for name in fsm.backend.resources[place].attributes]
        assert [name for name, *_ in steps.rebinds] == attributes
        assert list(steps.shared) == having(Action.SNAPSHOT, Action.COPY_BACK)
        assert list(bits(steps.cleared)) == [
            p for p, each in enumerate(taken) if each and fsm.backend.resources[p].lazy
        ]
    else:
        assert (steps.rebinds, steps.clears, steps.shared) == ((), (), ()), "the domain is active already"


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda each: each.name)
def test_dropping_one_leaves_the_others(resource: object) -> None:
    """Fault injection takes out one resource's bringing up to date, on every path, and nothing else."""
    fsm = world().fsm
    binding, name = fsm.bindings[DRAFT], resource.name  # type: ignore[attr-defined]  # a Resource
    bit = fsm.ledger.mask([name])
    for path in Path:
        whole, lacking = script(binding, path, 0), script(binding, path, bit)
        assert lacking.refreshable == whole.refreshable & ~bit
        assert lacking.required == whole.required
        assert lacking.missing in (0, bit)
        kind = type(fsm.backend.resource(name))
        if kind.__name__ in ("Pointer", "Alias", "Plan", "Cache") and path is not Path.PREPARE and ACTIONS[kind][path]:
            assert lacking.missing == bit
        attributes = fsm.backend.resource(name).attributes if lacking.missing else ()
        assert [each for each in whole.rebinds if each[0] not in attributes] == list(lacking.rebinds)
        assert [each[0] for each in whole.clears if each[0] not in attributes] == [each[0] for each in lacking.clears]


def test_recipes_that_a_graph_refreshes_are_recorded() -> None:
    """Only a device-side refresh can be recorded: a host-fed one stays out."""
    by_graph = tuple(attrs.evolve(each, refreshed_by="graph") for each in RESOURCES)
    fsm = world(Backend("toy", by_graph, {"adapter": "the adapter"})).fsm
    steps = script(fsm.bindings[DRAFT], Path.RECORDING, 0)
    assert [fsm.ledger.names[place] for place in bits(steps.recorded)] == ["block_table"]
    lacking = script(fsm.bindings[DRAFT], Path.RECORDING, fsm.ledger.mask(["block_table"]))
    assert lacking.recorded == 0
    assert [fsm.ledger.names[place] for place in bits(steps.baked)] == ["manager_ref"]
