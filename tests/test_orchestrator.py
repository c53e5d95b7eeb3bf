"""What a decode loop holds: every event in every phase, batches, the draft window, contracts, reports, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch
from attrs import define, field

from specfsm.backends.backend import Backend
from specfsm.backends.resource import Alias, Pointer, Table
from specfsm.domain import Batch, Domain, UnifiedCache
from specfsm.errors import (
    IllegalTransition,
    NestedEvent,
    NestedPhase,
    RefreshDeclined,
    RestoreFailed,
    StaleResource,
    UnknownMetadata,
    WrongThread,
)
from specfsm.graph import Graph
from specfsm.orchestrator import Orchestrator
from specfsm.states.phase import PHASE, Phase
from specfsm.states.resource import Freshness
from tests.toys import (
    BACKENDS,
    BATCH,
    OTHER,
    RESOURCES,
    SIZES,
    Fuse,
    Injected,
    Metadata,
    Toy,
    World,
    geometry,
    manager,
    snapshot,
    world,
)

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT

SHARED = [each.name for each in RESOURCES if each.kind == "Shared"]

FIRE: dict[str, Callable[[Orchestrator], Any]] = {
    "target_prepare": lambda fsm: fsm.target_prepare(BATCH),
    "draft_forward": lambda fsm: fsm.draft_forward(BATCH),
    "draft_step": lambda fsm: fsm.draft_step(BATCH),
    "draft_replay": lambda fsm: fsm.draft_replay(Graph("none"), BATCH),
    "restore": lambda fsm: fsm.restore(),
    "finish": lambda fsm: fsm.finish(),
    "reset": lambda fsm: fsm.reset(),
}
"""Every event that an engine can fire; `fault` is the machine's own."""


def reach(state: Phase, backend: str = "toy", **options: Any) -> World:
    """A world in `state`, by public events alone (a fault is injected, and a replay has no graph)."""
    at = world(backend, **options)
    if state is not Phase.IDLE:
        at.prepare()
    if state in (Phase.DRAFT_FORWARD, Phase.RESTORE):
        at.fsm.draft_forward()
    if state is Phase.RESTORE:
        at.fsm.restore()
    if state is Phase.DRAFT_REPLAY:
        at.fsm._fire("draft_replay", at.fsm.switch.draft, BATCH)
    if state is Phase.FAULTED:
        at.fuse.arm(f"set {at.fsm.switch.attributes[0]}", late=True, stuck=True)
        with pytest.raises(RestoreFailed):
            at.fsm.draft_forward()
        at.fuse.disarm()
    assert at.fsm.state is state
    return at


def test_an_engine_can_fire_every_event_but_fault() -> None:
    """Event names are method names, and nothing else moves the machine."""
    assert set(FIRE) == set(PHASE.events) - {"fault"}
    assert all(callable(getattr(Orchestrator, event)) for event in FIRE)
    assert not hasattr(Orchestrator, "fault")


@pytest.mark.parametrize("event", FIRE)
@pytest.mark.parametrize("state", Phase)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_event_in_every_phase(backend: str, state: Phase, event: str) -> None:
    """The listed move; or a refusal after which state, metadata, contents, stamps, versions and masks are the same."""
    at = reach(state, backend, check="off" if event == "draft_replay" else None, observe=True)
    at.calls.clear()
    was, asked, listed = snapshot(at.fsm), len(at.fsm.trace), PHASE.find(state, event)
    if listed is not None:
        FIRE[event](at.fsm) if event != "draft_replay" else at.fsm._fire(event, at.fsm.switch.draft, BATCH)
        assert at.fsm.state is listed.to
        assert at.calls[0] == f"before_{event}"
        return
    with pytest.raises(IllegalTransition) as caught:
        FIRE[event](at.fsm)
    assert was.differences(snapshot(at.fsm)) == []
    assert (at.calls, len(at.fsm.trace)) == ([], asked)
    assert (caught.value.state, caught.value.event) == (state, event)
    legal = tuple(name for name in PHASE.legal(state) if name != "fault")
    assert caught.value.legal == legal
    assert str(caught.value).startswith(f"{state.name} --{event}--> ? refused")
    if type(caught.value) is IllegalTransition:
        assert f"{state.name} accepts {', '.join(legal)}" in str(caught.value)


@pytest.mark.parametrize("state", [Phase.DRAFT_FORWARD, Phase.DRAFT_REPLAY])
def test_entering_the_draft_phase_twice_says_so(state: Phase) -> None:
    """The first entry's originals would be lost."""
    at = reach(state)
    was = snapshot(at.fsm)
    with pytest.raises(NestedPhase, match="entering it again would record draft tables as the target's"):
        at.fsm.draft_forward()
    assert was.differences(snapshot(at.fsm)) == []
    at.fsm.restore()
    assert at.metadata.block_table is at.fsm.value("block_table", TARGET)


def test_restore_without_entry_is_refused() -> None:
    at = reach(Phase.TARGET_PREPARE)
    with pytest.raises(IllegalTransition, match="TARGET_PREPARE accepts target_prepare, draft_forward, draft_replay"):
        at.fsm.restore()


# Threads.


def in_thread(name: str, function: Callable[[], Any]) -> list[BaseException]:
    """Run `function` in a thread of this name; what it raised."""
    raised: list[BaseException] = []

    def body() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body, name=name)
    thread.start()
    thread.join()
    return raised


@pytest.mark.parametrize("state", [Phase.IDLE, Phase.TARGET_PREPARE, Phase.DRAFT_FORWARD])
def test_event_from_another_thread_is_refused(state: Phase) -> None:
    """The error names both threads, and changes nothing."""
    at = reach(state)
    was = snapshot(at.fsm)
    [error] = in_thread("sampler", lambda: at.fsm.target_prepare(BATCH))
    assert isinstance(error, WrongThread)
    assert (error.owner, error.caller) == (threading.current_thread().name, "sampler")
    assert "thread 'sampler' fired it" in str(error)
    assert "fsm.adopt() in IDLE" in str(error)
    assert was.differences(snapshot(at.fsm)) == []


def test_adopting_hands_over_in_idle() -> None:
    """After it the new thread drives, and the old one is refused."""
    at = reach(Phase.IDLE)

    def drive() -> None:
        at.fsm.adopt()
        at.round_trip()

    assert in_thread("worker", drive) == []
    assert at.fsm.state is Phase.RESTORE
    with pytest.raises(WrongThread):
        at.fsm.finish()


def test_adopting_half_way_is_refused() -> None:
    at = reach(Phase.DRAFT_FORWARD)
    [error] = in_thread("worker", at.fsm.adopt)
    assert isinstance(error, IllegalTransition)
    assert f"DRAFT_FORWARD is half way, and thread {threading.current_thread().name!r} drives it" in str(error)
    assert "to mend: let that thread come to IDLE first" in str(error)
    at.fsm.restore()


# Batches.


def test_first_event_needs_a_batch() -> None:
    at = world()
    with pytest.raises(ValueError, match="target_prepare needs a batch: there was none before it"):
        at.fsm.target_prepare()
    assert at.fsm.state is Phase.IDLE


def test_batch_that_does_not_fit_is_refused_before_anything_changes() -> None:
    at = reach(Phase.TARGET_PREPARE)
    was = snapshot(at.fsm)
    long = Batch(range(6), (1,) * 6, (1,) * 6)
    with pytest.raises(ValueError, match="a batch of 6 rows does not fit the 5 rows of the buffers"):
        at.fsm.target_prepare(long)
    assert was.differences(snapshot(at.fsm)) == []


@pytest.mark.parametrize("backend", ["dsa", "trtllm"])
def test_batch_of_more_tokens_than_the_mappings_have_is_refused(backend: str) -> None:
    """DSA's would leave out the last ones; who has no entry for each token takes any number."""
    at = world(backend)
    at.prepare()
    many = Batch(BATCH.request_ids, (8, 8, 8), (8, 8, 1))
    if backend == "trtllm":
        at.fsm.target_prepare(many)
        return
    for event in (lambda: at.fsm.target_prepare(many), lambda: at.fsm.target_prepare(draft=many)):
        was = snapshot(at.fsm)
        with pytest.raises(ValueError, match="a batch of 17 tokens does not fit the 16 tokens of the buffers"):
            event()
        assert was.differences(snapshot(at.fsm)) == []


def test_batches_default_to_what_is_current() -> None:
    """The target's to its last one, the draft's to the target's, a step's to the next step's."""
    at = world()
    at.fsm.target_prepare(BATCH)
    at.fsm.target_prepare()
    assert at.fsm.batch() is BATCH
    with at.fsm.draft_forward():
        assert at.fsm.batch() is BATCH
        at.fsm.draft_step()
        assert at.fsm.batch() == BATCH.next_step()
        assert at.fsm.batch(TARGET) is BATCH


def test_empty_batch_is_a_batch() -> None:
    """A rank without requests still runs its phases; its batch is not taken for "none given"."""
    nobody = Batch((), (), ())
    at = world()
    at.round_trip()
    at.fsm.target_prepare(nobody)
    with at.fsm.draft_forward(nobody):
        assert at.fsm.batch(DRAFT) is nobody
        at.fsm.draft_step(nobody)
    assert at.fsm.batch() is nobody
    assert len(at.metadata.live_rows) == 0


# The window.


class Crash(Exception):
    pass


def test_window_restores_on_return() -> None:
    at = reach(Phase.TARGET_PREPARE)
    with at.fsm.draft_forward() as fsm:
        assert fsm is at.fsm
        assert (fsm.state, fsm.domain) == (Phase.DRAFT_FORWARD, DRAFT)
    assert (at.fsm.state, at.fsm.domain) == (Phase.RESTORE, TARGET)


@pytest.mark.parametrize("error", [Crash, KeyboardInterrupt, GeneratorExit])
def test_window_restores_on_an_exception_and_raises_it(error: type[BaseException]) -> None:
    """The engine sees its own error, and the target is intact."""
    at = reach(Phase.TARGET_PREPARE)
    was = vars(at.metadata).copy()

    def crash() -> None:
        with at.fsm.draft_forward():
            at.fsm.draft_step()
            raise error

    with pytest.raises(error):
        crash()
    assert at.fsm.state is Phase.RESTORE
    assert all(at.metadata.__dict__[name] is value for name, value in was.items() if name not in ("layouts", "_fuse"))


def test_window_that_was_left_inside_is_left_alone() -> None:
    """A body may restore by itself."""
    at = reach(Phase.TARGET_PREPARE)
    with at.fsm.draft_forward():
        at.fsm.restore()
        at.prepare()
    assert at.fsm.state is Phase.TARGET_PREPARE


def test_window_refused_at_entry_restores_nothing() -> None:
    at = reach(Phase.TARGET_PREPARE, drop=[("rows", DRAFT)])
    with pytest.raises(StaleResource), at.fsm.draft_forward():
        pytest.fail("the body must not run")
    assert at.fsm.state is Phase.TARGET_PREPARE


# Observers and contracts.


def test_observer_is_called_in_the_order_of_the_events() -> None:
    at = world(observe=True)
    at.prepare()
    with at.fsm.draft_forward():
        pass
    assert at.calls == [
        *("before_target_prepare", "on_exit_idle", "on_enter_target_prepare", "after_target_prepare"),
        *("before_draft_forward", "on_exit_target_prepare", "on_enter_draft_forward", "after_draft_forward"),
        *("before_restore", "on_exit_draft_forward", "on_enter_restore", "after_restore"),
    ]


def test_observer_sees_the_phase_it_is_told_of() -> None:
    """Before: the old state and the old cache. On entry: the new ones, verified."""
    seen: list[tuple[str, Phase, Domain]] = []

    class Observer:
        fsm: Orchestrator

        def before_draft_forward(self) -> None:
            seen.append(("before", self.fsm.state, self.fsm.domain))

        def on_enter_draft_forward(self) -> None:
            seen.append(("enter", self.fsm.state, self.fsm.domain))

    observer = Observer()
    at = world()
    observer.fsm = Orchestrator(
        at.metadata, backend=at.fsm.backend, target=at.target, draft=at.draft, observer=observer
    )
    observer.fsm.target_prepare(BATCH)
    observer.fsm.draft_forward()
    assert seen == [("before", Phase.TARGET_PREPARE, TARGET), ("enter", Phase.DRAFT_FORWARD, DRAFT)]


def test_raising_observer_undoes_the_transition() -> None:
    """Whoever is told last may still refuse."""
    at = world(observe=True)
    at.round_trip()
    at.prepare()
    was, traced = snapshot(at.fsm), len(at.fsm.trace)
    at.fuse.arm("call after_draft_forward")
    with pytest.raises(Injected):
        at.fsm.draft_forward(at.fsm.batch(DRAFT))
    assert set(was.differences(snapshot(at.fsm))) <= {f"{name} [draft] has other contents" for name in SHARED}
    assert len(at.fsm.trace) == traced, "a transition that was undone is not traced"


@pytest.mark.parametrize(
    "action", ["call before_draft_forward", "call after_draft_forward", "refresh counters", "admit"]
)
def test_event_inside_an_event_is_refused(action: str) -> None:
    """One fired by an observer, a refresh or a contract could not be undone with the first; neither happens."""
    at = reach(Phase.TARGET_PREPARE, observe=True)
    at.fsm.explain()
    was = snapshot(at.fsm)
    around = at.fuse.around

    @contextmanager
    def firing(passed: str) -> Iterator[None]:
        with around(passed):
            if passed.startswith(action):
                at.fsm.finish()
            yield

    at.fuse.around = firing  # type: ignore[method-assign]  # whatever passes here fires an event
    with pytest.raises(NestedEvent, match="another event is under way"):
        at.fsm.draft_forward()
    at.fuse.around = around  # type: ignore[method-assign]
    assert snapshot(at.fsm).facts["state"] is Phase.TARGET_PREPARE
    lines = [line for line in was.differences(snapshot(at.fsm)) if not line.endswith("has other contents")]
    assert lines == []
    at.fsm.draft_forward()


@define
class Refusal:
    """A contract that refuses one event, and looks at the machine while it is asked."""

    events: tuple[str, ...]
    seen: list[tuple[str, Batch | None, int]] = field(factory=list)

    def admit(self, fsm: Orchestrator, event: str, batch: Batch | None) -> None:
        self.seen.append((event, batch, len(vars(fsm.metadata))))
        raise IllegalTransition(fsm.state, event, PHASE.find(fsm.state, event).to)


@pytest.mark.parametrize("event", ["target_prepare", "draft_forward", "draft_step", "restore", "finish"])
def test_contract_is_asked_before_anything_changes(event: str) -> None:
    state = next(state for state, move in PHASE.moves() if move.event == event and state is not Phase.IDLE)
    refusal = Refusal((event,) if event != "target_prepare" else ())
    at = reach(state, contracts=[refusal], observe=True)
    if event == "target_prepare":
        at.fsm.contracts["target_prepare"] = (refusal,)
    at.calls.clear()
    at.fsm.explain()  # looks at what the managers did meanwhile, as the event will
    was = snapshot(at.fsm)
    with pytest.raises(IllegalTransition):
        FIRE[event](at.fsm)
    assert was.differences(snapshot(at.fsm)) == []
    assert at.calls == []
    assert [name for name, *_ in refusal.seen] == [event]


def test_contracts_are_asked_for_their_events_alone() -> None:
    """And with the batch that the event was fired with."""
    at = world()
    [admission] = at.fsm.contracts["target_prepare"]
    at.round_trip()
    at.fsm.finish()
    assert admission.asked == ["target_prepare", "draft_forward", "draft_step", "restore", "finish"]  # type: ignore[attr-defined]  # toys.Admission
    refusal = Refusal(("draft_step",))
    quiet = reach(Phase.DRAFT_FORWARD, contracts=[refusal])
    assert refusal.seen == []
    with pytest.raises(IllegalTransition):
        quiet.fsm.draft_step(OTHER["lengths"])
    assert refusal.seen[0][1] is OTHER["lengths"]


# What the engine reports.


def test_publish_of_another_tensor_is_refused() -> None:
    """A refresh of a tensor that nobody reads is not a refresh."""
    at = reach(Phase.TARGET_PREPARE)
    bound = at.fsm.value("block_table")
    with pytest.raises(ValueError, match=r"was published with another tensor than the bound one: .* fsm.bind"):
        at.fsm.publish("block_table", bound.clone())
    with pytest.raises(ValueError, match="another tensor"):
        at.fsm.publish("block_table", bound[:1])
    with pytest.raises(ValueError, match="another tensor"):
        at.fsm.publish("block_table", [1, 2])
    at.fsm.publish("block_table", bound[:])


def test_publish_of_nothing_is_a_decline() -> None:
    """None stamps nothing; the next refusal says that the refresh declined."""
    at = reach(Phase.TARGET_PREPARE, drop=[("block_table", TARGET)], check="off")
    at.fsm.publish("block_table", None)
    at.fsm.check = type(at.fsm.check)(1)
    with pytest.raises(RefreshDeclined, match="its refresh ran and returned nothing"):
        at.prepare()


def test_shared_buffer_that_the_engine_writes_is_given_back() -> None:
    """Its contents were saved at the switch, so that the draft's write is no mutation of the target's."""
    at = world(check="tensors")
    at.prepare()
    was = at.metadata.counters.clone()
    with at.fsm.draft_forward():
        at.metadata.counters.fill_(44)
        at.fsm.publish("counters", at.metadata.counters)
    assert torch.equal(at.metadata.counters, was)
    at.fsm.target_prepare()


def test_publish_names_what_does_not_exist() -> None:
    at = reach(Phase.TARGET_PREPARE)
    with pytest.raises(KeyError, match="toy has no resource 'tables'; it has manager_ref, "):
        at.fsm.publish("tables", object())


def test_publishing_a_plan_puts_it_on_the_metadata() -> None:
    """It is kept for this phase, dropped by the switch, and dropped again on the way back."""
    at = reach(Phase.TARGET_PREPARE)
    plan = object()
    at.fsm.publish("plan", plan)
    assert at.metadata.plan is plan is at.fsm.value("plan")
    at.fsm.target_prepare()
    assert at.metadata.plan is plan, "nothing moved: the plan still holds"
    with at.fsm.draft_forward():
        assert at.metadata.plan is None
        assert at.fsm.value("plan") is None
        assert at.fsm.value("plan", TARGET) is None
        at.fsm.publish("plan", object())
    assert at.metadata.plan is None
    assert at.fsm.value("plan") is None


def test_lazy_value_that_nobody_published_is_dropped_too() -> None:
    """A kernel that makes its plan without a word: it goes when an input moves, all the same."""
    at = reach(Phase.TARGET_PREPARE)
    at.metadata.plan, at.metadata.layouts = object(), {"full": 1}
    at.fsm.target_prepare(OTHER["lengths"])
    assert at.metadata.plan is None
    assert at.metadata.layouts == {"full": 1}, "it reads the manager alone"
    at.target.generation += 1
    at.fsm.target_prepare()
    assert at.metadata.layouts == {}


def test_dirty_makes_a_resource_and_its_readers_stale() -> None:
    at = reach(Phase.TARGET_PREPARE)
    at.fsm.dirty("rows")
    stale = [name for name in at.fsm.ledger.names if at.fsm.ledger.state(TARGET, name) is Freshness.STALE]
    assert stale == ["rows", "block_table", "first_slots"]
    at.fsm.target_prepare()
    assert at.fsm.ledger.state(TARGET, "rows") is Freshness.FRESH


def test_bind_takes_another_buffer() -> None:
    """It is on the metadata at once, stale until refreshed, and the next refresh writes it."""
    at = reach(Phase.TARGET_PREPARE)
    old = at.fsm.value("block_table")
    new = torch.full_like(old, 77)
    at.fsm.bind("block_table", new)
    assert at.metadata.block_table is new
    assert at.fsm.ledger.state(TARGET, "block_table") is Freshness.STALE
    at.fsm.target_prepare()
    assert torch.equal(new, old)


@pytest.mark.parametrize("name", [each.name for each in RESOURCES if each.kind in ("Table", "Staged", "Shared")])
def test_every_buffer_can_be_bound_anew(name: str) -> None:
    """Whether a launch reads it, writes it or does not know it; a second step fills it as it filled the first."""
    at = world()
    at.round_trip()
    for domain in Domain:
        new = torch.full_like(at.fsm.value(name, domain), 99)
        at.fsm.bind(name, new, domain)
        assert at.fsm.value(name, domain) is new
    undisturbed = world()
    undisturbed.round_trip()
    at.round_trip()
    for domain in Domain:
        assert torch.equal(at.fsm.value(name, domain), undisturbed.fsm.value(name, domain))


def test_binding_the_target_during_the_draft_phase_is_what_returns() -> None:
    """The record of the originals follows: a restore gives back what is bound now."""
    at = reach(Phase.DRAFT_FORWARD)
    new = torch.zeros_like(at.fsm.value("block_table", TARGET))
    at.fsm.bind("block_table", new, TARGET)
    assert at.metadata.block_table is at.fsm.value("block_table", DRAFT)
    at.fsm.restore()
    assert at.metadata.block_table is new


def test_binding_the_draft_while_the_target_is_active_waits_for_the_switch() -> None:
    at = reach(Phase.TARGET_PREPARE)
    with at.fsm.draft_forward():
        pass
    at.prepare()
    new = torch.zeros_like(at.fsm.value("block_table", DRAFT))
    at.fsm.bind("block_table", new, DRAFT)
    assert at.metadata.block_table is at.fsm.value("block_table", TARGET)
    with at.fsm.draft_forward():
        assert at.metadata.block_table is new


@pytest.mark.parametrize(
    ("name", "tensor", "error", "message"),
    [
        ("block_table", torch.zeros(5, 7, dtype=torch.int64), ValueError, "has the dtype int64, not int32"),
        ("block_table", torch.zeros(5, 6, dtype=torch.int32), ValueError, r"not \[S, B\] = \[5, 7\]"),
        ("block_table", None, ValueError, r"is missing: int32 \[S, B\] = \[5, 7\] is due"),
        (
            "plan",
            torch.zeros(1),
            TypeError,
            "plan is a Plan: only a Table, Staged or Shared has a buffer to bind; publish",
        ),
        ("manager_ref", torch.zeros(1), TypeError, "manager_ref is a Pointer"),
        ("nothing", torch.zeros(1), KeyError, "toy has no resource 'nothing'"),
    ],
)
def test_bind_refuses_what_does_not_fit(name: str, tensor: Any, error: type[Exception], message: str) -> None:
    at = reach(Phase.TARGET_PREPARE)
    was = snapshot(at.fsm)
    with pytest.raises(error, match=message):
        at.fsm.bind(name, tensor)
    assert was.differences(snapshot(at.fsm)) == []


def test_invalidate_drops_lazy_values_only() -> None:
    at = reach(Phase.TARGET_PREPARE)
    at.make_plans()
    at.fsm.invalidate("plan")
    assert at.metadata.plan is None
    assert at.fsm.ledger.state(TARGET, "plan") is Freshness.UNBOUND
    at.fsm.invalidate("layouts")
    assert at.metadata.layouts == {}
    with pytest.raises(TypeError, match="block_table is a Table; only a Plan or a Cache can be invalidated"):
        at.fsm.invalidate("block_table")
    with pytest.raises(KeyError, match="no resource"):
        at.fsm.invalidate("plans")


def test_moved_knows_the_inputs() -> None:
    at = reach(Phase.TARGET_PREPARE)
    at.fsm.moved("adapter")
    assert at.fsm.ledger.state(TARGET, "first_slots") is Freshness.STALE
    with pytest.raises(KeyError, match="toy has no input 'block_table'; it has manager, blocks, batch"):
        at.fsm.moved("block_table")


@pytest.mark.parametrize("domain", Domain)
def test_moved_in_one_domain_leaves_the_other(domain: Domain) -> None:
    at = world()
    at.round_trip()
    at.fsm.moved("adapter", domain)
    assert at.fsm.ledger.state(domain, "first_slots") is Freshness.STALE
    assert at.fsm.ledger.state(domain.other, "first_slots") is Freshness.FRESH


def test_resource_of_one_domain_has_no_value_in_the_other() -> None:
    """A table that only the target has is untouched by the draft, and asking for the draft's is an error."""
    only = Table(
        "mask", reads=("batch",), dtype="int32", shape=("S",), domains=(TARGET,), refresh=lambda view, buffer: buffer
    )
    scale = Pointer("scale", reads=("adapter",), of=lambda view: 1.0, domains=(TARGET,))
    at = world(Backend("target_only", (*RESOURCES, only, scale), {"adapter": "the adapter"}))
    at.prepare()
    mask = at.metadata.mask
    with at.fsm.draft_forward():
        assert at.metadata.mask is mask
        at.fsm.publish("scale", 2.0, TARGET)
        assert at.metadata.scale == 2.0
        with pytest.raises(KeyError, match="mask does not exist in the draft's cache"):
            at.fsm.value("mask")
    assert at.metadata.scale == 2.0, "no switch took it away, so none gives back an older one"
    assert not hasattr(at.metadata, "draft_mask")


# Refreshes that decline.


def declining(name: str) -> Backend:
    """The toy, with a resource whose refresh returns nothing."""

    def nothing(*_: Any) -> None:
        return None

    def decline(resource: Any) -> Any:
        function = next(each for each in ("fill", "refresh", "of", "derive") if getattr(resource, each, None))
        if isinstance(resource, Alias):
            function = "derive"
        return attrs.evolve(resource, **{function: nothing})

    resources = tuple(decline(each) if each.name == name else each for each in RESOURCES)
    return Backend("toy", resources, {"adapter": "the adapter"})


@pytest.mark.parametrize("name", ["manager_ref", "base", "rows", "live_rows", "first_slots", "counters", "scratch"])
def test_refresh_that_returns_nothing_is_refused(name: str) -> None:
    """It wrote nothing, so its resource is as stale as before, and its readers were not refreshed from it."""
    at = world(declining(name))
    at.fsm.announce(BATCH)
    was = snapshot(at.fsm)
    with pytest.raises(RefreshDeclined) as caught:
        at.prepare()
    assert [line for line in was.differences(snapshot(at.fsm)) if not line.endswith("has other contents")] == []
    assert (caught.value.resource, caught.value.domain) == (name, TARGET)
    assert "its refresh ran and returned nothing (declined)" in str(caught.value)
    assert at.fsm.state is Phase.IDLE
    assert isinstance(caught.value, StaleResource)


def test_readers_of_what_declined_are_not_refreshed() -> None:
    at = world(declining("rows"))
    table = at.fsm.value("block_table")
    table.fill_(55)
    with pytest.raises(RefreshDeclined) as caught:
        at.prepare()
    assert (table == 55).all()
    assert set(caught.value.resources) == {"rows", "block_table", "first_slots"}


# Unified caches.


def test_unified_cache_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="UnifiedCache needs the reason"):
        UnifiedCache("  ")


def test_unified_cache_runs_the_draft_phase_without_rebinding() -> None:
    """One cache: nothing is exchanged, what moved is refreshed, and explain says why."""
    at = world(draft=UnifiedCache("the draft is an MTP head over the target's own pages"))
    at.prepare()
    was = vars(at.metadata).copy()
    with at.fsm.draft_forward():
        assert at.fsm.domain is TARGET
        assert all(vars(at.metadata)[name] is was[name] for name in ("block_table", "rows", "manager_ref"))
        at.fsm.draft_step(OTHER["lengths"])
        assert at.fsm.batch(DRAFT) is OTHER["lengths"]
    assert at.fsm.state is Phase.RESTORE
    assert "the draft shares the target's cache: the draft is an MTP head" in str(at.fsm.explain())
    assert {line.domain for line in at.fsm.explain().lines} == {TARGET}


def test_backend_may_declare_the_unified_cache() -> None:
    """Whatever draft manager the engine passes, the backend knows better."""
    reason = UnifiedCache("this backend keeps both in one pool")
    at = world(Backend("toy", RESOURCES, {"adapter": "the adapter"}, unified=reason))
    assert at.fsm.unified is reason
    at.round_trip()
    assert at.draft.generation == 1
    assert at.fsm.bindings[0] is at.fsm.bindings[1]


# Unknown metadata.


def bind(change: Callable[[Metadata], Any] = lambda _: None, **managers: Any) -> Orchestrator:
    target, draft = manager(TARGET), manager(DRAFT)
    metadata = Metadata(Fuse())
    backend = Toy()
    backend.allocate(metadata, target, draft, SIZES, "cpu")
    change(metadata)
    return Orchestrator(metadata, **{"backend": backend, "target": target, "draft": draft, **managers})


MISFITS = {
    "a missing twin": (
        lambda m: delattr(m, "draft_block_table"),
        r"draft_block_table \[draft\] is missing: int32 \[S, B\] = \[5, 5\] is due",
    ),
    "a twin that is None": (lambda m: setattr(m, "draft_rows", None), r"draft_rows \[draft\] is missing"),
    "a twin of the target's width": (
        lambda m: setattr(m, "draft_block_table", torch.zeros(5, 7, dtype=torch.int32)),
        r"draft_block_table \[draft\] has the shape \[5, 7\], not \[S, B\] = \[5, 5\]",
    ),
    "another dtype": (
        lambda m: setattr(m, "block_table", torch.zeros(5, 7, dtype=torch.int64)),
        r"block_table \[target\] has the dtype int64, not int32",
    ),
    "a buffer of another length": (
        lambda m: setattr(m, "draft_rows", torch.zeros(4, dtype=torch.int32)),
        r"draft_rows \[draft\] has the shape \[4\], not \[S\] = \[5\]",
    ),
    "nothing that tells a size": (
        lambda m: [delattr(m, name) for name in list(vars(m)) if name != "_fuse"],
        "no buffer on it tells the extent of axis S",
    ),
    "one buffer for both caches": (
        lambda m: setattr(m, "draft_first_slots", m.first_slots),
        r"draft_first_slots \[draft\] is the target's own buffer",
    ),
}


@pytest.mark.parametrize("fault", MISFITS)
def test_metadata_that_does_not_fit_is_refused(fault: str) -> None:
    """A missing twin is an error, never a pass; the message says what is due and what makes it."""
    change, message = MISFITS[fault]
    with pytest.raises(UnknownMetadata, match=message) as caught:
        bind(change)
    assert "to mend: " in str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_buffer_made_in_inference_mode_is_refused() -> None:
    """It has no version counter, so that a write behind the machine's back could not be found."""
    with torch.inference_mode():
        made = torch.zeros(5, 7, dtype=torch.int32)
    with pytest.raises(UnknownMetadata, match="was made in inference mode, which has no version counters"):
        bind(lambda m: setattr(m, "block_table", made))


def test_every_misfit_is_listed_at_once() -> None:
    with pytest.raises(UnknownMetadata) as caught:
        bind(lambda m: [delattr(m, f"draft_{name}") for name in ("block_table", "rows", "first_slots")])
    assert len(caught.value.offenders) == 3


class Lacking:
    """A manager without a geometry."""

    generation = blocks_version = 1
    host_block_offsets = pool_pointers = None

    def arrange(self, _: Any) -> list[int]:
        return []


@pytest.mark.parametrize(
    ("managers", "message"),
    [
        ({"target": Lacking()}, "the target manager Lacking cannot serve a cache domain\n  it lacks geometry"),
        ({"draft": Lacking()}, "or declare UnifiedCache"),
        ({"draft": None}, "the draft manager NoneType cannot serve a cache domain\n  it lacks geometry, generation"),
    ],
)
def test_manager_without_what_a_domain_needs_is_refused(managers: dict[str, Any], message: str) -> None:
    """Never inferred from a missing attribute that the draft shares the target's cache."""
    with pytest.raises(UnknownMetadata) as caught:
        bind(**managers)
    assert message in str(caught.value)


def test_changed_geometry_is_refused() -> None:
    """Buffers and recipes were made for one geometry."""
    at = world()
    at.round_trip()
    was = snapshot(at.fsm)
    at.target.geometry = attrs.evolve(geometry(TARGET), blocks_in_primary_pool=99)
    at.target.generation += 1
    with pytest.raises(UnknownMetadata, match="the geometry of the target's manager changed"):
        at.prepare()
    assert was.differences(snapshot(at.fsm)) == []


# The first original wins.


@pytest.mark.parametrize("backend", BACKENDS)
def test_replay_from_an_eager_draft_keeps_the_first_originals(backend: str) -> None:
    """What returns at the end is what the engine had before any of it."""
    at = reach(Phase.TARGET_PREPARE, backend)
    lazy = {name for each in at.fsm.backend.resources if each.lazy for name in each.attributes}
    was = {name: value for name, value in vars(at.metadata).items() if name not in lazy}
    at.fsm.draft_forward()
    originals = at.fsm.switch.originals
    at.fsm._fire("draft_replay", at.fsm.switch.draft, at.fsm.batch(DRAFT))
    at.fsm._fire("draft_replay", at.fsm.switch.draft, at.fsm.batch(DRAFT))
    assert at.fsm.switch.originals is originals
    at.fsm.restore()
    assert [name for name, value in was.items() if getattr(at.metadata, name) is not value] == []
    assert not any(getattr(at.metadata, name) for name in lazy), "plans and caches are dropped"


def test_pointer_may_be_any_value() -> None:
    """A count of the batch follows it like a reference follows the manager."""
    count = Pointer("num_contexts", reads=("batch",), of=lambda view: view.batch.num_contexts)
    at = world(Backend("toy", (*RESOURCES, count), {"adapter": "the adapter"}))
    at.prepare()
    assert at.metadata.num_contexts == 1
    with at.fsm.draft_forward():
        at.fsm.draft_step()
        assert at.metadata.num_contexts == 0
    assert at.metadata.num_contexts == 1
