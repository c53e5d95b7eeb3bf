"""`target_prepare` with the draft's next batch: the draft's tables are refreshed along, the switch finds them done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from specfsm.backends.backend import Backend
from specfsm.domain import Batch, Domain, RowOrder, UnifiedCache
from specfsm.errors import ContentsViolated, RefreshDeclined, StaleResource
from tests.toys import BACKENDS, BATCH, OTHER, RESOURCES, Tape, World, buffers, refused, snapshot, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT


def names(at: World, mask: int) -> set[str]:
    return set(at.fsm.trace.resources(mask))


def shared(at: World) -> set[str]:
    """What has no buffer of the draft's own."""
    return {each.name for each in at.fsm.backend.resources if each.kind == "Shared"}


def step(at: World, batch: Batch, draft: Batch, *, ahead: bool) -> None:
    """Pages moved in both caches."""
    at.target.swap()
    at.draft.swap()
    at.fsm.target_prepare(batch, draft=draft if ahead else None)
    with at.fsm.draft_forward(draft):
        at.fsm.draft_step()


@pytest.mark.parametrize("order", RowOrder)
@pytest.mark.parametrize("backend", BACKENDS)
def test_switch_finds_it_done(backend: str, order: RowOrder) -> None:
    """Whatever a step moves: the draft's tables are what they are without it, and the switch refreshes only what both
    caches share."""
    at, plain = (world(backend, order=order, check="contents") for _ in "ab")
    batches = [BATCH, OTHER["batch"], OTHER["lengths"], OTHER["layout"], BATCH]
    for batch, draft in zip(batches, batches[1:] + batches[:1], strict=True):
        for each in (at, plain):
            each.target.swap()
            each.draft.swap()
        at.fsm.target_prepare(batch, draft=draft)
        plain.fsm.target_prepare(batch)
        prepared = list(at.fsm.trace)[-1]
        [summary] = [each for each in at.fsm.trace.summary() if each.event == "target_prepare"]
        assert names(at, prepared.ahead) >= {each.name for each in at.fsm.backend.resources if "blocks" in each.reads}
        assert summary.refreshed == sum(
            (each.refreshed.bit_count() + each.ahead.bit_count())
            for each in at.fsm.trace
            if each.event == "target_prepare"
        )
        with at.fsm.draft_forward(draft), plain.fsm.draft_forward(draft):
            switched = list(at.fsm.trace)[-1]
            assert names(at, switched.refreshed) <= shared(at)
            for domain in Domain:
                mine, theirs = buffers(at.fsm, domain), buffers(plain.fsm, domain)
                assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
            assert {n: str(v) for n, v in vars(at.metadata).items() if n == "num_contexts"} == {
                n: str(v) for n, v in vars(plain.metadata).items() if n == "num_contexts"
            }
    at.fsm.settle()


@pytest.mark.parametrize("backend", [each for each in BACKENDS if each != "toy"])
def test_both_caches_are_one_submission(backend: str) -> None:
    """A step of two refreshes replays two recordings, a step that knows the draft's batch replays one."""
    counts = {}
    for ahead in (False, True):
        at, tape = world(backend), Tape()
        at.fsm.refresher.recorder = tape  # type: ignore[assignment]  # stands in for it
        lengths = iter(range(1, 99))

        def typical(at: World = at, ahead: bool = ahead, lengths: Any = lengths) -> None:
            length = next(lengths) % 8 + 2
            batch = attrs.evolve(BATCH, kv_lens=(length,) * 3)
            at.target.swap()
            at.draft.swap()
            at.fsm.target_prepare(batch, draft=batch if ahead else None)
            with at.fsm.draft_forward(batch):
                pass

        for _ in range(8):
            typical()
        before = tape.replayed
        typical()
        counts[ahead] = tape.replayed - before
    assert counts == {False: 2, True: 1}


@pytest.mark.parametrize("backend", BACKENDS)
def test_metadata_stays_the_targets(backend: str) -> None:
    """Nothing of the draft's is shown before the switch, host halves and views among it."""
    at, plain = (world(backend) for _ in "ab")
    at.fsm.target_prepare(BATCH, draft=OTHER["layout"])
    plain.fsm.target_prepare(BATCH)
    assert at.fsm.domain is TARGET
    for resource in at.fsm.backend.resources:
        for name in resource.attributes:
            mine, its = getattr(at.metadata, name), getattr(plain.metadata, name)
            if isinstance(mine, torch.Tensor):
                assert torch.equal(mine, its), name
            elif not resource.lazy and name not in ("manager_ref", "kv_cache_manager"):
                assert str(mine) == str(its), name


MOVES: dict[str, Callable[[World], Any]] = {
    "a page": lambda at: at.draft.swap(),
    "the manager": lambda at: setattr(at.draft, "generation", at.draft.generation + 1),
    "an input of the engine's": lambda at: at.fsm.moved("blocks", DRAFT),
    "an edit": lambda at: at.fsm.dirty(next(n for n in at.fsm.ledger.names if n in ("rows", "row_index")), DRAFT),
    "a batch": lambda at: None,
}


@pytest.mark.parametrize("moves", MOVES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_moves_in_between_is_refreshed_by_the_switch(backend: str, moves: str) -> None:
    at = world(backend, check="contents")
    at.round_trip()
    at.fsm.target_prepare(BATCH, draft=BATCH)
    MOVES[moves](at)
    with at.fsm.draft_forward(OTHER["lengths"] if moves == "a batch" else BATCH):
        assert names(at, list(at.fsm.trace)[-1].refreshed) - shared(at)
    at.fsm.settle()


@pytest.mark.parametrize("backend", BACKENDS)
def test_left_out_refresh_is_refused_by_the_switch(backend: str) -> None:
    """The target goes on: nothing of the draft's is required of its phase."""
    dropped = next(n for n in world(backend).fsm.ledger.names if n in ("rows", "row_index"))
    at = world(backend, drop=[(dropped, DRAFT)])
    at.fsm.target_prepare(BATCH, draft=BATCH)
    error = refused(at.fsm, StaleResource, lambda: at.fsm.draft_forward(BATCH))
    assert (error.resource, error.domain) == (dropped, DRAFT)
    at.fsm.target_prepare(BATCH, draft=BATCH)


def test_declined_refresh_is_refused_by_the_switch() -> None:
    """It is asked again there, as its inputs may have come meanwhile."""

    def fill(view: Any, host: torch.Tensor) -> torch.Tensor | None:
        return None if view.domain is DRAFT and not at.calls else host.fill_(0)

    resources = tuple(attrs.evolve(each, fill=fill) if each.name == "rows" else each for each in RESOURCES)
    at = world(Backend("toy", resources, {"adapter": "the adapter"}))
    at.fsm.target_prepare(BATCH, draft=BATCH)
    with pytest.raises(RefreshDeclined):
        at.fsm.draft_forward(BATCH)
    at.calls.append("they have come")
    with at.fsm.draft_forward(BATCH):
        pass


def test_declined_refresh_is_not_replayed_with_the_rest() -> None:
    """A recording would copy what the buffer held before."""
    declines = False

    def fill(view: Any, host: torch.Tensor) -> torch.Tensor | None:
        host.fill_(len(at.calls))
        return None if declines and view.domain is DRAFT else host

    resources = tuple(attrs.evolve(each, fill=fill) if each.name == "rows" else each for each in RESOURCES[:5])
    at, tape = world(Backend("toy", resources, {"adapter": "the adapter"}), check="off"), Tape()
    at.fsm.refresher.recorder = tape  # type: ignore[assignment]  # stands in for it
    for _ in range(8):
        step(at, BATCH, BATCH, ahead=True)
    declines, replayed, held = True, tape.replayed, at.fsm.value("rows", DRAFT).clone()
    assert replayed
    at.calls.append("another filling")
    at.draft.swap()
    at.target.swap()
    at.fsm.target_prepare(BATCH, draft=BATCH)
    assert tape.replayed == replayed
    assert torch.equal(at.fsm.value("rows", DRAFT), held)


def test_contents_of_what_was_refreshed_ahead_are_judged_by_the_switch() -> None:
    """Level "contents": a fill that was wrong the first time."""

    def fill(view: Any, host: torch.Tensor) -> torch.Tensor:
        at.calls.append(str(view.domain))
        return host.fill_(3 if at.calls.count("draft") == 1 and view.domain is DRAFT else 0)

    resources = tuple(attrs.evolve(each, fill=fill) if each.name == "rows" else each for each in RESOURCES[:4])
    at = world(Backend("toy", resources, {"adapter": "the adapter"}), check="contents")
    at.fsm.target_prepare(BATCH, draft=BATCH)
    at.fsm.draft_forward(BATCH)
    with pytest.raises(ContentsViolated, match=r"rows \[draft\]"):
        at.fsm.settle()


def test_shared_cache_has_nothing_ahead() -> None:
    """A unified draft reads what the target's phase refreshes; its batch is no second one there."""
    at = world(draft=UnifiedCache("the draft is the target's own first layers"))
    at.fsm.target_prepare(BATCH, draft=OTHER["layout"])
    assert at.fsm.batch(TARGET) is BATCH
    assert list(at.fsm.trace)[-1].ahead == 0


def test_guarded_machine_refreshes_nothing_ahead() -> None:
    at = world(guard=True, check="off")
    before = buffers(at.fsm, DRAFT)
    at.fsm.target_prepare(BATCH, draft=BATCH)
    assert all(torch.equal(contents, buffers(at.fsm, DRAFT)[name]) for name, contents in before.items())


def test_recording_takes_nothing_ahead() -> None:
    """A recording executes nothing, for either cache."""
    at = world("dsa")
    at.round_trip()
    at.prepare()
    before = snapshot(at.fsm)
    with at.fsm.record("ahead"):
        at.fsm.target_prepare(BATCH, draft=OTHER["layout"])
    assert before.differences(snapshot(at.fsm)) == []


def test_graph_refreshes_its_own_part_itself() -> None:
    """What a replay will write is left to it, stale as it is."""
    at = world("dsa")
    at.round_trip()
    at.prepare()
    with at.fsm.record("own") as graph, at.fsm.draft_forward(at.fsm.batch(DRAFT)):
        pass
    made = names(at, graph.made[DRAFT])
    assert "block_table" in made
    now = attrs.evolve(at.fsm.batch(DRAFT) or BATCH, kv_lens=(5, 5, 5))
    at.draft.swap()
    at.fsm.target_prepare(BATCH, draft=now, graph=graph)
    ahead = names(at, list(at.fsm.trace)[-1].ahead)
    assert "kv_cache_block_offsets" in ahead
    assert not ahead & made
    with at.fsm.draft_replay(graph, now):
        assert not names(at, list(at.fsm.trace)[-1].refreshed)


def test_batch_without_room_is_refused_before_anything_changes() -> None:
    at = world()
    at.prepare()
    before = snapshot(at.fsm)
    with pytest.raises(ValueError, match="target_prepare: a batch of 6 rows does not fit"):
        at.fsm.target_prepare(OTHER["batch"], draft=attrs.evolve(BATCH, padded=6))
    assert before.differences(snapshot(at.fsm)) == []


def test_graph_without_a_batch_is_refused() -> None:
    at = world()
    with pytest.raises(TypeError, match="needs draft="):
        at.fsm.target_prepare(BATCH, graph=object())  # type: ignore[arg-type]  # the test's point
