"""Atomicity: a transition either happens whole or, whatever fails in it, did not happen.

The actions of an event are counted by running it once: every attribute set, fill, refresh, pointer, view, save, load,
launch, observer callback and admission passes one fuse. Then each of them is made to fail in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from attrs import frozen

from specfsm.backends.resource import Buffer
from specfsm.domain import Domain, RowOrder, UnifiedCache
from specfsm.errors import IllegalTransition, RestoreFailed
from specfsm.orchestrator import Orchestrator
from specfsm.states.phase import Phase
from tests.toys import BACKENDS, BATCH, OTHER, Injected, Snapshot, World, buffers, snapshot, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT


@frozen
class Scenario:
    """An event, and how the world comes to be where it is fired.

    Args:
        reach: from IDLE or RESTORE to just before the event.
        fire: the event.
        moves: whether the event itself moves inputs, so that what was fresh may be rewritten by it.
    """

    reach: Callable[[World], object]
    fire: Callable[[World], object]
    moves: bool = False


def all_stale(domain: Domain) -> Callable[[World], None]:
    def reach(at: World) -> None:
        prepared(at)
        for source in at.fsm.backend.inputs:
            at.fsm.moved(source, domain)

    return reach


def everything_stale(at: World) -> None:
    prepared(at)
    for source in at.fsm.backend.inputs:
        at.fsm.moved(source)


def prepared(at: World) -> None:
    at.prepare()
    at.make_plans()


def stepped(at: World) -> None:
    """Both domains have seen `BATCH` last."""
    prepared(at)
    with at.fsm.draft_forward(BATCH):
        pass
    prepared(at)


def drafting(at: World) -> None:
    prepared(at)
    at.fsm.draft_forward(BATCH)
    at.make_plans()


def drafting_stale(at: World) -> None:
    drafting(at)
    for source in at.fsm.backend.inputs:
        at.fsm.moved(source, DRAFT)


def replay(at: World) -> None:
    at.fsm._fire("draft_replay", at.fsm.switch.draft, at.fsm.batch(DRAFT) or BATCH)


SCENARIOS = {
    "target_prepare, nothing stale": Scenario(World.round_trip, lambda at: at.fsm.target_prepare(BATCH)),
    "target_prepare, all stale": Scenario(all_stale(TARGET), lambda at: at.fsm.target_prepare(BATCH)),
    "target_prepare, another batch": Scenario(prepared, lambda at: at.fsm.target_prepare(OTHER["batch"]), moves=True),
    "target_prepare, all stale, the draft's ahead": Scenario(
        everything_stale, lambda at: at.fsm.target_prepare(BATCH, draft=at.fsm.batch(DRAFT))
    ),
    "target_prepare, another batch, the draft's ahead": Scenario(
        stepped, lambda at: at.fsm.target_prepare(OTHER["batch"], draft=OTHER["layout"]), moves=True
    ),
    "draft_forward, nothing stale": Scenario(prepared, lambda at: at.fsm.draft_forward(at.fsm.batch(DRAFT))),
    "draft_forward, all stale": Scenario(all_stale(DRAFT), lambda at: at.fsm.draft_forward(at.fsm.batch(DRAFT))),
    "draft_forward, another batch": Scenario(stepped, lambda at: at.fsm.draft_forward(OTHER["layout"]), moves=True),
    "draft_step, all stale": Scenario(drafting_stale, lambda at: at.fsm.draft_step(BATCH)),
    "draft_step, another batch": Scenario(drafting, lambda at: at.fsm.draft_step(), moves=True),
    "draft_replay, all stale": Scenario(all_stale(DRAFT), replay),
    "draft_replay from draft_forward": Scenario(drafting_stale, replay),
    "restore": Scenario(drafting, lambda at: at.fsm.restore()),
    "finish": Scenario(World.round_trip, lambda at: at.fsm.finish()),
}

KINDS: dict[str, tuple[type[BaseException], bool]] = {
    "before the action": (Injected, False),
    "interrupted after the action": (KeyboardInterrupt, True),
}

LAYOUTS = {
    "one row order": {},
    "two row orders": {"order": RowOrder.SLOT, "draft_order": RowOrder.BATCH},
    "unified": {"draft": UnifiedCache("the draft is the target's own first layers")},
}


def actions(at: World, scenario: Scenario) -> list[str]:
    """What the event does, in order: a dry run in the scenario's place, once everything was fresh."""
    at.round_trip()
    scenario.reach(at)
    at.fuse.arm(None)
    scenario.fire(at)
    at.fuse.disarm()
    leave(at)
    return at.fuse.passed


def leave(at: World) -> None:
    """To a state from which any scenario can be reached again."""
    if at.fsm.state in (Phase.DRAFT_FORWARD, Phase.DRAFT_REPLAY):
        at.fsm.restore()


def cases() -> Iterator[tuple[str, str, str]]:
    for backend in BACKENDS:
        for scenario in SCENARIOS:
            yield backend, scenario, "one row order"
        for scenario in ("draft_forward, another batch", "target_prepare, another batch", "restore"):
            yield backend, scenario, "unified"
    yield "toy", "draft_forward, another batch", "two row orders"


def assert_undone(fsm: Orchestrator, was: Snapshot, now: Snapshot, *, moves: bool) -> None:
    """Everything is as it was; what was rewritten on the way is stale, and nothing that is fresh has other contents.

    Where the event moved no input, only what was stale before can have been rewritten, so no stamp, version or mask
    differs either. Where it did, a buffer that was fresh may hold what the new inputs say: then it is stale now.
    """
    masks: list[int] = now.facts["stale"]
    fresh = {
        f"{name} [{domain}]"
        for domain in Domain
        for place, name in enumerate(fsm.ledger.names)
        if not masks[domain] >> place & 1
    }
    allowed = set()
    for domain in Domain:
        before: int = was.facts["stale"][domain]
        assert before & ~masks[domain] == 0, "what was stale is stale"
        for place, resource in enumerate(fsm.backend.resources):
            if (masks[domain] & ~before) >> place & 1:
                assert moves, f"{resource.name} was fresh, and nothing moved"
                allowed.add(resource.name)
    lines = []
    for line in was.differences(now):
        if line.endswith("has other contents"):
            if line.removesuffix(" has other contents").removeprefix("host half of ") in fresh:
                lines.append(line)
        elif allowed and (line.startswith("stale: ") or any(line.startswith(f"version of {n} [") for n in allowed)):
            continue
        else:
            lines.append(line)
    assert lines == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("backend", "name", "layout"), list(cases()))
def test_each_action_may_fail(backend: str, name: str, layout: str, kind: str) -> None:
    """The original error is raised, everything is as it was, and the same event then succeeds."""
    scenario, (error, late) = SCENARIOS[name], KINDS[kind]
    at = world(backend, observe=True, check="tensors", **LAYOUTS[layout])
    undisturbed = world(backend, observe=True, **LAYOUTS[layout])
    todo = actions(at, scenario)
    assert any(each.startswith("call") for each in todo)
    assert any(each.startswith("admit") for each in todo)
    actions(undisturbed, scenario)
    for place, action in enumerate(todo):
        scenario.reach(at)
        was = snapshot(at.fsm)
        at.fuse.arm(place, error, late=late)
        with pytest.raises(error) as caught:
            scenario.fire(at)
        at.fuse.disarm()
        assert [caught.value] == at.fuse.blown, f"{action}: another error"
        assert action in str(caught.value)
        assert_undone(at.fsm, was, snapshot(at.fsm), moves=scenario.moves)
        scenario.fire(at)
        leave(at)
    actions(undisturbed, scenario)
    for domain in Domain:
        mine, theirs = buffers(at.fsm, domain), buffers(undisturbed.fsm, domain)
        assert all(torch.equal(mine[each], theirs[each]) for each in mine), "not what it is without the faults"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["draft_forward, another batch", "restore", "draft_step, another batch"])
def test_failing_undo_faults(backend: str, name: str, kind: str) -> None:
    """A fault at each action, and every action of the undo fails too: FAULTED with both errors; `reset` recovers."""
    scenario, (error, late) = SCENARIOS[name], KINDS[kind]
    at = world(backend, observe=True)
    faulted = 0
    for place, action in enumerate(actions(at, scenario)):
        scenario.reach(at)
        was = snapshot(at.fsm)
        at.fuse.arm(place, error, late=late, stuck=True)
        with pytest.raises((RestoreFailed, error)) as caught:
            scenario.fire(at)
        at.fuse.disarm()
        if at.fsm.state is not Phase.FAULTED:
            assert at.fuse.blown == [caught.value], f"{action}: only an undo that failed may fault, and it must"
            assert_undone(at.fsm, was, snapshot(at.fsm), moves=scenario.moves)
            scenario.fire(at)
            leave(at)
            continue
        faulted += 1
        first, second = at.fuse.blown[:2]
        if isinstance(caught.value, RestoreFailed):
            assert caught.value.exceptions[:2] == (first, second)
            assert caught.value.event == name.split(",")[0]
        else:
            assert caught.value is first, "an interrupt stays an interrupt"
            assert any(repr(second) in note for note in caught.value.__notes__)
        recover(at)
    assert faulted


def recover(at: World) -> None:
    """Every event but `reset` is refused; after it a whole step works."""
    for event in ("target_prepare", "draft_forward", "draft_step", "restore", "finish"):
        with pytest.raises(IllegalTransition, match="FAULTED accepts reset"):
            getattr(at.fsm, event)()
    at.fsm.reset()
    assert (at.fsm.state, at.fsm.domain) == (Phase.IDLE, TARGET)
    for resource, value in zip(at.fsm.backend.resources, at.fsm.bindings[TARGET].values, strict=True):
        if isinstance(resource, Buffer) and resource.attribute:
            assert getattr(at.metadata, resource.attribute) is value
    assert not any(at.fsm.ledger.bound[each] & ~at.fsm.ledger.stale[each] for each in Domain), "nothing is known"
    at.round_trip()
    assert at.fsm.state is Phase.RESTORE


@pytest.mark.parametrize("hook", ["before_reset", "on_exit_faulted", "on_enter_idle", "after_reset"])
def test_raising_observer_of_reset_leaves_it_faulted(hook: str) -> None:
    """The metadata may be repaired twice; the machine is not out of FAULTED until all were told."""
    at = world(observe=True)
    fault(at)
    at.fuse.arm(f"call {hook}")
    with pytest.raises(Injected):
        at.fsm.reset()
    at.fuse.disarm()
    assert at.fsm.state is Phase.FAULTED
    recover(at)


def fault(at: World) -> None:
    """Into FAULTED."""
    prepared(at)
    at.fuse.arm("set manager_ref", stuck=True)
    with pytest.raises(RestoreFailed):
        at.fsm.draft_forward()
    at.fuse.disarm()
    assert at.fsm.state is Phase.FAULTED


def test_observers_of_the_fault_join_the_group() -> None:
    """An observer that raises while it is told of the fault hides neither of the two errors."""
    at = world(observe=True)
    prepared(at)
    at.fuse.arm("set manager_ref", stuck=True)
    at.calls.clear()
    with pytest.raises(RestoreFailed, match="to mend: rebuild or repair the metadata, then reset") as caught:
        at.fsm.draft_forward()
    told = [str(error) for error in caught.value.exceptions]
    assert told[0] == "injected into: set manager_ref"
    assert told[-2:] == ["injected into: call on_enter_faulted", "injected into: call after_fault"]
    assert isinstance(caught.value.split(Injected)[0], RestoreFailed)
    assert at.fsm.state is Phase.FAULTED
