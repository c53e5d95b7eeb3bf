"""What the metadata carries: contents after every event, for every backend and row order, and the originals' return."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specfsm.backends.resource import Buffer, Path, Pointer, Shared
from specfsm.domain import Batch, Domain, RowOrder
from specfsm.kernels.recipes import ExpandRows, GatherTable, SlidingTable, SlotMapping
from specfsm.orchestrator import Orchestrator
from specfsm.switch import reader, writer
from tests.toys import BACKENDS, BATCH, OTHER, REQUESTS, Fuse, Injected, Manager, Metadata, World, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT
ORDERS = [(one, other) for one in RowOrder for other in RowOrder]


def expected_table(fsm: Orchestrator, name: str, manager: Manager, batch: Batch) -> torch.Tensor | None:
    """What a table must hold, by the definition and from the manager's own books; None where `name` has no recipe."""
    resource: Any = fsm.backend.resource(name)
    buffer, recipe = fsm.value(name), getattr(resource, "recipe", None)
    if recipe is None:
        return None
    table = torch.full_like(buffer, recipe.sentinel if hasattr(recipe, "sentinel") else -1)
    WORKED_OUT[type(recipe)](recipe, fsm, table, manager, batch)
    return table


def gather(recipe: Any, _: Orchestrator, table: torch.Tensor, manager: Manager, batch: Batch) -> None:
    geometry = manager.geometry
    first = batch.num_contexts if recipe.rows == "generation_row_index" else 0
    for row in range(first, len(batch)):
        for block, slot in enumerate(manager.slots[batch.request_ids[row]]):
            if recipe.lens and block * geometry.tokens_per_block >= batch.kv_lens[row]:
                continue
            if recipe.planes:
                for plane in range(geometry.kv_factor):
                    table[0, row, plane, block] = slot * geometry.num_layers * geometry.kv_factor + plane
            else:
                table[row - first, block] = slot


def expand(recipe: Any, fsm: Orchestrator, table: torch.Tensor, manager: Manager, batch: Batch) -> None:
    source = expected_table(fsm, recipe.table, manager, batch)
    assert source is not None
    for row in range(len(table)):
        table[row] = source[row // (len(table) // len(source))]


def slide(_: Any, __: Orchestrator, table: torch.Tensor, manager: Manager, batch: Batch) -> None:
    layers, planes = manager.geometry.num_layers, manager.geometry.kv_factor
    for layer in range(layers):
        for row, request in enumerate(batch.request_ids):
            for block, slot in enumerate(manager.slots[request]):
                table[layer, 0, row, block] = slot * layers * planes + layer * planes


def map_slots(recipe: Any, _: Orchestrator, table: torch.Tensor, manager: Manager, batch: Batch) -> None:
    page, token = manager.geometry.tokens_per_block, 0
    for request, length, new in zip(batch.request_ids, batch.kv_lens, batch.tokens, strict=True):
        for position in range(length - new, length):
            inside, held = position % page, manager.slots[request]
            if position // page < len(held):  # else nobody has allocated it yet
                block = held[position // page] * page * (128 + 4)
                table[token] = block + (inside * 128 if recipe.part == "data" else page * 128 + inside * 4)
            token += 1


WORKED_OUT = {GatherTable: gather, ExpandRows: expand, SlidingTable: slide, SlotMapping: map_slots}


def assert_serves(at: World, domain: Domain, batch: Batch) -> None:
    """Every attribute carries the domain's own value, and every table says where that manager keeps the batch."""
    held = at.target if domain is TARGET else at.draft
    tables = 0
    for resource, value in zip(at.fsm.backend.resources, at.fsm.bindings[domain].values, strict=True):
        if domain not in resource.domains:
            continue
        if resource.attribute is not None and not resource.lazy:
            assert getattr(at.metadata, resource.attribute) is value, resource.name
        table = expected_table(at.fsm, resource.name, held, batch)
        if table is not None:
            assert torch.equal(value, table), f"{resource.name}\n{value}\n{table}"
            tables += 1
    assert tables


@pytest.mark.parametrize(("order", "draft_order"), ORDERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_metadata_serves_the_cache_of_the_phase(backend: str, order: RowOrder, draft_order: RowOrder) -> None:
    """Target and draft differ in pool, width, page size and row order; requests come back in another order."""
    at = world(backend, order=order, draft_order=draft_order, check="tensors")
    for batch in (BATCH, OTHER["batch"], Batch(REQUESTS[:2], (3, 3), (1, 1)), BATCH):
        at.fsm.target_prepare(batch)
        assert_serves(at, TARGET, batch)
        with at.fsm.draft_forward():
            assert_serves(at, DRAFT, batch)
            at.draft.allocate(REQUESTS[0]) if len(at.draft.slots[REQUESTS[0]]) < 5 else at.draft.swap()
            at.fsm.draft_step()
            assert_serves(at, DRAFT, batch.next_step())
        assert_serves(at, TARGET, batch)
        at.target.swap()
        at.fsm.target_prepare()
        assert_serves(at, TARGET, batch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_restore_returns_every_original_and_refills_nothing(backend: str) -> None:
    """The target kept its own buffers: the same objects come back, untouched."""
    at = world(backend)
    at.round_trip()
    at.prepare()
    own = {
        resource.attribute: getattr(at.metadata, resource.attribute)
        for resource in at.fsm.backend.resources
        if resource.attribute and not resource.lazy
    }
    versions = {name: value._version for name, value in own.items() if isinstance(value, torch.Tensor)}
    shared = {each.name for each in at.fsm.backend.resources if isinstance(each, Shared)}
    at.fsm.draft_forward(OTHER["layout"])
    at.fuse.arm(None)
    at.fsm.restore()
    at.fuse.disarm()
    assert all(getattr(at.metadata, name) is value for name, value in own.items())
    assert all(own[name]._version == was for name, was in versions.items() if name not in shared)
    assert not any(action.startswith(("fill", "refresh", "launch", "of ")) for action in at.fuse.passed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_tables_of_a_switch_are_one_launch(backend: str) -> None:
    """However many are stale: one launch a domain, and none where nothing is."""
    at = world(backend)
    at.prepare()
    at.fuse.arm(None)
    at.fsm.draft_forward(BATCH)
    at.fuse.disarm()
    assert at.fuse.passed.count("launch") == 1
    at.fsm.restore()
    at.prepare()
    at.fuse.arm(None)
    at.fsm.draft_forward(BATCH)
    at.fsm.restore()
    at.prepare()
    at.fuse.disarm()
    shared = {f"refresh {each.name}" for each in at.fsm.backend.resources if isinstance(each, Shared)}
    work = [action for action in at.fuse.passed if action.startswith(("fill", "refresh", "launch", "of ", "derive"))]
    assert set(work) == shared, "a shared buffer is written for each phase; nothing else was stale"


def test_shared_buffer_is_written_for_every_draft_phase() -> None:
    """Restore gave its contents back to the target: the draft's are gone, though none of its inputs moved."""
    at = world()
    for _ in range(3):
        at.fsm.target_prepare(BATCH)
        assert at.metadata.counters.tolist() == [2, 2, 2, 0, 0]
        assert at.metadata.scratch.tolist() == [24, 24]
        with at.fsm.draft_forward(OTHER["layout"]):
            assert at.metadata.counters.tolist() == [1, 2, 2, 0, 0]
            assert at.metadata.scratch.tolist() == [124, 124]
        assert at.metadata.counters.tolist() == [2, 2, 2, 0, 0]
        assert at.metadata.scratch.tolist() == [24, 24]


def test_what_the_draft_wrote_into_a_shared_buffer_is_lost() -> None:
    """The target's contents come back, by copy or by the engine's own hooks, whatever the draft did."""
    at = world()
    at.prepare()
    at.fuse.arm(None)
    with at.fsm.draft_forward():
        at.metadata.counters.fill_(-5)
        at.metadata.scratch.fill_(-5)
    at.fuse.disarm()
    assert at.metadata.counters.tolist() == [2, 2, 2, 0, 0]
    assert at.metadata.scratch.tolist() == [24, 24]
    assert at.fuse.passed.count("load scratch") == 1
    assert at.fuse.passed.count("save scratch") == 2, "once for the target, once in case the restore must be undone"


def test_plans_and_caches_do_not_cross_the_switch() -> None:
    """One attribute serves both domains, so each switch empties it."""
    at = world()
    at.prepare()
    at.make_plans()
    with at.fsm.draft_forward():
        assert (at.metadata.plan, at.metadata.layouts) == (None, {})
        at.make_plans()
        at.fsm.draft_step()
        assert at.metadata.plan is None, "lengths moved"
        assert at.metadata.layouts == {"made": "up"}, "the manager did not"
        at.metadata.layouts["more"] = 1
    assert (at.metadata.plan, at.metadata.layouts) == (None, {})


def test_each_switch_empties_a_cache_of_its_own() -> None:
    """Two domains must not share one dict."""
    at = world()
    at.prepare()
    first = at.metadata.layouts
    at.fsm.draft_forward()
    second = at.metadata.layouts
    at.fsm.restore()
    assert first is not second
    assert second is not at.metadata.layouts


def test_host_half_follows_the_device_half() -> None:
    """An engine that reads the host half reads what the device was sent."""
    at = world()
    for _ in range(3):
        at.prepare()
        assert torch.equal(at.metadata.host_rows, at.metadata.rows)
        target_half = at.metadata.host_rows
        with at.fsm.draft_forward():
            assert torch.equal(at.metadata.host_rows, at.metadata.rows)
            at.fsm.draft_step()
            assert torch.equal(at.metadata.host_rows, at.metadata.rows)
        assert at.metadata.host_rows is target_half


def test_view_follows_the_binding_and_the_batch() -> None:
    at = world()
    at.prepare()
    assert at.metadata.live_rows.data_ptr() == at.metadata.rows.data_ptr()
    with at.fsm.draft_forward(Batch(REQUESTS[:1], (4,), (1,))):
        assert at.metadata.live_rows.data_ptr() == at.metadata.draft_rows.data_ptr()
        assert at.metadata.live_rows.shape == (1,)
    assert at.metadata.live_rows.shape == (3,)


def test_attributes_that_the_engine_never_set_start_empty() -> None:
    at = world()
    assert (at.metadata.plan, at.metadata.layouts, at.metadata.manager_ref) == (None, {}, None)


def test_replay_rebinds_only_what_a_captured_graph_does_not_bake() -> None:
    """The graph holds the tables' addresses; references, plans and caches follow."""
    at = world()
    at.prepare()
    at.fuse.arm(None)
    at.fsm._fire("draft_replay", at.fsm.switch.draft, BATCH)
    at.fuse.disarm()
    assert at.metadata.manager_ref is at.draft
    assert at.metadata.block_table is at.fsm.value("block_table", TARGET)
    assert at.metadata.draft_block_table[:3, :3].tolist() == [at.draft.slots[request] for request in REQUESTS]
    at.fsm.restore()
    assert at.metadata.manager_ref is at.target


def test_reset_binds_the_targets_values_whatever_the_metadata_carries() -> None:
    at = world()
    at.prepare()
    at.fsm.draft_forward()
    at.fuse.arm("set manager_ref", Injected, late=True, stuck=True)
    with pytest.raises(ExceptionGroup):
        at.fsm.restore()
    at.fuse.disarm()
    for name in at.fsm.switch.attributes:
        setattr(at.metadata, name, "rubbish")
    at.fsm.reset()
    for resource, value in zip(at.fsm.backend.resources, at.fsm.bindings[TARGET].values, strict=True):
        if isinstance(resource, Buffer | Pointer) and resource.attribute and not isinstance(resource, Shared):
            assert getattr(at.metadata, resource.attribute) is value, resource.name
    assert (at.metadata.plan, at.metadata.layouts) == (None, {})


def test_nothing_is_exchanged_for_what_one_domain_has() -> None:
    """A unified cache has no way back, since nothing went."""
    at = world()
    assert set(at.fsm.switch.attributes) < set(at.fsm.switch.carried)
    assert not at.fsm.switch.unified
    assert at.fsm.switch.scripts[Path.EAGER][DRAFT].shared


@pytest.mark.parametrize("count", [0, 1, 2, 12])
def test_compiled_reader_and_writer_are_getattr_and_setattr(count: int) -> None:
    """For any number of attributes, in order; a maker makes a new value each time."""
    names = [f"name_{index}" for index in range(count)]
    held = SimpleNamespace(**{name: index for index, name in enumerate(names)})
    assert reader(names)(held) == tuple(range(count))
    halves = (["host", "none"], "(hosts.get(3), hosts.get(4))")
    put = writer([(names[::-1], "values"), halves, (["layouts"], "(make[0](), )")], [dict])
    put(held, [object() for _ in names], {3: "the host half"})
    first = held.layouts
    values = [object() for _ in names]
    put(held, values, {3: "another"})
    assert [getattr(held, name) for name in names[::-1]] == values
    assert (held.host, held.none) == ("another", None)
    assert held.layouts == {}
    assert held.layouts is not first


def test_compiled_writer_leaves_out_what_goes_nowhere() -> None:
    held = SimpleNamespace()
    writer([(["a", None, "c"], "values[::-1]"), ([], "()")])(held, (3, 2, 1), {})
    assert vars(held) == {"a": 1, "c": 3}
    writer([])(held, (), {})


def test_compiled_writer_sets_from_left_to_right_and_stops_at_an_error() -> None:
    """It goes through the metadata's own ``__setattr__``, whatever that does."""
    fuse = Fuse()
    metadata = Metadata(fuse)
    fuse.arm("set b")
    with pytest.raises(Injected):
        writer([(["a", "b", "c"], "values")])(metadata, (1, 2, 3), {})
    assert fuse.passed == ["set a", "set b"]
    assert reader(["a"])(metadata) == (1,)
