"""One domain of a bound backend: the stages of a refresh, what declines, and buffers bound anew."""

from __future__ import annotations

import pytest
import torch

from specfsm.backends.backend import Backend
from specfsm.backends.resource import DomainView
from specfsm.domain import Domain
from specfsm.states.resource import bits
from tests.toys import BACKENDS, BATCH, RESOURCES, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT


@pytest.mark.parametrize("backend", BACKENDS)
def test_stages_put_producers_before_consumers(backend: str) -> None:
    """Before the launch, in it, after it: a partition in which nothing reads from a later stage."""
    fsm = world(backend).fsm
    binding = fsm.bindings[DRAFT]
    stages = (binding.before, binding.launched, binding.after)
    everything = (1 << len(fsm.backend.resources)) - 1
    assert sum(stages) == everything
    assert stages[0] | stages[1] | stages[2] == everything
    stage_of = {fsm.ledger.names[place]: stage for stage, mask in enumerate(stages) for place in bits(mask)}
    for resource in fsm.backend.resources:
        for read in resource.reads:
            assert stage_of.get(read, 0) <= stage_of[resource.name], f"{resource.name} reads {read}"
    assert set(binding.tasks) == set(bits(binding.launched))


def test_backend_without_recipes_launches_nothing() -> None:
    plain = tuple(each for each in RESOURCES if each.name in ("manager_ref", "counters"))
    at = world(Backend("plain", plain))
    at.round_trip()
    assert at.fsm.bindings[TARGET].launch is None


def test_domains_have_buffers_of_their_own() -> None:
    """What the orchestrator keeps itself is made twice too."""
    fsm = world().fsm
    one, other = fsm.bindings
    for place, name in enumerate(fsm.ledger.names):
        if isinstance(one.values[place], torch.Tensor):
            same = one.values[place] is other.values[place]
            assert same == (fsm.backend.resource(name).kind == "Shared"), name


def test_view_follows_the_batch() -> None:
    binding = world().fsm.bindings[TARGET]
    assert binding.batch is None
    binding.see(BATCH)
    assert binding.batch is BATCH is binding.view.batch
    assert binding.manager is binding.view.manager


def test_view_shows_what_resources_are_in_its_domain() -> None:
    """A device-side refresh reads its producers there; a view of nothing says so."""
    at = world()
    for binding in at.fsm.bindings:
        assert binding.view.value("rows") is at.fsm.value("rows", binding.domain)
        binding.see(BATCH)
        assert binding.view.value("rows") is at.fsm.value("rows", binding.domain)
    view = binding.view
    with pytest.raises(KeyError, match="rows: this view is of no bound backend"):
        DomainView(view.domain, view.manager, view.geometry, None, view.axes).value("rows")
