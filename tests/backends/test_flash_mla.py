"""FlashMLA under TensorRT-LLM's attribute names: decoded slots, generations packed, a plan that is never kept."""

from __future__ import annotations

import attrs
import pytest

from specfsm.backends.flash_mla import FlashMLA
from specfsm.domain import Domain, RowOrder
from specfsm.states.resource import Freshness
from tests.toys import BATCH, REQUESTS, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT

PLANS = ("flash_mla_tile_scheduler_metadata", "flash_mla_num_splits")


def test_attributes_are_upstreams() -> None:
    declared = {name for resource in FlashMLA().resources for name in resource.attributes}
    assert {"kv_block_ids_per_seq", "block_ids_per_seq", *PLANS} < declared


@pytest.mark.parametrize("contexts", [0, 1, 3])
def test_generations_are_packed_to_row_zero(contexts: int) -> None:
    """All rows in batch order in the one table, the generations alone in the other; zeros pad."""
    at = world("flash_mla")
    at.prepare(attrs.evolve(BATCH, num_contexts=contexts))
    live = [at.target.slots[request] for request in REQUESTS]
    assert at.metadata.kv_block_ids_per_seq[:3, :3].tolist() == live
    generations = live[contexts:]
    assert at.metadata.block_ids_per_seq[: len(generations), :3].tolist() == generations
    assert not at.metadata.block_ids_per_seq[len(generations) :].any()
    assert at.fsm.value("generation_row_index").tolist()[len(generations) :] == [-1] * (5 - len(generations))


def test_raw_block_ids_never_get_in() -> None:
    """Upstream's manager hands out names; a slot is the entry divided by its scale, and an offloaded block has none."""
    at = world("flash_mla", order=RowOrder.SLOT)
    row = at.target.row_of[REQUESTS[1]]
    entry = at.target.host_block_offsets[0, row, 0, 0].item()
    assert entry != at.target.slots[REQUESTS[1]][0], "the case would show nothing"
    at.target.host_block_offsets[:, row, :, 2] |= -(2**31)
    at.target.blocks_version += 1
    at.prepare()
    assert at.metadata.kv_block_ids_per_seq[1, :3].tolist() == [*at.target.slots[REQUESTS[1]][:2], 0]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("source", ["batch", "lengths", "layout", "manager"])
def test_schedule_does_not_outlive_its_inputs(plan: str, source: str) -> None:
    """The split-KV schedule is made for these lengths and these rows."""
    at = world("flash_mla")
    at.prepare()
    at.make_plans()
    kept = getattr(at.metadata, plan)
    at.fsm.target_prepare()
    assert getattr(at.metadata, plan) is kept
    at.fsm.target_prepare(at.move(source, TARGET))
    assert getattr(at.metadata, plan) is None
    assert at.fsm.ledger.state(TARGET, plan) is Freshness.UNBOUND


def test_draft_step_drops_the_schedule_and_keeps_the_tables() -> None:
    """Lengths moved; no page did."""
    at = world("flash_mla")
    at.prepare(attrs.evolve(BATCH, num_contexts=0))
    with at.fsm.draft_forward():
        at.fsm.draft_step()
        at.make_plans()
        at.fuse.arm(None)
        at.fsm.draft_step()
        at.fuse.disarm()
        assert "launch" not in at.fuse.passed
        assert all(getattr(at.metadata, plan) is None for plan in PLANS)
    assert at.fsm.domain is TARGET
