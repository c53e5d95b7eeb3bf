"""A captured graph's contract: what a recording bakes in, and what a replay is refused for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specfsm.backends.backend import Backend
from specfsm.backends.resource import Shared, Staged, Table
from specfsm.domain import Batch, Domain
from specfsm.errors import GraphContractBroken, IllegalTransition, StaleResource
from specfsm.graph import Baked, Graph, bake
from specfsm.states.graph import Graph as GraphState
from specfsm.states.phase import Phase
from specfsm.states.resource import Freshness
from tests.toys import BACKENDS, REQUESTS, RESOURCES, Injected, World, snapshot, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT

CAPTURED = [name for name, each in BACKENDS.items() if not any(isinstance(r, Shared) for r in each.make().resources)]
"""Backends that a graph can be recorded with: a shared buffer refuses it."""

STEADY = Batch(REQUESTS, kv_lens=(8, 8, 8), tokens=(2, 2, 2))


def ready(backend: str | Backend, **options: Any) -> World:
    """Warmed up: everything was refreshed once, and the target's phase is prepared."""
    at = world(backend, **options)
    at.round_trip(STEADY)
    at.prepare(STEADY)
    return at


def record(at: World, **options: Any) -> Graph:
    """The draft phase, recorded."""
    with at.fsm.record((3, 2), **options) as graph:
        at.fsm.draft_forward(STEADY)
        at.fsm.restore()
    return graph


def test_some_backend_is_captured() -> None:
    assert CAPTURED


@pytest.mark.parametrize("backend", CAPTURED)
def test_recording_leaves_everything_as_it_was(backend: str) -> None:
    """It executes nothing, so nothing becomes fresh by it, and the metadata carries what it carried."""
    at = ready(backend)
    at.make_plans()
    was = snapshot(at.fsm)
    graph = record(at)
    assert graph.state is GraphState.READY
    assert was.differences(snapshot(at.fsm)) == []
    assert at.fsm.recording is None
    assert repr(graph) == "<Graph (3, 2) READY>"


@pytest.mark.parametrize("backend", CAPTURED)
def test_no_host_work_is_recorded(backend: str) -> None:
    """A refresh fed by the host would be baked in with what the host buffer held that day."""
    at = ready(backend)
    itself = [each for each in at.fsm.backend.resources if each.refreshed_by == "graph"]
    recorded = {f"refresh {each.name}" for each in itself if each.refresh}  # type: ignore[attr-defined]  # Buffers
    recorded |= {"launch" for each in itself if each.recipe}  # type: ignore[attr-defined]
    at.fuse.arm(None)
    record(at)
    at.fuse.disarm()
    work = {action for action in at.fuse.passed if action.startswith(("fill", "refresh", "of ", "launch"))}
    assert work == recorded


class Crash(Exception):
    pass


@pytest.mark.parametrize("backend", CAPTURED)
def test_failed_capture_leaves_no_graph(backend: str) -> None:
    at = ready(backend)
    was = snapshot(at.fsm)
    kept: list[Graph] = []

    def crash() -> None:
        with at.fsm.record("half") as graph:
            kept.append(graph)
            at.fsm.draft_forward(STEADY)
            raise Crash

    with pytest.raises(Crash):
        crash()
    assert kept[0].state is GraphState.EMPTY
    assert kept[0].reads == [0, 0]
    assert was.differences(snapshot(at.fsm)) == []
    record(at, graph=kept[0])
    assert kept[0].state is GraphState.READY


def test_recording_in_the_draft_phase_or_in_another_is_refused() -> None:
    at = ready("trtllm")
    with at.fsm.draft_forward(), pytest.raises(IllegalTransition, match="DRAFT_FORWARD --record-->") as caught:
        record(at)
    assert "graph (3, 2): the draft phase is active" in str(caught.value)
    assert "to mend: restore() first" in str(caught.value)
    at.prepare(STEADY)

    def nest() -> None:
        with at.fsm.record("outer"):
            record(at)

    with pytest.raises(IllegalTransition, match=r"graph \(3, 2\): graph outer is being recorded"):
        nest()
    assert at.fsm.recording is None


def test_replay_while_recording_is_refused() -> None:
    at = ready("trtllm")
    graph = record(at)

    def replay() -> None:
        with at.fsm.record("outer"):
            at.fsm.draft_replay(graph)

    with pytest.raises(IllegalTransition, match="--draft_replay-->") as caught:
        replay()
    assert "graph (3, 2): graph outer is being recorded" in str(caught.value)
    assert "accepts" not in str(caught.value), "the table has that row"


def test_replay_of_no_graph_is_refused() -> None:
    """Without one there is no contract to hold, so nothing may pass for it."""
    at = ready(CAPTURED[0])
    was = snapshot(at.fsm)
    nothing: Any = None
    with pytest.raises(TypeError, match="needs a graph that `record` made, not None"):
        at.fsm.draft_replay(nothing)
    assert was.differences(snapshot(at.fsm)) == []


def test_shared_buffer_cannot_be_recorded() -> None:
    """Its saving and copying back would be host work inside the graph."""
    at = ready("toy")
    was = snapshot(at.fsm)
    with pytest.raises(StaleResource) as caught:
        record(at)
    error = caught.value
    assert (error.resource, error.recording, error.misbound) == ("counters", "shared", False)
    assert "toy.counters [draft] is one buffer for both caches" in str(error)
    assert "to mend: give counters a twin (declare it a Table), or run this phase eagerly" in str(error)
    assert was.differences(snapshot(at.fsm)) == []


def steps(at: World, written: tuple[str, ...]) -> Graph:
    """A draft phase of two passes. Between them the graph itself advances what it writes, and says so."""
    after = attrs.evolve(STEADY, kv_lens=(9, 9, 9))
    with at.fsm.record("steps") as graph, at.fsm.draft_forward(STEADY):
        at.fsm.announce(after)
        for name in written:
            at.fsm.publish(name, at.fsm.value(name).add_(1))
        at.fsm.draft_step(after)
    return graph


def test_graph_may_advance_what_it_reads() -> None:
    """The first pass finds what the host refreshed, the second what the first left: stale for everyone else after."""
    at = ready("trtllm")
    graph = steps(at, ("kv_lens_cuda",))
    bit = at.fsm.ledger.mask(["kv_lens_cuda"])
    assert graph.needs(DRAFT) & bit, "the first pass reads what the host wrote"
    assert graph.writes[DRAFT] == bit
    with at.fsm.draft_replay(graph, STEADY):
        assert at.fsm.ledger.state(DRAFT, "kv_lens_cuda") is Freshness.STALE


def test_refresh_missed_inside_a_graph_is_refused_when_it_is_recorded() -> None:
    """The host cannot mend it at a replay, so there must be no graph."""
    at = ready("trtllm")
    was = snapshot(at.fsm)
    with pytest.raises(StaleResource) as caught:
        steps(at, ())
    assert (caught.value.resource, caught.value.event) == ("kv_lens_cuda", "draft_step")
    assert list(caught.value.moved) == ["lengths"]
    assert caught.value.recording == "inside"
    assert "write it there and publish('kv_lens_cuda', tensor) before this event" in str(caught.value)
    assert was.differences(snapshot(at.fsm)) == []


def test_value_to_be_baked_in_must_be_fresh() -> None:
    """A pointer that is stale when it is recorded stays wrong in every replay: warm up first."""
    at = world("trtllm")
    at.prepare(STEADY)
    with pytest.raises(StaleResource) as caught:
        record(at)
    assert (caught.value.resource, caught.value.recording) == ("kv_cache_manager", "baked")
    assert "to mend: run the phase once with this batch before the recording" in str(caught.value)


# Replays.


@pytest.mark.parametrize("backend", CAPTURED)
def test_replay_refreshes_what_is_stale_at_the_recorded_addresses(backend: str) -> None:
    at = ready(backend, check="tensors")
    graph = record(at)
    at.draft.swap()
    with at.fsm.draft_replay(graph) as fsm:
        assert (fsm.state, fsm.domain) == (Phase.DRAFT_REPLAY, DRAFT)
        needed = graph.needs(DRAFT)
        assert not at.fsm.ledger.stale[DRAFT] & needed
        with at.fsm.draft_replay(graph):
            assert at.fsm.state is Phase.DRAFT_REPLAY
        assert at.fsm.state is Phase.DRAFT_REPLAY, "the outer window is still open"
    assert at.fsm.state is Phase.RESTORE
    assert graph.state is GraphState.READY


@pytest.mark.parametrize("backend", CAPTURED)
def test_replay_with_a_stale_table_is_refused(backend: str) -> None:
    """Each buffer that the graph reads, its refresh left out while pages moved."""
    made = BACKENDS[backend].make()
    for resource in made.resources:
        host = resource.refreshed_by == "host" and DRAFT in resource.domains
        if not (host and isinstance(resource, Table) and "blocks" in made.ledger().sources[resource.name]):
            continue
        at = ready(backend)
        graph = record(at)
        at.fsm.switch.leave_out((0, at.fsm.ledger.mask([resource.name])))
        at.draft.swap()
        with pytest.raises(StaleResource) as caught:
            at.fsm.draft_replay(graph)
        assert (caught.value.resource, caught.value.domain) == (resource.name, DRAFT)
        assert list(caught.value.moved) == ["blocks"]
        assert at.fsm.state is Phase.TARGET_PREPARE


def block_table(at: World) -> torch.Tensor:
    table: torch.Tensor = at.fsm.value("kv_cache_block_offsets", DRAFT)
    return table


def move_the_cache(at: World, **changes: Any) -> None:
    """The draft's manager allocates its storage anew; the machine has not looked yet."""
    for name, value in changes.items():
        setattr(at.draft, name, value)
    at.draft.generation += 1


def widen(table: torch.Tensor) -> torch.Tensor:
    return table.to(torch.int64)


BREACHES: dict[str, tuple[Callable[[World], Any], Batch, str]] = {
    "a buffer bound elsewhere": (
        lambda at: at.fsm.bind("kv_lens_cuda", torch.zeros(5, dtype=torch.int32), DRAFT),
        STEADY,
        r"is INVALID, not READY: kv_lens_cuda \[draft\] was bound to another buffer$",
    ),
    "dtype": (
        lambda at: move_the_cache(at, host_block_offsets=widen(at.draft.host_block_offsets)),
        STEADY,
        r"host_kv_cache_block_offsets \[draft\] was recorded as int32 .*, but is int64 .*: another address, dtype$",
    ),
    "a baked value that was published": (
        lambda at: at.fsm.publish("host_kv_cache_pool_pointers", (0x9000,), DRAFT),
        STEADY,
        r"host_kv_cache_pool_pointers \[draft\] was recorded as \(8192,\), but is \(36864,\)$",
    ),
    "a baked value that this very replay refreshes": (
        lambda at: move_the_cache(at, pool_pointers=(0x9000,)),
        STEADY,
        r"host_kv_cache_pool_pointers \[draft\] was recorded as \(8192,\), but is \(36864,\)$",
    ),
    "fewer requests": (
        lambda at: None,
        Batch(REQUESTS[:2], (8, 8), (2, 2)),
        r"was recorded for 3 requests, but the batch has 2: pad it to the recorded size$",
    ),
    "more requests": (
        lambda at: at.draft.allocate(4),
        Batch((*REQUESTS, 4), (8, 8, 8, 2), (2, 2, 2, 2)),
        r"was recorded for 3 requests, but the batch has 4: pad it to the recorded size$",
    ),
    "a context": (
        lambda at: None,
        attrs.evolve(STEADY, num_contexts=1),
        r"was recorded for 0 contexts, but the batch has 1: pad it to the recorded size$",
    ),
    "draft length": (
        lambda at: None,
        attrs.evolve(STEADY, tokens=(3, 3, 3)),
        r"was recorded for \(2, 2, 2\) tokens a request, but the batch has \(3, 3, 3\)$",
    ),
    "other tokens": (
        lambda at: None,
        attrs.evolve(STEADY, tokens=(2, 1, 2)),
        r"was recorded for \(2, 2, 2\) tokens a request, but the batch has \(2, 1, 2\)$",
    ),
    "max length": (
        lambda at: None,
        attrs.evolve(STEADY, kv_lens=(8, 9, 8)),
        rf"was recorded for KV lengths up to 8, but request {REQUESTS[1]} has 9$",
    ),
}


def proven(at: World, recorded: Callable[..., Graph] = record, **options: Any) -> Graph:
    """Replayed once, so that its contract was found to hold; the target's phase is prepared again."""
    graph = recorded(at, **options)
    with at.fsm.draft_replay(graph, STEADY):
        pass
    at.prepare(STEADY)
    return graph


@pytest.mark.parametrize("check", ["stamps", "tensors"])
@pytest.mark.parametrize("breach", BREACHES)
def test_replay_on_other_terms_is_refused(breach: str, check: str) -> None:
    """The graph runs the addresses and shapes of its recording, whatever the metadata says by then."""
    change, batch, line = BREACHES[breach]
    at = ready("trtllm", check=check)
    graph = proven(at, max_len=8)
    change(at)
    at.fsm.explain()  # looks at the managers
    was = snapshot(at.fsm)
    with pytest.raises(GraphContractBroken) as caught:
        at.fsm.draft_replay(graph, batch)
    assert caught.value.key == (3, 2)
    assert any(re.search(line, broken) for broken in caught.value.broken), caught.value.broken
    assert "graph (3, 2): " in str(caught.value)
    elsewhere = {re.sub(r" \[.*", "", each) for each in caught.value.broken if " was recorded as " in each}
    elsewhere |= {"kv_lens_cuda"} if breach == "a buffer bound elsewhere" else set()
    assert {*caught.value.resources} == {(name, DRAFT) for name in elsewhere}
    assert was.differences(snapshot(at.fsm)) == []


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "address": lambda table: table.set_(table.clone()),
    "shape": lambda table: table.resize_(1, 5, 2, 4).as_strided_((1, 5, 2, 4), (50, 10, 5, 1)),
    "stride": lambda table: table.as_strided_((1, 5, 2, 5), (50, 10, 1, 2)),
}
REPORTED: dict[str, tuple[str, Callable[[World], Any]]] = {
    "not reported": ("tensors", lambda at: None),
    "an edit": ("stamps", lambda at: at.fsm.dirty("kv_cache_block_offsets", DRAFT)),
    "a write": ("stamps", lambda at: at.fsm.publish("kv_cache_block_offsets", block_table(at), DRAFT)),
}


@pytest.mark.parametrize("how", REPORTED)
@pytest.mark.parametrize("what", IN_PLACE)
def test_replay_over_a_tensor_that_was_moved_in_place_is_refused(what: str, how: str) -> None:
    """The bound tensor is the same object, elsewhere: compared where anything of it was reported, and always from level
    "tensors" on."""
    check, report = REPORTED[how]
    at = ready("trtllm", check=check)
    graph = proven(at)
    IN_PLACE[what](block_table(at))
    report(at)
    line = rf"kv_cache_block_offsets \[draft\] was recorded as int32 .*: another {what}"
    for _ in range(2):
        with pytest.raises(GraphContractBroken, match=line) as caught:
            at.fsm.draft_replay(graph, STEADY)
        assert caught.value.resources == (("kv_cache_block_offsets", DRAFT),)


def test_tensor_moved_in_place_that_nobody_reports_is_not_seen_by_integers() -> None:
    """What level "stamps" cannot find: it looks at no tensor of a contract that it found to hold."""
    at = ready("trtllm")
    graph = proven(at)
    IN_PLACE["address"](block_table(at))
    with at.fsm.draft_replay(graph, STEADY):
        pass
    assert [line.partition(" [")[0] for line in graph.breaches(at.fsm.bindings, STEADY)] == ["kv_cache_block_offsets"]


def eager(at: World) -> None:
    """The draft's phase without the graph: what moved is refreshed there."""
    with at.fsm.draft_forward(STEADY):
        pass
    at.prepare(STEADY)


def undone(at: World) -> None:
    """The target's pointers were refreshed, and the event was refused for what came after."""
    at.target.pool_pointers, at.target.generation = (0x9000,), 7
    at.prepare(STEADY)
    at.target.pool_pointers, at.target.generation = (0x1000,), 8
    at.fuse.arm("fill kv_lens_cuda")
    with pytest.raises(Injected):
        at.prepare(attrs.evolve(STEADY, kv_lens=(9, 8, 8)))
    at.fuse.disarm()
    at.target.pool_pointers, at.target.generation = (0x9000,), 9
    at.prepare(STEADY)


def storage_moves(manager: Any) -> None:
    manager.pool_pointers, manager.generation = (0x9000,), manager.generation + 1


MOVES: dict[str, tuple[Callable[[World], Any], str]] = {
    "bound": (lambda at: at.fsm.bind("kv_lens_cuda", torch.zeros(5, dtype=torch.int32), DRAFT), "is INVALID"),
    "the target's bound": (
        lambda at: at.fsm.bind("kv_lens_cuda", torch.zeros(5, dtype=torch.int32), TARGET), "is INVALID"
    ),
    "published": (lambda at: at.fsm.publish("tokens_per_block", 8, DRAFT), r"tokens_per_block \[draft\]"),
    "the target's published": (
        lambda at: at.fsm.publish("tokens_per_block", 8, TARGET), r"tokens_per_block \[target\]"
    ),
    "refreshed by the replay": (lambda at: storage_moves(at.draft), r"pool_pointers \[draft\]"),
    "refreshed by an eager phase": (lambda at: (storage_moves(at.draft), eager(at)), r"pool_pointers \[draft\]"),
    "the target's refreshed": (
        lambda at: (storage_moves(at.target), at.prepare(STEADY)), r"pool_pointers \[target\]"
    ),
    "the target's refreshed, and undone once": (undone, r"pool_pointers \[target\]"),
}  # fmt: skip
"""Every way in which a buffer or a pointer comes to be another, as the machine is told of it."""


@pytest.mark.parametrize("move", MOVES)
def test_whatever_moves_after_a_replay_refuses_the_next(move: str) -> None:
    """At level "stamps" a contract that was found to hold is not compared again, until anything of it was replaced."""
    change, line = MOVES[move]
    at = ready("trtllm")
    graph = proven(at, record_both)
    with at.fsm.draft_replay(graph, STEADY):
        pass
    at.prepare(STEADY)
    change(at)
    for _ in range(2):
        with pytest.raises(GraphContractBroken, match=line):
            at.fsm.draft_replay(graph, STEADY)


def test_contract_that_holds_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At level "stamps": a replay reads integers, whatever is refreshed before it, until something was replaced."""
    at, compared = ready("trtllm"), []
    graph = proven(at, record_both)
    differs = Baked.differs
    monkeypatch.setattr(Baked, "differs", lambda *each: compared.append(each) or differs(*each))
    for length in (8, 9, 10):
        batch = attrs.evolve(STEADY, kv_lens=(length,) * 3)
        at.draft.swap()
        at.prepare(batch)
        with at.fsm.draft_replay(graph, batch):
            pass
    assert compared == []
    at.prepare(STEADY)
    at.fsm.publish("tokens_per_block", 4, TARGET)
    at.fsm.publish("tokens_per_block", at.fsm.value("tokens_per_block", DRAFT), DRAFT)
    with at.fsm.draft_replay(graph, STEADY):
        pass
    assert compared == [], "the same value again"
    at.prepare(STEADY)
    storage = at.draft.pool_pointers
    at.draft.pool_pointers, at.draft.generation = (*storage,), 7
    with at.fsm.draft_replay(graph, STEADY):
        pass
    assert len(compared) == len(graph.baked), "another object, of equal value"


def test_graph_of_another_machine_is_refused() -> None:
    """What was found to hold there says nothing here."""
    one, other = ready("trtllm"), ready("trtllm")
    graph = proven(one)
    proven(other)
    with pytest.raises(GraphContractBroken, match=r"kv_lens_cuda \[draft\] was recorded as .*: another address"):
        other.fsm.draft_replay(graph, STEADY)


ROWS = st.integers(1, 4)
SMALL = st.builds(
    lambda rows, lens, tokens, contexts, padded: Batch(
        range(rows), lens[:rows], tokens[:rows], num_contexts=min(rows, contexts), padded=padded and rows + padded
    ),
    ROWS,
    st.lists(st.integers(2, 12), min_size=4, max_size=4),
    st.lists(st.integers(1, 2), min_size=4, max_size=4),
    st.integers(0, 1),
    st.integers(0, 1),
)


@given(recorded=SMALL, target=SMALL, draft=SMALL, alike=st.booleans(), max_len=st.sampled_from([None, 6, 1000]))
@settings(max_examples=200, deadline=None)
def test_what_is_within_the_bounds_breaks_none_of_them(
    recorded: Batch, target: Batch, draft: Batch, alike: bool, max_len: int | None
) -> None:
    """The quick answer, and the one that names what is broken, are one."""
    fsm = world("trtllm").fsm
    graph = Graph("bounds", max_len=max_len)
    graph.record()
    graph.batches = [recorded, recorded]
    graph.seal(fsm.bindings)
    if alike:
        target, draft = recorded, attrs.evolve(recorded, kv_lens=[length + 1 for length in recorded.kv_lens])
    fsm.bindings[TARGET].see(target)
    broken = [*graph._bounds(fsm.bindings[TARGET], target), *graph._bounds(fsm.bindings[DRAFT], draft)]
    lines = list(graph.breaches(fsm.bindings, draft))
    assert [line for line in lines if "the same requests" not in line] == broken
    assert (len(lines) > len(broken)) is (target.request_ids != draft.request_ids)
    assert graph.holds(fsm.bindings, draft) is (not lines)


@pytest.mark.parametrize("max_len", [None, 1000])
def test_no_replay_is_longer_than_its_tables_are_wide(max_len: int | None) -> None:
    """Whatever length it was recorded for: a kernel would read past the row's end."""
    at = ready("trtllm")
    graph = record(at, max_len=max_len)
    width = at.draft.geometry.max_tokens_per_seq
    with at.fsm.draft_replay(graph, attrs.evolve(STEADY, kv_lens=(8, width, 8))):
        pass
    at.prepare(STEADY)
    with pytest.raises(GraphContractBroken, match=rf"{width}.* but request {REQUESTS[1]} has {width + 1}"):
        at.fsm.draft_replay(graph, attrs.evolve(STEADY, kv_lens=(8, width + 1, 8)))


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda at: Graph("none"), "is EMPTY, not READY"),
        (lambda at: released(proven(at)), "is EMPTY, not READY"),
        (lambda at: invalid(proven(at)), "is INVALID, not READY: the engine says so"),
    ],
)
def test_graph_that_is_not_ready_is_refused(make: Callable[[World], Graph], line: str) -> None:
    at = ready("trtllm")
    with pytest.raises(GraphContractBroken, match=line):
        at.fsm.draft_replay(make(at), STEADY)


def released(graph: Graph) -> Graph:
    graph.release()
    return graph


def invalid(graph: Graph) -> Graph:
    graph.invalidate("the engine says so")
    return graph


def record_both(at: World, **options: Any) -> Graph:
    """Both models' phases in one graph."""
    with at.fsm.record("both", **options) as graph:
        at.fsm.target_prepare(STEADY)
        at.fsm.draft_forward(STEADY)
        at.fsm.restore()
    return graph


UNREADY: dict[str, tuple[Callable[[World], Any], tuple[type[IllegalTransition], str]]] = {
    "edited": (
        lambda at: at.fsm.dirty("kv_cache_block_offsets", TARGET),
        (StaleResource, r"kv_cache_block_offsets \[target\] is stale: "),
    ),
    "pages moved, and nobody prepared the target": (
        lambda at: at.target.swap(),
        (StaleResource, r"base_block_offsets \[target\] is stale: blocks moved"),
    ),
    "storage moved": (
        lambda at: setattr(at.target, "generation", 7),
        (StaleResource, r"\[target\] is stale: manager moved"),
    ),
    "prepared for fewer requests": (
        lambda at: at.prepare(Batch(REQUESTS[:2], (8, 8), (2, 2))),
        (GraphContractBroken, "was recorded for 3 requests, but the batch has 2"),
    ),
    "prepared for other tokens": (
        lambda at: at.prepare(attrs.evolve(STEADY, tokens=(1, 1, 1))),
        (GraphContractBroken, r"was recorded for \(2, 2, 2\) tokens a request, but the batch has \(1, 1, 1\)"),
    ),
    "prepared for longer requests": (
        lambda at: at.prepare(attrs.evolve(STEADY, kv_lens=(8, 12, 8))),
        (GraphContractBroken, f"was recorded for KV lengths up to 10, but request {REQUESTS[1]} has 12"),
    ),
    "prepared in another order": (
        lambda at: at.prepare(attrs.evolve(STEADY, request_ids=REQUESTS[::-1])),
        (GraphContractBroken, r"the same requests in both caches, but the target's batch has \(9, 3, 7\) and the"),
    ),
}


@pytest.mark.parametrize("check", ["stamps", "tensors"])
@pytest.mark.parametrize("fault", UNREADY)
def test_graph_of_both_models_reads_both_caches(fault: str, check: str) -> None:
    """Recorded with the target's phase in it: the target must be fresh for this very batch too, and no replay can
    refresh it."""
    change, (kind, says) = UNREADY[fault]
    at = ready("trtllm", check=check)
    graph = record_both(at, max_len=10)
    with at.fsm.draft_replay(graph, STEADY):
        pass
    at.prepare(STEADY)
    at.draft.swap()
    change(at)
    at.fsm.explain()
    was = snapshot(at.fsm)
    with pytest.raises(kind, match=says):
        at.fsm.draft_replay(graph, STEADY)
    assert was.differences(snapshot(at.fsm)) == []
    at.prepare(STEADY)
    with at.fsm.draft_replay(graph, STEADY):
        pass


def test_graph_of_the_draft_alone_does_not_ask_for_the_target() -> None:
    """It reads nothing of it: a target that is stale, or prepared for another batch, is none of its business."""
    at = ready("trtllm")
    graph = record(at)
    at.prepare(Batch(REQUESTS[:1], (8,), (2,)))
    at.fsm.dirty("kv_cache_block_offsets", TARGET)
    with at.fsm.draft_replay(graph, STEADY):
        pass


def test_graph_of_both_models_is_replayed_by_an_engine_that_refreshes_by_itself() -> None:
    """What only the orchestrator keeps is nobody's to publish then."""
    at = world("trtllm", guard=True)
    for domain in Domain:
        at.fsm.announce(STEADY, domain)
        for resource in at.fsm.backend.resources:
            if resource.attribute is not None:
                value = at.fsm.value(resource.name, domain)
                at.fsm.publish(resource.name, value if isinstance(value, torch.Tensor) else 1, domain)
    at.prepare(STEADY)
    graph = record_both(at)
    with at.fsm.draft_replay(graph, STEADY):
        assert at.fsm.state is Phase.DRAFT_REPLAY


@pytest.mark.parametrize(("recorded", "bound", "dies"), [
    (record, DRAFT, True), (record, TARGET, False), (record_both, DRAFT, True), (record_both, TARGET, True),
])  # fmt: skip
def test_rebinding_kills_the_graphs_that_read_the_buffer(
    recorded: Callable[[World], Graph], bound: Domain, dies: bool
) -> None:
    """At once, not at the next replay; recorded again it reads the new one."""
    at = ready("trtllm")
    graph = recorded(at)
    at.fsm.bind("kv_lens_cuda", torch.zeros(5, dtype=torch.int32), bound)
    assert graph.state is (GraphState.INVALID if dies else GraphState.READY)
    at.round_trip(STEADY)
    at.prepare(STEADY)
    if dies:
        with pytest.raises(GraphContractBroken, match="is INVALID, not READY: kv_lens_cuda"):
            at.fsm.draft_replay(graph, STEADY)
        graph = recorded(at)
    with at.fsm.draft_replay(graph, STEADY):
        pass


def test_nothing_is_bound_while_a_graph_is_recorded() -> None:
    """What was captured by then has the old address, and the contract would have the new one."""
    at = ready("trtllm")
    held = at.fsm.value("kv_lens_cuda", DRAFT)

    def bind() -> None:
        with at.fsm.record("moving"), at.fsm.draft_forward(STEADY):
            at.fsm.bind("kv_lens_cuda", torch.zeros(5, dtype=torch.int32))

    with pytest.raises(IllegalTransition, match="--bind-->") as caught:
        bind()
    assert "kv_lens_cuda [draft]: a graph is being recorded (moving)" in str(caught.value)
    assert at.fsm.value("kv_lens_cuda", DRAFT) is held


def by_graph(*names: str) -> Backend:
    """The toy without shared buffers and without what the host derives from a table; the graph refreshes these."""
    resources = tuple(
        attrs.evolve(each, refreshed_by="graph") if each.name in names else each
        for each in RESOURCES
        if not isinstance(each, Shared) and each.name != "first_slots"
    )
    return Backend("toy", resources, {"adapter": "the adapter"})


def test_what_the_graph_makes_is_not_made_before_and_is_stale_after() -> None:
    """The graph writes its table itself; everyone else finds it stale after the replay."""
    at = ready(by_graph("block_table"))
    at.fuse.arm(None)
    graph = record(at)
    at.fuse.disarm()
    assert at.fuse.passed.count("launch") >= 1, "the recipe is recorded"
    place = at.fsm.ledger.index["block_table"]
    assert graph.made[DRAFT] >> place & 1
    at.draft.swap()
    at.fuse.arm(None)
    with at.fsm.draft_replay(graph, STEADY):
        assert "launch" not in at.fuse.passed
        assert at.fsm.ledger.state(DRAFT, "block_table") is Freshness.STALE
    at.fuse.disarm()
    at.prepare(STEADY)
    at.fuse.arm(None)
    at.fsm.draft_forward(STEADY)
    at.fuse.disarm()
    assert "launch" in at.fuse.passed


def test_contract_holds_the_memory_of_what_is_read() -> None:
    """Address, shape, stride and dtype of a buffer; the value of anything else."""
    held = torch.zeros(4, 6, dtype=torch.int32)
    assert bake(held) == bake(held[:])
    assert bake(held) != bake(held.clone())
    assert bake(held) != bake(held[:2])
    assert bake(held.t()) != bake(held)
    assert str(bake(held)) == f"int32 [4, 6] strides [6, 1] at {held.data_ptr():#x}"
    assert bake(64) == 64


def test_every_buffer_that_the_phases_read_is_in_the_contract() -> None:
    at = ready("trtllm")
    graph = record(at)
    baked = {at.fsm.ledger.names[each.place] for each in graph.baked if each.domain is DRAFT}
    buffers = {each.name for each in at.fsm.backend.resources if isinstance(each, Table | Staged)}
    assert buffers <= baked
    assert all(each.domain is DRAFT for each in graph.baked)


@pytest.mark.parametrize(("was", "now"), [(3, torch.tensor([3, 3])), (torch.tensor([3, 3]), 3)])
def test_value_that_became_another_kind_of_thing_differs(was: Any, now: Any) -> None:
    """A number where a tensor was, or the other way round."""
    at = world("toy")
    place, binding = at.fsm.ledger.index["manager_ref"], at.fsm.bindings[TARGET]
    binding.values[place] = now
    assert f"was recorded as {Baked(place, TARGET, bake(was)).what}" in Baked(place, TARGET, bake(was)).differs(binding)


def test_same_memory_read_as_another_type_differs() -> None:
    at = world("toy")
    place, binding = at.fsm.ledger.index["block_table"], at.fsm.bindings[TARGET]
    baked = Baked(place, TARGET, bake(binding.values[place]))
    assert baked.differs(binding) == ""
    binding.values[place] = binding.values[place].view(torch.float32)
    assert baked.differs(binding).endswith("another dtype")
