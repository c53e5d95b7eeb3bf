"""DSA under TensorRT-LLM's attribute names. That its tables hold what they must is held in tests/test_switch.py."""

from __future__ import annotations

from collections import deque
from typing import Any

import attrs
import pytest
import torch

from specfsm.backends.backend import Backend
from specfsm.backends.dsa import DSA
from specfsm.backends.resource import Alias, Cache, Shared, Table
from specfsm.domain import AddressSpace, Batch, Domain, RowOrder, Unit
from specfsm.errors import IncompleteBackend, StaleResource
from specfsm.states.resource import Freshness, bits
from tests.toys import BATCH, REQUESTS, SIZES, World, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT

UPSTREAM = {
    "kv_cache_block_offsets",
    "indexer_k_cache_block_offsets",
    "block_table",
    "block_table_expanded",
    "req_idx_per_token",
    "slot_mapping_fp8",
    "slot_mapping_scale",
    "slot_mapping_fp8_fullkv",
    "slot_mapping_scale_fullkv",
    "scheduler_metadata_buffer",
    "scheduler_metadata_buffer_expanded",
}
IN_GRAPH = {
    "req_idx_per_token",
    "tokens_to_end",
    "slot_mapping_fp8",
    "slot_mapping_scale",
    "block_table",
    "block_table_expanded",
}
PLANS = ("scheduler_metadata_buffer", "scheduler_metadata_buffer_expanded")


def steady(backend: str | Backend = "dsa", **options: Any) -> World:
    """A prepared world without contexts, so that rows keep their order from step to step."""
    at = world(backend, **options)
    at.prepare(attrs.evolve(BATCH, num_contexts=0))
    return at


def test_attributes_are_upstreams() -> None:
    declared = {name for resource in DSA().resources for name in resource.attributes}
    assert declared > UPSTREAM


# Which request a token belongs to.


def test_tokens_follow_the_layout_and_nothing_else() -> None:
    """Neither the manager nor its blocks: a map tied to the manager is not rebuilt when only the draft step moves."""
    sources = DSA().ledger().sources
    for name in ("req_idx_per_token", "tokens_to_end"):
        assert {source for source in sources[name] if source in DSA().inputs} == {"batch", "layout"}


def test_draft_loop_maps_one_token_to_each_request() -> None:
    """Several tokens a request in the target's step, one in the later draft steps (TensorRT-LLM #16925)."""
    at = steady()
    pads = [-1] * (SIZES.max_tokens - 6)
    assert at.metadata.req_idx_per_token.tolist() == [0, 0, 1, 1, 2, 2, *pads]
    assert at.fsm.value("tokens_to_end").tolist() == [2, 1, 2, 1, 2, 1, *(0 for _ in pads)]
    with at.fsm.draft_forward(Batch(REQUESTS, (6, 4, 5), (3, 1, 2))):
        assert at.metadata.req_idx_per_token[:7].tolist() == [0, 0, 0, 1, 2, 2, -1]
        at.fsm.draft_step(Batch(REQUESTS, (7, 5, 6), (1, 1, 1)))
        assert at.metadata.req_idx_per_token[:4].tolist() == [0, 1, 2, -1]
        assert at.fsm.value("tokens_to_end")[:4].tolist() == [1, 1, 1, 0]
    assert at.metadata.req_idx_per_token[:6].tolist() == [0, 0, 1, 1, 2, 2]


def test_map_of_the_targets_layout_is_refused_in_the_draft_loop() -> None:
    """The bug itself: the draft's first pass has the target's layout, and the map is not rebuilt for the second."""
    at = steady(check="tensors")
    at.fsm.draft_forward()
    at.fsm.switch.leave_out((0, at.fsm.ledger.mask(["req_idx_per_token"])))
    with pytest.raises(StaleResource) as caught:
        at.fsm.draft_step()
    assert (caught.value.resource, caught.value.domain) == ("req_idx_per_token", DRAFT)
    assert list(caught.value.moved) == ["layout"]


# What a graph refreshes itself.


def test_graph_refreshes_what_lengths_and_layout_move() -> None:
    made = DSA()
    assert {each.name for each in made.resources if each.refreshed_by == "graph"} == IN_GRAPH
    ledger = made.ledger()
    tables = {each.name for each in made.resources if isinstance(each, Table)}
    on_device = {name for name in tables if {"kv_lens_cuda", "_seq_lens_cuda"} & set(ledger.sources[name])}
    assert on_device == IN_GRAPH, "whatever else reads them could not be mended inside a graph"


def test_recorded_draft_step_is_derived_from_what_the_graph_wrote() -> None:
    """Lengths and layout advance on the device inside the recording: the next slots are those of the new ends."""
    at = steady()
    at.round_trip(attrs.evolve(BATCH, num_contexts=0, kv_lens=(5, 5, 5)))
    first = Batch(REQUESTS, (5, 5, 5), (2, 2, 2))
    at.prepare(first)
    second = Batch(REQUESTS, (6, 6, 6), (1, 1, 1))
    with at.fsm.record("steps") as graph, at.fsm.draft_forward(first):
        at.fsm.announce(second)
        for name, value in (("kv_lens_cuda", 6), ("_seq_lens_cuda", 1)):
            buffer = at.fsm.value(name)
            buffer[:3] = value
            at.fsm.publish(name, buffer)
        at.fsm.draft_step(second)
        page = at.draft.geometry.tokens_per_block
        slots = [at.draft.slots[request][5 // page] for request in REQUESTS]
        rows = [slot * page * 132 + 5 % page * 128 for slot in slots]
        assert at.fsm.value("slot_mapping_fp8").tolist() == [*rows, *[-1] * (SIZES.max_tokens - 3)]
    assert at.fsm.ledger.mask(IN_GRAPH) & ~graph.made[DRAFT] == 0
    assert {at.fsm.ledger.names[place] for place in bits(graph.writes[DRAFT])} == IN_GRAPH | {
        "kv_lens_cuda",
        "_seq_lens_cuda",
    }


@pytest.mark.parametrize("name", sorted(IN_GRAPH))
def test_refresh_left_out_of_a_graph_is_refused_when_it_is_recorded(name: str) -> None:
    """Its second pass would run on the slots, or the rows, of the first."""
    first, second = Batch(REQUESTS, (5, 5, 5), (2, 2, 2)), Batch(REQUESTS, (6, 6, 6), (1, 1, 1))
    at = steady()
    at.round_trip(first)
    at.prepare(first)
    at.fsm.switch.leave_out((0, at.fsm.ledger.mask([name])))

    def record() -> None:
        with at.fsm.record("steps"), at.fsm.draft_forward(first):
            at.fsm.announce(second)
            for written in ("kv_lens_cuda", "_seq_lens_cuda"):
                at.fsm.publish(written, at.fsm.value(written))
            at.fsm.draft_step(second)

    with pytest.raises(StaleResource) as caught:
        record()
    assert (caught.value.resource, caught.value.domain) == (name, DRAFT)


def test_schedule_does_not_outlive_lengths_that_moved_on_the_device() -> None:
    """No input moved: the engine corrected the lengths, and said so."""
    at = steady()
    at.make_plans()
    at.fsm.publish("kv_lens_cuda", at.fsm.value("kv_lens_cuda").add_(1))
    at.fsm.target_prepare()
    assert [getattr(at.metadata, plan) for plan in PLANS] == [None, None]
    assert {at.fsm.ledger.state(TARGET, plan) for plan in PLANS} == {Freshness.UNBOUND}


@pytest.mark.parametrize(("source", "dropped"), [("lengths", PLANS), ("layout", PLANS[1:]), ("blocks", ())])
def test_schedules_are_of_lengths(source: str, dropped: tuple[str, ...]) -> None:
    """The expanded one has a row for each query, so the layout moves it too; pages move neither."""
    at = steady()
    at.make_plans()
    at.fsm.target_prepare(at.move(source, TARGET))
    assert tuple(plan for plan in PLANS if getattr(at.metadata, plan) is None) == dropped


# Views and caches.


def test_fullkv_mappings_are_the_mappings() -> None:
    """Of whichever domain is served."""
    at = steady()
    for domain in (TARGET, DRAFT):
        for name in ("slot_mapping_fp8", "slot_mapping_scale"):
            assert getattr(at.metadata, f"{name}_fullkv") is at.fsm.value(name, domain)
        if domain is TARGET:
            at.fsm.draft_forward()
    assert {each.of for each in DSA().resources if isinstance(each, Alias)} > {"slot_mapping_fp8", "slot_mapping_scale"}


def test_caches_keyed_by_the_manager_do_not_cross_the_switch() -> None:
    at = steady()
    names = [each.name for each in DSA().resources if isinstance(each, Cache)]
    assert names == ["pool_view", "pool_remap"]
    at.make_plans()
    assert all(getattr(at.metadata, name) for name in names)
    with at.fsm.draft_forward():
        assert [getattr(at.metadata, name) for name in names] == [{}, {}]
        at.make_plans()
    assert [getattr(at.metadata, name) for name in names] == [{}, {}]


# Expanded rows.


def test_every_query_has_a_row() -> None:
    at = steady()
    expanded = at.metadata.block_table_expanded
    assert expanded.shape == (SIZES.max_sequences * (1 + SIZES.max_draft_len), 7)
    for row, each in enumerate(expanded):
        assert torch.equal(each, at.metadata.block_table[row // (1 + SIZES.max_draft_len)])


# What cannot be expressed.


def test_raw_block_ids_cannot_be_declared_as_its_source() -> None:
    """A block keeps its id when it is offloaded, and its slot is somebody else's: the recipes take entries alone."""
    ids = AddressSpace("kv", Unit.BLOCK)
    resources = [attrs.evolve(r, space=ids) if r.name == "base_block_offsets" else r for r in DSA().resources]
    with pytest.raises(IncompleteBackend) as caught:
        Backend("dsa", tuple(resources))
    tables = ("kv_cache_block_offsets", "indexer_k_cache_block_offsets", "block_table")
    assert caught.value.offenders == tuple(
        f"{table} reads base_block_offsets counted in entry, but it holds kv/block: "
        "translate it first, or correct its space"
        for table in tables
    )


def test_offloaded_block_has_no_slot() -> None:
    """Entry -1 or bit 31: the tables and the mappings take their sentinels, whatever slot it once had."""
    at = world("dsa", order=RowOrder.SLOT)
    at.target.host_block_offsets[:, at.target.row_of[REQUESTS[0]], :, 1] |= -(2**31)
    at.prepare(attrs.evolve(BATCH, num_contexts=0))
    assert at.metadata.block_table[0, 1] == -1
    assert at.metadata.indexer_k_cache_block_offsets[0, 1] == 0
    assert at.metadata.slot_mapping_fp8[:2].tolist() == [-1, -1], "its tokens 6 and 7 lie in block 1"


# State that a hook saved.


def test_what_a_nested_hook_saved_is_carried_to_its_pair_unchanged() -> None:
    """Whatever is not None: the very object comes back, also when a replay was entered from the eager draft."""
    given: deque[object] = deque()
    taken: list[object] = []

    def save(_: torch.Tensor) -> object:
        given.append(["saved", len(given)])
        return given[-1]

    def refresh(_: Any, buffer: torch.Tensor) -> torch.Tensor:
        return buffer

    hooked = Shared(
        "hook",
        reads=("batch", "lengths"),
        dtype="int32",
        shape=("S",),
        sentinel=0,
        refresh=refresh,
        save=save,
        load=lambda _, saved: taken.append(saved),
    )
    at = steady(Backend("dsa", (*DSA().resources, hooked)))
    carried = {name: value for name, value in vars(at.metadata).items() if not name.startswith("_fuse")}
    with at.fsm.draft_forward():
        first = given[0]
        at.fsm._fire("draft_replay", at.fsm.switch.draft, at.fsm.batch(DRAFT))
    assert taken[-1] is first
    assert first == ["saved", 0]
    lazy = {each.name for each in DSA().resources if each.lazy}
    now = vars(at.metadata)
    assert [name for name, value in carried.items() if name not in lazy and now[name] is not value] == []
