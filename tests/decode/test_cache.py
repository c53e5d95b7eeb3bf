"""The paged cache against a model that a reader holds in the head: who owns which page, and what is written in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attrs import evolve
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specfsm.decode.cache import PagedKVCache, PoolExhausted
from specfsm.domain import NOBODY, Geometry, KVManager, RowOrder
from tests.decode.conftest import SECONDARY

GEOMETRY = Geometry(
    tokens_per_block=4,
    blocks_in_primary_pool=7,
    max_blocks_per_seq=4,
    num_layers=3,
    kv_factor=2,
    num_kv_heads=2,
    head_dim=5,
    index_scale=6,
)
REQUESTS, HOST = 3, 2


def cache(order: RowOrder = RowOrder.BATCH, **changes: int) -> PagedKVCache:
    """Seven pages, rows for three requests, two pages on the host."""
    geometry = evolve(GEOMETRY, row_order=order, **changes)
    return PagedKVCache(geometry, max_requests=REQUESTS, host_blocks=HOST)


class Books(RuleBasedStateMachine):
    """The simple model: each request's pages as (where, marker), their names, and the batch's order.

    A marker is written into every page when it is taken, so that a page that was moved, shared or lost shows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owned: dict[int, list[tuple[str, float]]] = {}
        self.named: dict[int, tuple[int, ...]] = {}
        self.markers = iter(range(1, 10_000))
        self.requests = iter(range(100, 10_000))

    @initialize(order=st.sampled_from(RowOrder), scaled=st.booleans())
    def build(self, order: RowOrder, scaled: bool) -> None:
        self.cache = cache(order, index_scale=GEOMETRY.pages_per_slot if scaled or order is RowOrder.BATCH else 1)
        self.order: tuple[int, ...] = ()
        self.version = self.cache.blocks_version

    # What may happen.

    @rule()
    def add(self) -> None:
        request = next(self.requests)
        if len(self.owned) == REQUESTS:
            self.refused(lambda: self.cache.add(request), "all 3 rows of the cache are taken")
            return
        self.cache.add(request)
        self.owned[request], self.named[request] = [], ()

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), tokens=st.integers(0, 20))
    def reserve(self, data: st.DataObject, tokens: int) -> None:
        request = self.pick(data)
        pages, wanted = self.owned[request], -(-tokens // GEOMETRY.tokens_per_block)
        more = wanted - len(pages)
        if wanted > GEOMETRY.max_blocks_per_seq:
            self.refused(lambda: self.cache.reserve(request, tokens), "but a sequence holds 16")
        elif more > self.free("pool"):
            self.refused(lambda: self.cache.reserve(request, tokens), f"needs {more} more pages, but")
        else:
            self.moves(more > 0, lambda: self.cache.reserve(request, tokens))
            self.named[request] += self.cache.block_ids(request)[len(pages) :]
            [row] = self.cache.arrange([request])
            for block in range(len(pages), wanted):
                pages.append(("pool", float(next(self.markers))))
                entry = int(self.cache.host_block_offsets[0, row, 0, block])
                self.cache.pool[entry // self.cache.geometry.index_scale] = pages[-1][1]

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = self.pick(data)
        self.moves(True, lambda: self.cache.free(request))
        del self.owned[request], self.named[request]

    @precondition(lambda self: any(self.owned.values()))
    @rule(data=st.data())
    def offload(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([each for each, pages in self.owned.items() if pages]))
        index = data.draw(st.integers(0, len(self.owned[request]) - 1))
        where, marker = self.owned[request][index]
        if where == "host":
            self.refused(lambda: self.cache.offload(request, index), "is offloaded already", ValueError)
        elif not self.free("host"):
            self.refused(lambda: self.cache.offload(request, index), "the host pool of 2 pages is full")
        else:
            self.moves(True, lambda: self.cache.offload(request, index))
            self.owned[request][index] = ("host", marker)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def load_back(self, data: st.DataObject) -> None:
        request = self.pick(data)
        gone = sum(where == "host" for where, _ in self.owned[request])
        if gone > self.free("pool"):
            self.refused(lambda: self.cache.load_back(request), f"has {gone} offloaded pages, but")
            return
        self.moves(gone > 0, lambda: self.cache.load_back(request))
        self.owned[request] = [("pool", marker) for _, marker in self.owned[request]]

    @rule(data=st.data())
    def run_a_batch(self, data: st.DataObject) -> None:
        self.order = tuple(data.draw(st.permutations(sorted(self.owned))))
        self.moves(False, lambda: self.cache.arrange(self.order))

    # Helpers.

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.owned)))

    def free(self, where: str) -> int:
        capacity = GEOMETRY.blocks_in_primary_pool if where == "pool" else HOST
        return capacity - sum(place == where for pages in self.owned.values() for place, _ in pages)

    def moves(self, moved: bool, act: Callable[[], object]) -> None:
        """Do it; the version moves exactly if the assignment does."""
        act()
        assert (self.cache.blocks_version != self.version) == moved
        assert self.cache.blocks_version >= self.version
        self.version = self.cache.blocks_version

    def refused(self, act: Callable[[], object], says: str, error: type[Exception] = PoolExhausted) -> None:
        """It is an error, in one line, that takes nothing: the invariants below look."""
        with pytest.raises(error, match=says) as caught:
            act()
        assert "\n" not in str(caught.value)

    # What always holds.

    @invariant()
    def table_and_pages_agree(self) -> None:
        """Whoever runs all requests as one batch finds each page where its entry says."""
        order = (*(request for request in self.order if request in self.owned), *sorted(self.owned.keys() - self.order))
        self.order = order
        rows = self.cache.arrange(order)
        table = self.cache.host_block_offsets[0]
        slots = [self.decode(table[row], self.owned[request]) for request, row in zip(order, rows, strict=True)]
        taken = [slot for each in slots for slot in each]
        assert len(set(taken)) == len(taken), "a slot has two owners"
        unused = [row for row in range(REQUESTS) if row not in rows]
        assert bool((table[unused] == -1).all()), "rows that nobody has are not -1"
        assert self.cache.free_blocks == self.free("pool")
        owner_of = {slot: request for request, each in zip(order, slots, strict=True) for slot in each}
        owners = [owner_of.get(slot, NOBODY) for slot in range(GEOMETRY.blocks_in_primary_pool)]
        assert self.cache.page_owners("kv").tolist() == owners, "a slot's owner is not who has a page there"

    def decode(self, row: torch.Tensor, pages: list[tuple[str, float]]) -> list[int]:
        """Slot of each page, as a kernel decodes it; those in the host pool count from -1 downwards."""
        live, scale = row[:, : len(pages)], self.cache.geometry.index_scale
        behind = 1 if self.cache.geometry.row_order is RowOrder.BATCH else 0
        assert torch.equal(live[1], live[0] + behind), "the V plane does not follow the K plane"
        assert bool((row[:, len(pages) :] == -1).all()), "entries behind the last page are not -1"
        slots = [entry // scale if entry >= 0 else -1 - (entry - SECONDARY) // scale for entry in live[0].tolist()]
        for slot, (where, marker) in zip(slots, pages, strict=True):
            assert (slot < 0) == (where == "host"), "bit 31 does not tell where the page lies"
            page = self.cache.pool[slot] if slot >= 0 else self.cache.host_pool[-1 - slot]
            assert bool((page == marker).all()), "another page lies there"
        return slots

    @invariant()
    def names_stay(self) -> None:
        """A block id is its page's for as long as it is owned, wherever the page lies, and nobody else's."""
        assert {request: self.cache.block_ids(request) for request in self.owned} == self.named
        named = [block for blocks in self.named.values() for block in blocks]
        assert len(set(named)) == len(named)
        assert all(self.cache.capacity(request) == 4 * len(pages) for request, pages in self.owned.items())


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("order", RowOrder)
def test_it_is_a_manager(order: RowOrder) -> None:
    """It has what `specfsm.KVManager` asks for, and the addresses of its own pool."""
    made = cache(order)
    assert isinstance(made, KVManager)
    assert made.pool_pointers == (made.pool.data_ptr(),)
    assert made.pages().data_ptr() == made.pool.data_ptr()
    assert made.pages().shape == (7 * 3 * 2, 4, 2, 5)


def test_batch_ordered_rows_follow_the_batch() -> None:
    """Row i is the batch's request i, rewritten when the order is another."""
    made = cache()
    for request in (1, 2):
        made.add(request)
        made.reserve(request, 4)
    assert made.arrange((1, 2)) == [0, 1]
    first = made.host_block_offsets.clone()
    assert made.arrange((2, 1)) == [0, 1]
    assert torch.equal(made.host_block_offsets[:, :2], first[:, [1, 0]])


@pytest.mark.parametrize("order", RowOrder)
def test_nothing_is_known_of_a_request_that_was_freed(order: RowOrder) -> None:
    """Neither its row nor its room; and one that comes back under its id has its own pages in the table."""
    made = cache(order)
    for request in (1, 2):
        made.add(request)
        made.reserve(request, 4)
    made.arrange((1, 2))
    made.free(2)
    with pytest.raises(KeyError, match=r"requests \[2\] hold nothing"):
        made.arrange((1, 2))
    with pytest.raises(KeyError):
        made.capacity(2)
    made.add(2)
    assert made.capacity(2) == 0
    made.reserve(2, 8)
    rows = made.arrange((1, 2))
    assert [int((made.host_block_offsets[0, row, 0] >= 0).sum()) for row in rows] == [1, 2]


def test_slot_ordered_rows_stay() -> None:
    """A request keeps its row for life; the batch only looks it up."""
    made = cache(RowOrder.SLOT)
    for request in (1, 2, 3):
        made.add(request)
        made.reserve(request, 4)
    table = made.host_block_offsets.clone()
    rows = made.arrange((1, 2, 3))
    assert made.arrange((3, 1)) == [rows[2], rows[0]]
    assert torch.equal(made.host_block_offsets, table)


@pytest.mark.parametrize("order", RowOrder)
def test_id_and_slot_part_ways(order: RowOrder) -> None:
    """After a page was away its id is what it was, and its slot is not: only the table knows where it lies."""
    made = cache(order, index_scale=6)
    for request in (1, 2):
        made.add(request)
        made.reserve(request, 4)
    [name] = made.block_ids(1)
    made.offload(1, 0)
    [row] = made.arrange((1,))
    assert int(made.host_block_offsets[0, row, 0, 0]) == SECONDARY
    made.load_back(1)
    assert made.block_ids(1) == (name,)
    [row] = made.arrange((1,))
    slot = int(made.host_block_offsets[0, row, 0, 0]) // 6
    assert slot == 3 != name  # request 2 has 2


def test_unknown_and_doubled_requests_are_errors() -> None:
    """Each says which request."""
    made = cache()
    made.add(1)
    with pytest.raises(ValueError, match="request 1 is in the cache already"):
        made.add(1)
    with pytest.raises(KeyError, match=r"requests \[5\] hold nothing"):
        made.arrange((1, 5))


def test_refused_batch_leaves_the_table() -> None:
    """An unknown request is found before a row is written."""
    made = cache()
    made.add(1)
    made.reserve(1, 4)
    made.arrange((1,))
    table = made.host_block_offsets.clone()
    with pytest.raises(KeyError):
        made.arrange((5, 1))
    assert torch.equal(made.host_block_offsets, table)
