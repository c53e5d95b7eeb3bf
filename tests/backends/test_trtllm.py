"""Plain paged attention under TensorRT-LLM's attribute names. Contents are held in tests/test_switch.py."""

from __future__ import annotations

import pytest
import torch

from specfsm.backends import named
from specfsm.backends.resource import Alias, Buffer
from specfsm.backends.trtllm import Trtllm
from specfsm.domain import Batch, Domain, RowOrder
from tests.toys import BATCH, REQUESTS, world

UPSTREAM = {
    "kv_cache_manager",
    "host_kv_cache_block_offsets",
    "host_kv_cache_pool_pointers",
    "tokens_per_block",
    "kv_lens_cuda",
    "kv_lens",
    "_seq_lens_cuda",
    "_seq_lens",
    "num_contexts",
    "kv_lens_cuda_runtime",
    "_seq_lens_cuda_runtime",
    "kv_cache_block_offsets",
}
"""Attributes of ``TrtllmAttentionMetadata`` that follow the switch."""


def test_attributes_are_upstreams() -> None:
    declared = [name for resource in Trtllm().resources for name in resource.attributes]
    assert len(declared) == len(set(declared))
    assert set(declared) == UPSTREAM


def test_named() -> None:
    assert isinstance(named("trtllm"), Trtllm)
    with pytest.raises(ValueError, match="unknown backend 'trtlm': it is one of trtllm, flash_mla"):
        named("trtlm")


def test_lengths_are_padded_and_their_views_are_not() -> None:
    at = world("trtllm")
    at.prepare()
    assert at.metadata.kv_lens_cuda.tolist() == [8, 8, 8, 0, 0]
    assert at.metadata.kv_lens.tolist() == [8, 8, 8, 0, 0]
    assert at.metadata._seq_lens_cuda.tolist() == [2, 2, 2, 0, 0]
    assert at.metadata.kv_lens_cuda_runtime.tolist() == [8, 8, 8]
    assert at.metadata._seq_lens_cuda_runtime.tolist() == [2, 2, 2]
    assert at.metadata.num_contexts == 1
    with at.fsm.draft_forward(Batch(REQUESTS[:1], (5,), (4,))):
        assert at.metadata.kv_lens_cuda.tolist() == [5, 0, 0, 0, 0]
        assert at.metadata.kv_lens_cuda_runtime.tolist() == [5]
        assert at.metadata.num_contexts == 0


@pytest.mark.parametrize("order", RowOrder)
def test_row_index_is_the_managers(order: RowOrder) -> None:
    """Whoever's rows move: the batch's own, or the index into the manager's."""
    at = world("trtllm", order=order)
    at.prepare()
    rows = at.fsm.value("row_index").tolist()
    expected = [0, 1, 2] if order is RowOrder.BATCH else [at.target.row_of[each] for each in REQUESTS]
    assert rows == [*expected, -1, -1]


def test_pointers_follow_the_manager() -> None:
    at = world("trtllm")
    at.prepare()
    with at.fsm.draft_forward():
        assert at.metadata.kv_cache_manager is at.draft
        assert at.metadata.host_kv_cache_block_offsets is at.draft.host_block_offsets
        assert at.metadata.host_kv_cache_pool_pointers == (0x2000,)
        assert at.metadata.tokens_per_block == 2
        at.draft.pool_pointers = (0x7000,)
        at.draft.generation += 1
        at.fsm.draft_step()
        assert at.metadata.host_kv_cache_pool_pointers == (0x7000,)
    assert at.metadata.kv_cache_manager is at.target
    assert at.metadata.tokens_per_block == 4


def test_offloaded_block_is_no_place() -> None:
    """An entry in the secondary pool (bit 31) takes the sentinel rather than decode to somebody else's page."""
    at = world("trtllm", order=RowOrder.SLOT)
    row = at.target.row_of[REQUESTS[0]]
    at.target.host_block_offsets[:, row, :, 1] |= -(2**31)
    at.target.blocks_version += 1
    at.prepare(BATCH)
    assert (at.metadata.kv_cache_block_offsets[0, 0, :, 1] == 0).all()
    assert (at.metadata.kv_cache_block_offsets[0, 0, :, 2] != 0).all()


def test_base_is_a_copy_in_batch_order() -> None:
    at = world("trtllm")
    at.prepare()
    base = at.fsm.value("base_block_offsets")
    assert torch.equal(base, at.target.host_block_offsets)
    assert base is not at.target.host_block_offsets


def test_every_buffer_that_indexes_says_where() -> None:
    """A table without an address space could be read in the wrong unit without a word."""
    plain = {"kv_lens_cuda", "_seq_lens_cuda"}
    buffers = [each for each in Trtllm().resources if isinstance(each, Buffer)]
    assert {each.name for each in buffers if each.space is None} == plain
    assert {each.of for each in Trtllm().resources if isinstance(each, Alias)} == plain
    assert {domain for each in buffers for domain in each.domains} == set(Domain)
