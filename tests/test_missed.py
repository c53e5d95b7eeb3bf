"""A refresh that is left out is refused: each resource × event × input, for every backend.

What can be left out is computed from the declaration and `ACTIONS`, so that a resource cannot be added without a case.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specfsm.backends.resource import ACTIONS, Action, Buffer, Path, Resource
from specfsm.domain import Domain
from specfsm.errors import StaleResource
from specfsm.orchestrator import PATHS
from specfsm.states.phase import Phase
from specfsm.verify import Check
from tests.toys import BACKENDS, BATCH, World, snapshot, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT

EVENTS = {
    "target_prepare": TARGET,
    "draft_forward": DRAFT,
    "draft_step": DRAFT,
    "draft_replay": DRAFT,
    "restore": TARGET,
}
"""The event → the domain in which it acts."""

FOLLOWS_INPUTS = {Action.REFRESH, Action.DERIVE, Action.INVALIDATE, Action.DROP}
SWITCHES = {Action.REBIND, Action.DERIVE, Action.INVALIDATE, Action.DROP, Action.COPY_BACK}


def switched_by_value(resource: Resource) -> bool:
    """What it carries changes at a switch itself: leaving that out leaves the other cache's value in place."""
    return not isinstance(resource, Buffer)


def kinds_of_miss(resource: Resource, event: str) -> str:
    """What leaving this resource out of this event is: "misbound", "stale", or "" where nothing can be left out."""
    actions = set(ACTIONS[type(resource)][PATHS[event]])
    enters = PATHS[event] is not Path.PREPARE
    if enters and actions & SWITCHES and (switched_by_value(resource) or Action.COPY_BACK in actions):
        return "misbound"
    return "stale" if actions & FOLLOWS_INPUTS else ""


NOTHING_TO_LEAVE_OUT = {("Table", "restore"), ("Staged", "restore"), ("Alias", "draft_replay")}
"""(kind, event): a table keeps its own buffer, which a restore gives back in any case; a replay derives no view."""


def test_what_cannot_be_left_out() -> None:
    """Every kind × event is a case below, except these."""
    declared = [resource for flavour in BACKENDS.values() for resource in flavour.make().resources]
    none = {(resource.kind, event) for resource in declared for event in EVENTS if not kinds_of_miss(resource, event)}
    assert none == NOTHING_TO_LEAVE_OUT
    assert {resource.kind for resource in declared} == {kind.__name__ for kind in ACTIONS}


def read_by(backend: str, resource: Resource) -> list[str]:
    """The inputs that a resource is derived from, directly or through others."""
    made = BACKENDS[backend].make()
    sources = made.ledger().sources[resource.name]
    return [source for source in made.inputs if source in sources]


def misses(kind: str) -> Iterator[tuple[str, str, str]]:
    for backend, flavour in BACKENDS.items():
        for event, domain in EVENTS.items():
            for resource in flavour.make().resources:
                if domain in resource.domains and kinds_of_miss(resource, event) == kind:
                    yield backend, event, resource.name


def missed_moves() -> list[tuple[str, str, str, str]]:
    return [
        (backend, event, name, source)
        for backend, event, name in misses("stale")
        for source in read_by(backend, BACKENDS[backend].make().resource(name))
    ]


def reach(at: World, event: str) -> None:
    """Everything fresh in both domains, plans made, and the machine where `event` may be fired."""
    at.round_trip()
    if event == "target_prepare":
        at.prepare()
    else:
        at.prepare()
        at.make_plans()
    if event in ("draft_step", "restore"):
        at.fsm.draft_forward(at.fsm.batch(DRAFT))
    if event in ("target_prepare", "draft_step", "restore"):
        at.make_plans()


def leave_out(at: World, name: str, domain: Domain) -> None:
    """From now on, as if the orchestrator had been made with ``drop=``."""
    drop = [0, 0]
    drop[domain] = at.fsm.ledger.mask([name])
    at.fsm.switch.leave_out((drop[0], drop[1]))


def fire(at: World, event: str, batch: object = None) -> None:
    if event == "draft_replay":
        at.fsm._fire(event, at.fsm.switch.draft, batch or at.fsm.batch(DRAFT))
    elif event == "draft_forward":
        at.fsm.draft_forward(batch or at.fsm.batch(DRAFT))
    elif event == "draft_step":
        at.fsm.draft_step(batch or at.fsm.batch(DRAFT))
    else:
        getattr(at.fsm, event)(*filter(None, [batch]))


def assert_refused(at: World, event: str, batch: object, state: Phase) -> StaleResource:
    with pytest.raises(StaleResource) as caught:
        fire(at, event, batch)
    assert at.fsm.state is state
    error = caught.value
    assert (error.state, error.event) == (state, event)
    return error


@pytest.mark.parametrize(("backend", "event", "name", "source"), missed_moves())
def test_missed_refresh_is_refused(backend: str, event: str, name: str, source: str) -> None:
    """One input moves, the resource is not refreshed: the error names resource, domain and that input alone."""
    at, domain = world(backend), EVENTS[event]
    reach(at, event)
    state = at.fsm.state
    leave_out(at, name, domain)
    error = assert_refused(at, event, at.move(source, domain), state)
    assert type(error) is StaleResource
    assert (error.backend, error.resource, error.domain, error.misbound, error.never) == (
        backend,
        name,
        domain,
        False,
        False,
    )
    # A shared buffer was given back at the last restore: whatever the draft had in it moved too.
    own = [name] if name in error.moved else []
    assert list(error.moved) == [source, *own]
    assert error.moved[source][0] < error.moved[source][1]
    assert f"{backend}.{name} [{domain}] is stale: {source} moved " in str(error)
    assert f"refresh it before this event: drop no refresh of {name}" in str(error)


@pytest.mark.parametrize(("backend", "event", "name"), list(misses("misbound")))
def test_missed_switch_is_refused(backend: str, event: str, name: str) -> None:
    """A value that does not follow the switch is refused whether or not any input moved, and all is as it was."""
    at, domain = world(backend), EVENTS[event]
    reach(at, event)
    was, state = snapshot(at.fsm), at.fsm.state
    leave_out(at, name, domain)
    error = assert_refused(at, event, None, state)
    assert (error.backend, error.resource, error.domain, error.misbound) == (backend, name, domain, True)
    assert was.differences(snapshot(at.fsm)) == []
    assert f"{backend}.{name} [{domain}] still holds the other cache's value" in str(error)
    assert f"let the transition switch {name}; do not drop its action" in str(error)


@pytest.mark.parametrize(("backend", "event", "name"), [*misses("stale"), *misses("misbound")])
def test_nothing_is_refused_without_a_miss(backend: str, event: str, name: str) -> None:
    """The same situations with the refresh in place: each input moves, and the event is accepted."""
    at, domain = world(backend), EVENTS[event]
    for source in read_by(backend, at.fsm.backend.resource(name)):
        reach(at, event)
        fire(at, event, at.move(source, domain) if event != "restore" else None)
        if at.fsm.state in (Phase.DRAFT_FORWARD, Phase.DRAFT_REPLAY):
            at.fsm.restore()


@pytest.mark.parametrize("backend", BACKENDS)
def test_drop_argument_is_refused_at_the_first_event(backend: str) -> None:
    """``drop=`` by name leaves the resource out in both domains; the first phase that needs it says so."""
    for resource in BACKENDS[backend].make().resources:
        at = world(backend, drop=[resource.name])
        with pytest.raises(StaleResource) as caught:
            at.round_trip()
        error = caught.value
        assert (error.resource, error.domain, error.never) == (resource.name, TARGET, True)
        assert f"{resource.name} [target] was never refreshed (it is derived from " in str(error)


@pytest.mark.parametrize("backend", BACKENDS)
def test_drop_in_the_draft_alone_is_refused_at_its_phase(backend: str) -> None:
    """``drop=[(name, DRAFT)]`` lets the target's phase pass."""
    for resource in BACKENDS[backend].make().resources:
        if DRAFT not in resource.domains:
            continue
        at = world(backend, drop=[(resource.name, DRAFT)])
        at.prepare()
        at.make_plans()
        with pytest.raises(StaleResource) as caught:
            at.fsm.draft_forward()
        error = caught.value
        assert (error.resource, error.domain) == (resource.name, DRAFT)
        assert error.misbound == switched_by_value(resource)


def test_unknown_resource_cannot_be_dropped() -> None:
    with pytest.raises(KeyError, match="toy has no resource 'block_tabel'; it has manager_ref, base, rows"):
        world(drop=["block_tabel"])


def test_error_names_the_root_and_lists_the_rest() -> None:
    """A reader of something stale is stale because of it: the producer is the news."""
    at = world(drop=[("rows", DRAFT), ("block_table", DRAFT), ("first_slots", DRAFT)])
    at.prepare()
    with pytest.raises(StaleResource) as caught:
        at.fsm.draft_forward()
    assert caught.value.resource == "rows"
    assert caught.value.resources == ("rows", "block_table", "first_slots")
    assert "stale beside it: block_table, first_slots" in str(caught.value)


def test_unchecked_lets_the_stale_table_through() -> None:
    """Level "off" is what the library replaces: the phase runs on the old table without a word."""
    at = world(drop=[("block_table", DRAFT)], check="off")
    at.round_trip()
    assert at.fsm.check is Check.OFF
    assert (at.fsm.value("block_table", DRAFT) == 0).all()


def test_engine_may_write_what_the_machine_leaves_out() -> None:
    """A published write counts as the refresh, if it was made from what the event will run."""
    at = world(drop=[("block_table", DRAFT)])
    at.prepare()
    at.fsm.publish("block_table", at.fsm.value("block_table", DRAFT), DRAFT)
    with pytest.raises(StaleResource, match="block_table"):
        at.fsm.draft_forward()
    at.fsm.announce(BATCH, DRAFT)
    for name in ("base", "rows", "block_table"):
        at.fsm.publish(name, at.fsm.value(name, DRAFT), DRAFT)
    at.fsm.draft_forward(BATCH)
    assert at.fsm.state is Phase.DRAFT_FORWARD
