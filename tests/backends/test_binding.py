"""One domain of a bound backend: what its refresh is made of, what it shows, and its epoch."""

from __future__ import annotations

import attrs
import pytest
import torch

from specfsm.backends.backend import Backend
from specfsm.backends.resource import DomainView
from specfsm.domain import Domain
from specfsm.states.resource import bits
from tests.toys import BACKENDS, BATCH, RESOURCES, Injected, world

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


# The epoch: what a graph's contract is proven by.


def test_epoch_moves_when_a_pointer_is_replaced_and_never_returns() -> None:
    """Not by a refresh that finds the same value, nor by tables that are written; by an undo too, to a new one."""
    at = world("trtllm")
    binding = at.fsm.bindings[TARGET]
    epochs = [binding.epoch]
    at.prepare()
    epochs.append(binding.epoch)
    at.target.swap()
    at.prepare(attrs.evolve(BATCH, kv_lens=(9, 8, 8)))
    assert binding.epoch == epochs[-1]
    values = [*binding.values]
    at.target.pool_pointers, at.target.generation = (0x9000,), 7
    at.fuse.arm("launch")
    with pytest.raises(Injected):
        at.prepare()
    at.fuse.disarm()
    assert all(now is was for now, was in zip(binding.values, values, strict=True))
    epochs.append(binding.epoch)
    at.prepare()
    epochs.append(binding.epoch)
    assert epochs == sorted({*epochs})


def test_no_two_bindings_share_an_epoch() -> None:
    """Nor does what an undo puts back have the one of what it undid."""
    target, draft = world("trtllm").fsm.bindings
    other = world("trtllm").fsm.bindings[TARGET]
    epochs = [target.epoch, draft.epoch, other.epoch]
    view, values = target.view, [*target.values]
    target.keep(target.places["tokens_per_block"], 8)
    epochs.append(target.epoch)
    target.put_back(view, values)
    assert target.values == values
    assert len({*epochs, target.epoch}) == 5
