"""Prefixes: a page is found for as long as its slot holds it, is shared, and is copied before anybody writes to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attrs import evolve

from specfsm.decode.cache import PagedKVCache
from specfsm.decode.loop import DecodeLoop
from specfsm.decode.prefix import Prefixes
from specfsm.domain import NOBODY, SHARED, RowOrder
from tests.decode.conftest import draft, places, prompt, settings, target
from tests.decode.test_cache import GEOMETRY

TOKENS = list(range(100, 111))
"""Two whole pages of four, and three tokens."""


def cache(order: RowOrder = RowOrder.BATCH) -> PagedKVCache:
    pages = PagedKVCache(evolve(GEOMETRY, row_order=order), max_requests=3, host_blocks=4)
    pages.add(1)
    pages.reserve(1, 12)
    for number, slot in enumerate(places(pages, 1)):
        pages.pool[slot] = number + 1
    pages.publish(1, TOKENS)
    pages.add(2)
    return pages


def held(pages: PagedKVCache, request: int) -> list[float]:
    return [float(pages.pool[slot].mean()) for slot in places(pages, request)]


def test_first_slot_of_a_prefix_is_kept_until_it_is_forgotten() -> None:
    prefixes = Prefixes()
    prefixes.publish((1, 2), 5)
    prefixes.publish([1, 2], 6)
    prefixes.publish((1, 2, 3, 4), 5)
    assert list(prefixes.find(iter([(1, 2), (1, 2, 3, 4)]))) == [5]
    prefixes.forget(5)
    prefixes.forget(5)
    assert list(prefixes.find(iter([(1, 2)]))) == []


@pytest.mark.parametrize("order", RowOrder)
@pytest.mark.parametrize(
    ("tokens", "most", "ahead", "rows"),
    [
        (TOKENS, 99, 0, 8),
        (TOKENS, 7, 0, 4),  # whole pages only
        (TOKENS[:8], 99, 0, 8),
        ([*TOKENS[:7], 0], 99, 0, 4),  # the first other token ends it
        (TOKENS, 99, 1, 0),  # what depends on the next token too was not published
        ([0, *TOKENS], 99, 0, 0),
    ],
)
def test_whole_pages_of_the_same_tokens_are_shared(
    order: RowOrder, tokens: list[int], most: int, ahead: int, rows: int
) -> None:
    pages = cache(order)
    free, version = pages.free_blocks, pages.blocks_version
    assert pages.adopt(2, tokens, most, ahead=ahead) == rows
    assert places(pages, 2) == places(pages, 1)[: rows // 4]
    assert (pages.free_blocks, pages.blocks_version > version) == (free, rows > 0)


def test_freed_pages_are_found_until_their_slots_are_taken() -> None:
    pages = cache()
    slots = places(pages, 1)
    pages.free(1)
    assert pages.adopt(2, TOKENS, 99) == 8
    assert (places(pages, 2), held(pages, 2)) == (slots[:2], [1.0, 2.0])
    pages.free(2)
    pages.add(3)
    pages.reserve(3, 16)  # takes four of the seven
    pages.add(4)
    pages.reserve(4, 12)
    pages.free(4)
    pages.add(5)
    assert pages.adopt(5, TOKENS, 99) == 0


def test_shared_page_is_freed_by_its_last_holder() -> None:
    pages = cache()
    free = pages.free_blocks
    pages.adopt(2, TOKENS, 99)
    pages.free(1)
    assert (pages.free_blocks, held(pages, 2)) == (free + 1, [1.0, 2.0])
    pages.free(2)
    assert pages.free_blocks == 7


def test_shared_page_is_copied_before_it_is_written() -> None:
    """From the page on in which the first row is written; others stay shared; who is alone copies nothing."""
    pages = cache()
    pages.adopt(2, TOKENS, 99)
    pages.detach(2, 5)
    first, second = places(pages, 2)
    assert (first, second != places(pages, 1)[1]) == (places(pages, 1)[0], True)
    pages.pool[second] = 9
    assert (held(pages, 1), held(pages, 2)) == ([1.0, 2.0, 3.0], [1.0, 9.0])
    version = pages.blocks_version
    pages.detach(1, 4)
    pages.detach(2, 4)
    assert pages.blocks_version == version


GIVES_UP: dict[str, Callable[[PagedKVCache, int], object]] = {
    "free": lambda pages, request: pages.free(request),
    "discard": lambda pages, request: pages.discard(request),
    "write": lambda pages, request: pages.detach(request, 0),
    "offload": lambda pages, request: [pages.offload(request, index) for index in range(2)],
}


@pytest.mark.parametrize("order", RowOrder)
@pytest.mark.parametrize("leaves", [1, 2])
@pytest.mark.parametrize("how", GIVES_UP)
def test_shared_page_is_told_as_such_until_one_request_has_it(how: str, leaves: int, order: RowOrder) -> None:
    pages = cache(order)
    shared, last = places(pages, 1)[:2], places(pages, 1)[2]
    pages.adopt(2, TOKENS, 99)
    owners = pages.page_owners("kv")
    assert (owners[shared].tolist(), int(owners[last])) == ([SHARED] * 2, 1)
    GIVES_UP[how](pages, leaves)
    assert owners[shared].tolist() == [3 - leaves] * 2
    free = [slot for slot in range(len(owners)) if owners[slot] == NOBODY]
    assert len(free) == pages.free_blocks


@pytest.mark.parametrize("kind", ["early-exit", "head"])
def test_request_that_begins_again_shares_no_page_that_it_writes(kind: str) -> None:
    """Its draft's rows are lost, so that one or both of its caches are filled from the first row again."""
    loop = DecodeLoop(target(), draft(kind), settings(prefix_cache=True), check="contents")
    tokens = prompt(70, 17)
    first = loop.submit(tokens, 12)
    loop.step()
    second = loop.submit(tokens, 12)
    loop.step()
    assert loop.caches[-1].block_ids(first)[0] == loop.caches[-1].block_ids(second)[0], "they share"
    written = loop.caches if kind == "head" else loop.caches[-1:]  # a head needs the target's states again
    loop.content.cut(second, 0)
    for _ in range(2):
        loop.step()
    for cache in written:
        assert cache.block_ids(first)[0] != cache.block_ids(second)[0]
    assert loop.run().keys() <= {first, second}


@pytest.mark.parametrize("mover", [1, 2])
def test_shared_page_that_is_offloaded_stays_with_the_others(mover: int) -> None:
    pages = cache()
    pages.adopt(2, TOKENS, 99)
    other = 3 - mover
    before = places(pages, other)
    pages.offload(mover, 0)
    assert (places(pages, mover)[0], places(pages, other)) == (-1, before)
    assert not {*pages.block_ids(1)[:1]} & {*pages.block_ids(2)[:1]}
    pages.load_back(mover)
    assert (held(pages, mover)[0], held(pages, other)[0]) == (1.0, 1.0)
    assert places(pages, mover)[0] != before[0]
    pages.free(1)
    pages.free(2)
    assert (pages.free_blocks, pages.free_host_blocks) == (7, 4)
    assert torch.isfinite(pages.pool).all()
