"""Plain paged attention under TensorRT-LLM's attribute names. Contents are held in tests/test_switch.py."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from specfsm.backends import named, trtllm
from specfsm.backends.backend import Sizes
from specfsm.backends.resource import Alias, Buffer
from specfsm.backends.trtllm import Trtllm
from specfsm.decode.cache import PagedKVCache, PoolExhausted
from specfsm.domain import Batch, Domain, Geometry, RowOrder, TrackingKVManager
from specfsm.orchestrator import Orchestrator
from tests.toys import BATCH, REQUESTS, halves, world

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


# Only the rows that changed are staged.

TARGET, DRAFT = Domain
GEOMETRY = Geometry(
    tokens_per_block=4, blocks_in_primary_pool=24, max_blocks_per_seq=4, num_layers=2, kv_factor=2, index_scale=4
)


class Staging:
    """Two tracking caches, one of each row order, and an orchestrator whose events may be made to fail."""

    def __init__(self) -> None:
        self.caches = [
            PagedKVCache(evolve(GEOMETRY, row_order=order), max_requests=5, host_blocks=4) for order in RowOrder
        ]
        backend, metadata = named("trtllm"), Metadata()
        backend.allocate(metadata, *self.caches, Sizes(max_sequences=5, max_tokens=20), "cpu")
        self.fails = False
        self.fsm = Orchestrator(
            metadata, backend=backend, target=self.caches[0], draft=self.caches[1], check="tensors", observer=self
        )
        self.requests: list[int] = []
        self.next = 100

    def on_enter_target_prepare(self) -> None:
        """After the refresh: what raises here undoes it."""
        if self.fails:
            raise Injected

    on_enter_draft_forward = on_enter_target_prepare

    # What may happen between two steps. Each is a no-op where it does not apply.

    def add(self) -> None:
        if len(self.requests) < 5:
            self.requests.append(self.next)
            for cache in self.caches:
                cache.add(self.next)
                cache.reserve(self.next, 1)
            self.next += 1

    def grow(self) -> None:
        self._each(lambda cache, request: cache.reserve(request, cache.capacity(request) + 1))

    def free(self) -> None:
        if len(self.requests) > 1:
            self._each(lambda cache, request: cache.free(request))
            self.requests.pop(0)

    def take_the_row(self) -> None:
        """The same request leaves and comes back, to whatever row is free."""
        self._each(lambda cache, request: (cache.free(request), cache.add(request), cache.reserve(request, 5)))

    def offload(self) -> None:
        self._each(lambda cache, request: cache.offload(request, 0))

    def load_back(self) -> None:
        self._each(lambda cache, request: cache.load_back(request))

    def reorder(self) -> None:
        self.requests.append(self.requests.pop(0))

    def arranged_by_another(self) -> None:
        for cache in self.caches:
            cache.arrange(self.requests[::-1])

    def report(self) -> None:
        """An edit that no version tells of, but the engine does; then it is taken back."""
        kept = []
        for cache in self.caches:
            cache.arrange(self.requests)
            kept.append(cache.host_block_offsets.clone())
            cache.host_block_offsets[0, 0, :, 0] = 4
        self.fsm.moved("blocks")
        self.step()
        for cache, table in zip(self.caches, kept, strict=True):
            cache.host_block_offsets.copy_(table)
        self.fsm.moved("blocks")

    def fail(self) -> None:
        """A step that is undone after it was staged."""
        self.fails = True
        with pytest.raises(Injected):
            self.fsm.target_prepare(self.batch())
        self.fails = False

    def fail_in_the_draft(self) -> None:
        self.fsm.target_prepare(self.batch())
        self.fails = True
        with pytest.raises(Injected):
            self.fsm.draft_forward()
        self.fails = False

    def step(self) -> None:
        """After each refresh the device has the manager's table as it is, and the batch's tables follow from it."""
        self.fsm.target_prepare(self.batch())
        self.compare(TARGET)
        with self.fsm.draft_forward():
            self.compare(DRAFT)

    def batch(self) -> Batch:
        return Batch(self.requests, [1] * len(self.requests), [1] * len(self.requests))

    def compare(self, domain: Domain) -> None:
        cache = self.caches[domain]
        cache.arrange(self.requests)
        assert torch.equal(self.fsm.value("base_block_offsets", domain), cache.host_block_offsets)

    def _each(self, act: Any) -> None:
        for cache in self.caches:
            with suppress(PoolExhausted, ValueError):  # full, or offloaded already
                act(cache, self.requests[0])


class Metadata:
    """What an engine would hold."""


class Injected(RuntimeError):
    """An observer that does not want to."""


MOVES = (
    "add", "grow", "free", "take_the_row", "offload", "load_back", "reorder", "arranged_by_another", "report", "fail",
    "fail_in_the_draft", "step",
)  # fmt: skip


@given(st.lists(st.sampled_from(MOVES), min_size=4, max_size=40))
def test_staging_the_changed_rows_is_staging_all(moves: list[str]) -> None:
    """Whatever happens between two steps, with rows that follow the batch and with rows that stay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trtllm, "PATCHED", 0)
        at = Staging()
        at.add()
        for move in moves:
            getattr(at, move)()
        at.step()


def test_table_of_another_generation_is_staged_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager has new storage, and its log of the rows says nothing of that."""
    monkeypatch.setattr(trtllm, "PATCHED", 0)
    at = Staging()
    at.add()
    for _ in range(2):  # either side of the ring
        at.step()
        at.grow()
    for cache in at.caches:
        cache.host_block_offsets = cache.host_block_offsets.clone()
        cache.host_block_offsets[0, 4] = 8  # a row that no request has
        cache.generation += 1
    at.fsm.target_prepare(at.batch())
    assert (at.fsm.value("base_block_offsets", TARGET)[0, 4] == 8).all()


@pytest.mark.parametrize(("size", "patched"), [(0, True), (1 << 30, False)])
def test_a_grown_row_alone_is_staged(size: int, patched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others keep what the buffer held: a mark in them survives. A table that is small is copied whole."""
    monkeypatch.setattr(trtllm, "PATCHED", size)
    at = Staging()
    for _ in range(3):
        at.add()
    for _ in range(2):  # either side of the ring
        at.step()
        at.grow()
    for host in halves(at.fsm, "base_block_offsets", DRAFT):
        host[0, 4] = 77  # a row that nobody has
    at.fsm.target_prepare(at.batch())
    with at.fsm.draft_forward():
        base = at.fsm.value("base_block_offsets", DRAFT)
    assert bool((base[0, 4] == 77).all()) is patched
    row = at.caches[DRAFT].arrange(at.requests[:1])[0]
    assert torch.equal(base[0, row], at.caches[DRAFT].host_block_offsets[0, row])


def test_tracking_is_asked_of_who_can_tell() -> None:
    assert isinstance(Staging().caches[0], TrackingKVManager)
    assert not isinstance(world("trtllm").target, TrackingKVManager)
