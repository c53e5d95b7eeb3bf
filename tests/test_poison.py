"""Poison mode: what is stale holds nothing that could pass for right, and nothing that is needed is filled."""

from __future__ import annotations

import pytest
import torch

from specfsm.backends.resource import Buffer, Shared
from specfsm.domain import Domain, RowOrder
from specfsm.poison import OUT_OF_RANGE, poison_of
from tests.toys import BACKENDS, BATCH, OTHER, Injected, buffers, snapshot, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT


@pytest.mark.parametrize("order", RowOrder)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sound_loop_is_the_same_with_poison(backend: str, order: RowOrder) -> None:
    """Every fresh buffer holds what it holds without, at every phase."""
    plain, poisoned = (world(backend, order=order, check="tensors", poison=poison) for poison in (False, True))
    for batch in (BATCH, OTHER["batch"], OTHER["lengths"], BATCH):
        for at in (plain, poisoned):
            at.prepare(batch)
        for domain in (TARGET, DRAFT):
            if domain is DRAFT:
                for at in (plain, poisoned):
                    at.fsm.draft_forward(batch)
                    at.fsm.draft_step()
            fresh = ~plain.fsm.ledger.stale[domain]
            wanted, found = buffers(plain.fsm, domain), buffers(poisoned.fsm, domain)
            for name, contents in wanted.items():
                if fresh >> plain.fsm.ledger.index[name] & 1:
                    assert torch.equal(found[name], contents), name
        for at in (plain, poisoned):
            at.fsm.restore()
            at.target.swap()
            at.draft.swap()


@pytest.mark.parametrize("backend", BACKENDS)
def test_stale_buffers_are_filled_in_both_domains(backend: str) -> None:
    """What nobody may read: the draft's, before its phase, after its pages moved."""
    at = world(backend, poison=True)
    at.round_trip()
    at.fsm.moved("blocks", DRAFT)
    at.prepare()
    stale = at.fsm.ledger.stale[DRAFT]
    found = buffers(at.fsm, DRAFT)
    filled = 0
    for place, resource in enumerate(at.fsm.backend.resources):
        owned = isinstance(resource, Buffer) and not isinstance(resource, Shared)
        if owned and resource.name in found and stale >> place & 1:
            assert (found[resource.name] == poison_of(resource)).all(), resource.name
            filled += 1
    assert filled > 0


@pytest.mark.parametrize("backend", ["toy", "trtllm", "flash_mla"])
def test_use_that_slipped_through_is_loud(backend: str) -> None:
    """Checks off and a refresh left out: the table's places are in no pool, where they were somebody's page before."""
    name = {"toy": "block_table", "trtllm": "kv_cache_block_offsets", "flash_mla": "block_ids_per_seq"}[backend]
    for poison in (False, True):
        at = world(backend, check="off", drop=[(name, DRAFT)], poison=poison)
        at.prepare()
        at.fsm.draft_forward(BATCH)
        table = at.fsm.value(name).flatten()
        pool = torch.zeros(at.draft.geometry.blocks_in_primary_pool * at.draft.geometry.pages_per_slot)
        if poison:
            assert (table == OUT_OF_RANGE).all()
            with pytest.raises(IndexError):
                pool[table.long()]
        else:
            pool[table.long()]  # page 0, and not a word


@pytest.mark.parametrize("backend", BACKENDS)
def test_poison_is_the_sentinel_or_no_place(backend: str) -> None:
    for resource in BACKENDS[backend].make().resources:
        if isinstance(resource, Buffer):
            legal = resource.sentinel >= 0 and resource.space is not None
            assert poison_of(resource) == (OUT_OF_RANGE if legal else resource.sentinel)


def test_undone_transition_fills_nothing() -> None:
    at = world(poison=True, observe=True)
    at.round_trip()
    at.prepare()
    was = snapshot(at.fsm)
    at.fuse.arm("call on_enter_draft_forward")
    with pytest.raises(Injected):
        at.fsm.draft_forward(at.fsm.batch(DRAFT))
    at.fuse.disarm()
    assert was.differences(snapshot(at.fsm)) == []


def test_shared_buffer_keeps_the_target_s_contents() -> None:
    """Stale for the draft, which does not run: the target's are in it."""
    at = world(poison=True)
    at.round_trip()
    at.prepare()
    counters = at.fsm.value("counters").clone()
    at.fsm.moved("layout", DRAFT)
    at.prepare()
    assert torch.equal(at.fsm.value("counters"), counters)
    assert counters.any()


def test_guard_has_no_poison() -> None:
    with pytest.raises(ValueError, match="poison is for a machine that drives"):
        world(guard=True, poison=True)
