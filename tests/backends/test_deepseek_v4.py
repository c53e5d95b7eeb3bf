"""DeepSeek-V4 under TensorRT-LLM's attribute names. What its tables hold is held in tests/test_switch.py."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from specfsm.backends.backend import Backend
from specfsm.backends.deepseek_v4 import DeepSeekV4
from specfsm.backends.resource import Buffer
from specfsm.domain import AddressSpace, Domain, RowOrder, SlidingKVManager, Unit
from specfsm.errors import IncompleteBackend, RefreshDeclined, StaleResource, UnknownMetadata
from specfsm.orchestrator import Orchestrator
from tests.toys import BATCH, REQUESTS, SIZES, Fuse, Manager, Metadata, manager, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT

SPARSE = {
    "sliding_block_tables",
    "sparse_mla_base_ptrs",
    "swa_buffer_ptrs",
    "compress_block_tables4",
    "compress_block_tables128",
    "compressed_buffer_ptrs",
}


def test_attributes_are_upstreams() -> None:
    declared = {name for resource in DeepSeekV4().resources for name in resource.attributes}
    assert declared > SPARSE


# Limits.


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"draft_compress_ratio": 4}, "draft_compress_ratio is 4, .*give the draft layers of ratio 1"),
        ({"beam_width": 2}, "beam_width is 2, .*use 1"),
    ],
)
def test_what_it_cannot_do_is_refused_when_it_is_declared(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DeepSeekV4(**arguments)


def test_pipeline_stages_fold_the_draft_into_the_targets_cache() -> None:
    """Declared, and its reason is what explain() says."""
    at = world(DeepSeekV4(pipeline_parallel_size=2))
    assert at.fsm.bindings[TARGET] is at.fsm.bindings[DRAFT]
    assert "the draft shares the target's cache: 2 pipeline stages" in str(at.fsm.explain())
    at.round_trip()
    assert at.metadata.kv_cache_manager is at.target
    assert DeepSeekV4().unified is None


# The target's alone.


def test_compressed_tables_are_untouched_by_the_draft() -> None:
    """No twin, no rebinding, no refresh: contents and references are the target's throughout."""
    at = world("deepseek_v4")
    at.prepare()
    names = ("compress_block_tables4", "compress_block_tables128", "compressed_buffer_ptrs")
    held = {name: getattr(at.metadata, name) for name in names}
    contents = held[names[0]].clone()
    with at.fsm.draft_forward():
        at.draft.swap()
        at.fsm.draft_step()
        assert {name: getattr(at.metadata, name) for name in names} == held
    assert torch.equal(at.metadata.compress_block_tables4, contents)
    assert contents[:3, :3].tolist() == [at.target.slots[request] for request in REQUESTS]
    assert not any(hasattr(at.metadata, f"draft_{name}") for name in names)


@pytest.mark.parametrize("ratios", [(), (4,), (128, 4)])
def test_one_table_a_ratio(ratios: tuple[int, ...]) -> None:
    made = DeepSeekV4(compress_ratios=ratios)
    tables = [each.name for each in made.resources if each.name.startswith("compress_block_tables")]
    assert tables == [f"compress_block_tables{ratio}" for ratio in ratios]
    assert all(made.resource(name).domains == (TARGET,) for name in (*tables, "compressed_buffer_ptrs"))


def test_pointers_follow_the_manager() -> None:
    """Base addresses and layer addresses of each domain's own pools; a manager that moves its pools is asked again."""
    at = world("deepseek_v4")
    at.prepare()
    assert at.metadata.sparse_mla_base_ptrs == {1: 0x1000, 4: 0x1400}
    assert at.metadata.swa_buffer_ptrs == {0: 0x1000, 1: 0x1001, 2: 0x1002}
    with at.fsm.draft_forward():
        assert at.metadata.swa_buffer_ptrs == {0: 0x2000}
        at.draft.window_pointers = {0: 0x7000}
        at.draft.generation += 1
        at.fsm.draft_step()
        assert at.metadata.swa_buffer_ptrs == {0: 0x7000}
        at.metadata.swa_buffer_ptrs[0] = 1
    assert at.draft.window_pointers == {0: 0x7000}, "the manager's own books were handed out"
    assert at.metadata.sparse_mla_base_ptrs == {1: 0x1000, 4: 0x1400}


# Compute, then copy.


def test_base_is_computed_before_it_is_copied_and_copied_before_it_is_read() -> None:
    at = world("deepseek_v4")
    at.fuse.arm(None)
    at.prepare()
    at.fuse.disarm()
    order = [at.fuse.passed.index(each) for each in ("of host_sliding_base", "fill sliding_base", "launch")]
    assert order == sorted(order)


@pytest.mark.parametrize("domain", Domain)
def test_copy_of_a_base_that_was_not_computed_is_refused(domain: Domain) -> None:
    """The error names what was left out, not what it left stale."""
    at = world("deepseek_v4", drop=[("host_sliding_base", domain)])
    with pytest.raises(StaleResource) as caught:
        at.round_trip()
    assert (caught.value.resource, caught.value.domain) == ("host_sliding_base", domain)


def test_manager_that_computes_nothing_has_declined() -> None:
    """The copy, and the tables behind it, are not refreshed from what was there before."""
    at = world("deepseek_v4")
    at.prepare()
    table = at.fsm.value("sliding_block_tables").clone()
    at.target.compute_sliding_base = lambda request_ids: None  # type: ignore[method-assign, return-value, assignment]  # an engine's bug
    at.target.swap()
    with pytest.raises(RefreshDeclined) as caught:
        at.prepare()
    assert caught.value.resource == "host_sliding_base"
    assert torch.equal(at.fsm.value("sliding_block_tables"), table)


def test_each_base_is_of_its_own_manager() -> None:
    at = world("deepseek_v4", order=RowOrder.SLOT, draft_order=RowOrder.BATCH)
    at.prepare()
    with at.fsm.draft_forward():
        for domain, own in ((TARGET, at.target), (DRAFT, at.draft)):
            base = at.fsm.value("sliding_base", domain)
            assert torch.equal(base, own.compute_sliding_base(REQUESTS))
            assert base[base >= 0].unique().tolist() == sorted(slot for held in own.slots.values() for slot in held)


def test_pool_that_does_not_exist_is_refused() -> None:
    at = world("deepseek_v4")
    at.target.sliding_pools[1][0] = 1
    with pytest.raises(
        ValueError, match="sliding_pools names pool 1, but the target's manager has 1 pools: let it say -1"
    ):
        at.prepare()


@pytest.mark.parametrize("scale", [-1, 2**31])
def test_pages_beyond_int32_are_refused(scale: int) -> None:
    at = world("deepseek_v4")
    at.target.sliding_scales[0][0] = scale
    with pytest.raises(ValueError, match=r"sliding_scales must be 0 or more, and pages up to -?[0-9]+ must fit"):
        at.prepare()


def test_layer_without_a_pool_has_no_page() -> None:
    at = world("deepseek_v4")
    at.target.sliding_pools[1][0] = -1
    at.prepare()
    table = at.metadata.sliding_block_tables
    assert (table[1] == -1).all()
    assert (table[0, 0, :3, :3] >= 0).all()


# Raw block ids, and blocks that were offloaded.


def test_raw_block_ids_cannot_be_declared_as_its_source() -> None:
    """A block keeps its id when it is offloaded: the recipes take entries alone."""
    ids = AddressSpace("window", Unit.BLOCK)
    resources = [attrs.evolve(r, space=ids) if r.name == "sliding_base" else r for r in DeepSeekV4().resources]
    with pytest.raises(
        IncompleteBackend, match="sliding_block_tables reads sliding_base counted in entry, but it holds window"
    ):
        Backend("deepseek_v4", tuple(resources))


def test_offloaded_block_has_no_page() -> None:
    at = world("deepseek_v4", order=RowOrder.SLOT)
    at.target.host_block_offsets[:, at.target.row_of[REQUESTS[0]], :, 1] |= -(2**31)
    at.prepare()
    assert (at.metadata.sliding_block_tables[:, 0, 0, 1] == -1).all()
    assert at.metadata.compress_block_tables4[0, 1] == -1


# The managers.


class Plain:
    """A KV manager that knows of no window."""

    def __init__(self, wrapped: Manager) -> None:
        self.geometry, self.generation, self.blocks_version = wrapped.geometry, 1, 1
        self.host_block_offsets, self.pool_pointers = wrapped.host_block_offsets, wrapped.pool_pointers
        self.arrange = wrapped.arrange


def bound(backend: Backend, draft: Any) -> Orchestrator:
    metadata, target = Metadata(Fuse()), manager(TARGET)
    backend.allocate(metadata, target, draft, SIZES, "cpu")
    return Orchestrator(metadata, backend=backend, target=target, draft=draft)


def test_manager_without_a_window_is_refused_when_it_is_bound() -> None:
    """One error that lists what it lacks, and how to declare a draft of another type."""
    with pytest.raises(UnknownMetadata) as caught:
        bound(DeepSeekV4(), Plain(manager(DRAFT)))
    text = str(caught.value)
    assert "the draft manager Plain cannot serve deepseek_v4" in text
    assert "it lacks compressed_pointers, compute_sliding_base, sliding_offsets, sliding_pools" in text
    assert "specfsm.SlidingKVManager" in text
    assert isinstance(manager(DRAFT), SlidingKVManager)


def test_draft_of_another_type_has_no_sparse_twins() -> None:
    """An Eagle3 draft beside a V4 target: plain paged attention over a plain manager, declared."""
    backend, draft = DeepSeekV4(sparse_draft=False), Plain(manager(DRAFT))
    sparse = [each for each in backend.resources if "sliding" in each.name or each.name in SPARSE]
    assert {each.domains for each in sparse} == {(TARGET,)}
    assert all(each.twin is None for each in sparse if isinstance(each, Buffer) and hasattr(each, "twin"))
    fsm = bound(backend, draft)
    fsm.target_prepare(BATCH)
    held = {name: getattr(fsm.metadata, name) for name in SPARSE}
    with fsm.draft_forward():
        assert fsm.metadata.kv_cache_manager is draft
        assert fsm.metadata.kv_cache_block_offsets is fsm.value("kv_cache_block_offsets", DRAFT)
        assert {name: getattr(fsm.metadata, name) for name in SPARSE} == held
    assert fsm.metadata.kv_cache_block_offsets is fsm.value("kv_cache_block_offsets", TARGET)
    verdicts = {line.resource: line.verdict for line in fsm.explain().lines if line.domain is DRAFT}
    assert {verdicts[name] for name in SPARSE} == {"this domain has none"}
