"""Level "tensors": what was written or rebound behind the machine's back is found; and what guard mode refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specfsm.backends.resource import Buffer, Shared
from specfsm.domain import Domain
from specfsm.errors import IllegalTransition, StaleResource, TargetMutated
from specfsm.orchestrator import Orchestrator
from specfsm.states.phase import Phase
from specfsm.verify import Check
from tests.toys import BACKENDS, BATCH, SIZES, Fuse, Metadata, World, geometry, manager, snapshot, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT


@pytest.mark.parametrize(
    ("given", "environment", "level"),
    [
        (None, None, Check.STAMPS),
        (None, "tensors", Check.TENSORS),
        ("off", "tensors", Check.OFF),
        (None, "contents", Check.CONTENTS),
        ("TENSORS", None, Check.TENSORS),
        (Check.OFF, None, Check.OFF),
    ],
)
def test_level_is_named_by_argument_or_environment(
    given: Any, environment: str | None, level: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECFSM_CHECK", raising=False)
    if environment is not None:
        monkeypatch.setenv("SPECFSM_CHECK", environment)
    assert world(check=given).fsm.check is level


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown check level 'full'; it is one of off, stamps, tensors, contents"):
        world(check="full")


# Behind the machine's back.


CASES = [
    (backend, each.name, domain)
    for backend, flavour in BACKENDS.items()
    for each in flavour.make().resources
    for domain in each.domains
    if isinstance(each, Buffer)
]
OWN = [(backend, name) for backend, name, domain in CASES if domain is DRAFT and name not in ("counters", "scratch")]
"""Buffers of which the draft has its own."""


def write(at: World, name: str, domain: Domain) -> None:
    if domain not in at.fsm.backend.resource(name).domains:
        pytest.skip("this domain has none")
    at.fsm.value(name, domain).add_(1)


@pytest.mark.parametrize(("backend", "name", "domain"), CASES)
def test_write_that_nobody_reported_is_found_in_its_own_domain(backend: str, name: str, domain: Domain) -> None:
    """At the next event that leaves or enters the domain; acknowledged by `dirty`, it is refreshed."""
    at = world(backend, check="tensors")
    at.round_trip()
    at.prepare()
    if domain is DRAFT:
        at.fsm.draft_forward(at.fsm.batch(DRAFT))
    write(at, name, domain)
    was, state = snapshot(at.fsm), at.fsm.state
    step: Callable[[], Any] = at.fsm.target_prepare if domain is TARGET else lambda: at.fsm.draft_step(at.fsm.batch())
    with pytest.raises(StaleResource) as caught:
        step()
    assert (caught.value.resource, caught.value.domain, caught.value.tampered) == (name, domain, "written")
    assert f"{backend}.{name} [{domain}] was written behind the machine's back" in str(caught.value)
    assert f"declare it: dirty({name!r}) for an edit" in str(caught.value)
    assert at.fsm.state is state
    assert was.differences(snapshot(at.fsm)) == []
    at.fsm.dirty(name)
    step()
    assert not at.fsm.ledger.stale[domain] & at.fsm.ledger.mask([name])


@pytest.mark.parametrize(("backend", "name"), OWN)
def test_write_to_the_other_domain_is_found_when_it_is_entered(backend: str, name: str) -> None:
    at = world(backend, check="tensors")
    at.round_trip()
    at.prepare()
    write(at, name, DRAFT)
    with pytest.raises(StaleResource) as caught:
        at.fsm.draft_forward(at.fsm.batch(DRAFT))
    assert (caught.value.resource, caught.value.domain, caught.value.tampered) == (name, DRAFT, "written")
    at.fsm.publish(name, at.fsm.value(name, DRAFT), DRAFT)
    at.fsm.draft_forward(at.fsm.batch(DRAFT))


@pytest.mark.parametrize(("backend", "name"), [(backend, name) for backend, name, domain in CASES if domain is TARGET])
def test_target_written_during_the_draft_phase_is_found_at_restore(backend: str, name: str) -> None:
    """TargetMutated; `dirty` acknowledges it, restore works, and the next target_prepare rewrites the table."""
    at = world(backend, check="tensors")
    at.round_trip()
    at.prepare()
    if isinstance(at.fsm.backend.resource(name), Shared):
        return  # it is the draft's to write: the target's contents are saved
    right = at.fsm.value(name, TARGET).clone()
    at.fsm.draft_forward(at.fsm.batch(DRAFT))
    write(at, name, TARGET)
    was = snapshot(at.fsm)
    with pytest.raises(TargetMutated) as caught:
        at.fsm.restore()
    assert (caught.value.resource, caught.value.how) == (name, "written")
    assert f"{backend}.{name} [target] was written during the draft phase" in str(caught.value)
    assert f"to go on now: dirty({name!r}, TARGET), then restore()" in str(caught.value)
    assert was.differences(snapshot(at.fsm)) == []
    at.fsm.dirty(name, TARGET)
    at.fsm.restore()
    at.fsm.target_prepare()
    assert torch.equal(at.fsm.value(name, TARGET), right)


@pytest.mark.parametrize("domain", Domain)
@pytest.mark.parametrize("name", ["manager_ref", "rows", "live_rows", "block_table", "first_slots", "counters"])
def test_rebinding_behind_the_machine_is_found(name: str, domain: Domain) -> None:
    """The attribute shows another object than the one that was bound and refreshed."""
    at = world(check="tensors")
    at.round_trip()
    at.prepare()
    if domain is DRAFT:
        at.fsm.draft_forward(at.fsm.batch(DRAFT))
    held = getattr(at.metadata, name)
    setattr(at.metadata, name, held.clone() if isinstance(held, torch.Tensor) else object())
    with pytest.raises(StaleResource) as caught:
        at.fsm.target_prepare() if domain is TARGET else at.fsm.restore()
    assert (caught.value.resource, caught.value.domain, caught.value.tampered) == (name, domain, "rebound")
    setattr(at.metadata, name, held)
    at.fsm.target_prepare() if domain is TARGET else at.fsm.restore()


def test_tensors_are_looked_at_without_any_contract() -> None:
    """An engine that gives no rules is held to its level all the same."""
    at = world(check="tensors", contracts=[])
    at.round_trip()
    at.metadata.rows.fill_(1)
    with pytest.raises(StaleResource, match="rows"):
        at.prepare()


def test_stamps_level_does_not_look_at_tensors() -> None:
    """Integers only: what level "tensors" finds passes."""
    at = world(check="stamps")
    at.round_trip()
    write(at, "block_table", TARGET)
    at.prepare()
    assert at.fsm.state is Phase.TARGET_PREPARE


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_level_has_nothing_to_say_about_a_sound_loop(backend: str) -> None:
    """Steps, moves in each domain, replays, reports, rebinding through the machine: no false alarm."""
    at = world(backend, check="tensors")
    for batch in at.moves():
        at.fsm._fire("draft_replay", at.fsm.switch.draft, batch)
        at.fsm._fire("draft_replay", at.fsm.switch.draft, batch)
        at.fsm.restore()
    at.fsm.finish()
    at.prepare()


def test_published_write_is_known() -> None:
    at = world(check="tensors")
    at.round_trip()
    write(at, "block_table", TARGET)
    at.fsm.publish("block_table", at.fsm.value("block_table"))
    at.prepare()


# Guard mode: the engine switches and refreshes; the machine judges.


class Engine:
    """An engine with a switch and refreshes of its own, as they look before specfsm drives them."""

    def __init__(self, **twins: str) -> None:
        self.fuse = Fuse()
        self.metadata = Metadata(self.fuse)
        self.managers = {domain: manager(domain) for domain in Domain}
        backend = BACKENDS["toy"].make()
        backend.allocate(self.metadata, self.managers[TARGET], self.managers[DRAFT], SIZES, "cpu")
        for twin, original in twins.items():
            setattr(self.metadata, twin, getattr(self.metadata, original))
        self.fsm = Orchestrator(
            self.metadata, backend=backend, target=self.managers[TARGET], draft=self.managers[DRAFT], guard=True
        )
        self.resources = [each for each in backend.resources if not each.lazy and each.attribute]

    def refresh(self, domain: Domain, batch: Any = BATCH, forgotten: str = "") -> None:
        """Announce a phase, drop what is made lazily, write everything, and report all but one."""
        self.fsm.announce(batch, domain)
        self.fsm.invalidate("plan")
        self.fsm.invalidate("layouts")
        for resource in self.resources:
            if resource.name != forgotten:
                value = self.fsm.value(resource.name, domain)
                self.fsm.publish(resource.name, object() if value is None else value, domain)

    def prepare(self, batch: Any = BATCH, forgotten: str = "") -> None:
        self.refresh(TARGET, batch, forgotten)
        self.fsm.target_prepare(batch)

    def draft(self, batch: Any = BATCH, forgotten: str = "") -> None:
        self.refresh(DRAFT, batch, forgotten)
        self.fsm.draft_forward(batch)


def test_guard_lets_an_engine_that_reports_pass() -> None:
    """And exchanges nothing: what the metadata carries is the engine's business."""
    engine = Engine()
    engine.prepare()
    tables = {name: value for name, value in vars(engine.metadata).items() if isinstance(value, torch.Tensor)}
    engine.draft()
    engine.refresh(DRAFT, BATCH.next_step())
    engine.fsm.draft_step(engine.fsm.batch())
    assert (engine.fsm.state, engine.fsm.domain) == (Phase.DRAFT_FORWARD, DRAFT)
    assert all(vars(engine.metadata)[name] is value for name, value in tables.items())
    for shared in ("counters", "scratch"):
        engine.fsm.publish(shared, engine.fsm.value(shared, TARGET), TARGET)  # the engine copied them back
    engine.fsm.restore()
    engine.prepare()


@pytest.mark.parametrize("forgotten", ["manager_ref", "rows", "live_rows", "block_table", "first_slots", "scratch"])
@pytest.mark.parametrize("domain", Domain)
def test_guard_refuses_a_forgotten_write(forgotten: str, domain: Domain) -> None:
    """A write that nobody publishes leaves no stamp."""
    engine = Engine()
    if domain is DRAFT:
        engine.prepare()
    phase = engine.prepare if domain is TARGET else engine.draft
    with pytest.raises(StaleResource) as caught:
        phase(forgotten=forgotten)
    assert (caught.value.resource, caught.value.domain) == (forgotten, domain)
    phase()
    assert engine.fsm.domain is domain


def test_guard_refuses_a_write_from_before_the_blocks_moved() -> None:
    """The engine wrote its table, then pages moved under it."""
    engine = Engine()
    engine.refresh(TARGET)
    engine.managers[TARGET].swap()
    with pytest.raises(StaleResource) as caught:
        engine.fsm.target_prepare(BATCH)
    assert list(caught.value.moved) == ["blocks"]


def test_guard_refuses_a_plan_that_crosses_the_switch() -> None:
    """A plan that the target made, and the draft neither replaced nor dropped."""
    engine = Engine()
    engine.prepare()
    engine.refresh(DRAFT)
    engine.fsm.publish("plan", object(), TARGET)
    with pytest.raises(StaleResource) as caught:
        engine.fsm.draft_forward(BATCH)
    assert (caught.value.resource, caught.value.misbound) == ("plan", True)
    engine.fsm.invalidate("plan")
    engine.fsm.draft_forward(BATCH)


def test_one_buffer_for_both_caches_mutates_the_target() -> None:
    """What the draft wrote there, the target would read: restore refuses until the target's is written again."""
    engine = Engine(draft_first_slots="first_slots")
    engine.prepare()
    engine.draft()
    engine.fsm.publish("first_slots", engine.fsm.value("first_slots"))
    for shared in ("counters", "scratch"):
        engine.fsm.publish(shared, engine.fsm.value(shared, TARGET), TARGET)
    was = snapshot(engine.fsm)
    with pytest.raises(TargetMutated) as caught:
        engine.fsm.restore()
    assert (caught.value.resource, caught.value.how) == ("first_slots", "written")
    assert was.differences(snapshot(engine.fsm)) == []
    engine.fsm.publish("first_slots", engine.fsm.value("first_slots", TARGET), TARGET)
    engine.fsm.restore()


def test_one_buffer_written_for_the_draft_before_its_phase_is_stale_for_the_target() -> None:
    engine = Engine(draft_first_slots="first_slots")
    engine.prepare()
    engine.refresh(DRAFT)
    with pytest.raises(StaleResource) as caught:
        engine.fsm.target_prepare(BATCH)
    assert caught.value.resource in ("first_slots", "counters")


def test_guarded_restore_without_entry_is_refused_like_any_other() -> None:
    engine = Engine()
    engine.prepare()
    with pytest.raises(IllegalTransition):
        engine.fsm.restore()


def test_geometries_of_the_worlds_differ_in_everything() -> None:
    """So that a number taken from the wrong cache shows."""
    one, other = geometry(TARGET), geometry(DRAFT)
    names = ("tokens_per_block", "blocks_in_primary_pool", "max_blocks_per_seq", "num_layers", "index_scale")
    assert all(getattr(one, name) != getattr(other, name) for name in names)
