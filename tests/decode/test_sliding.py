"""DeepSeek-V4's pass: the window, the first group, and compressed entries that no rejected token gets into."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specfsm.decode.loop import DecodeLoop
from specfsm.decode.sliding import RATIO, SlidingKVCache
from specfsm.domain import Domain, Geometry, RowOrder, SlidingKVManager
from tests.decode.conftest import draft, exchange, places, prompt, settings, target
from tests.decode.test_attention import SCALE, SHAPES, World, world

WINDOW = 4  # of the fixture `narrow`


def expected(made: World, request: int, layer: int, query: torch.Tensor, position: int) -> torch.Tensor:
    """One query [H, D] over its window, the first group, and the means of the groups between, from the history."""
    history = made.history[request][: position + 1, layer]
    oldest = position - WINDOW + 1
    rows = [history[each] for each in range(max(0, oldest), position + 1)]
    rows += [history[each] for each in range(min(RATIO, max(0, oldest)))]
    for group in range(1, max(0, oldest) // RATIO):
        rows.append(history[group * RATIO : (group + 1) * RATIO].mean(0))
    keys, values = torch.stack(rows).unbind(1)
    heads = query.shape[0] // keys.shape[1]
    key, value = (each.repeat_interleave(heads, dim=1) for each in (keys, values))
    weights = (torch.einsum("hd,nhd->hn", query, key) * SCALE).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, value)


def check(made: World, *rows: tuple[int, int]) -> None:
    batch = made.prepare(rows)
    layers, (heads, groups, dim) = made.cache.geometry.num_layers, made.shape
    made.generator.manual_seed(sum(batch.kv_lens))
    torch.randn(batch.num_tokens, layers, 2, groups, dim, generator=made.generator)
    query = torch.randn(batch.num_tokens, layers, heads, dim, generator=made.generator)
    made.generator.manual_seed(sum(batch.kv_lens))
    for layer, (found, dense) in enumerate(made.attend(batch)):
        token = 0
        for request, length, new in zip(batch.request_ids, batch.kv_lens, batch.tokens, strict=True):
            for position in range(length - new, length):
                want = expected(made, request, layer, query[token, layer], position)
                torch.testing.assert_close(found[token], want, atol=1e-4, rtol=1e-4)
                token += 1
        assert not torch.allclose(found, dense, atol=1e-3)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", RowOrder)
def test_window_first_group_and_means_of_the_rest(order: RowOrder, shape: tuple[int, int, int]) -> None:
    """Contexts, several tokens, single ones, groups that begin in one pass and end in another; pages move too."""
    made = world("deepseek_v4", shape, order)
    check(made, (1, 15), (2, 9))
    check(made, (1, 3), (2, 5), (3, 10))
    for _ in range(5):
        check(made, (2, 1), (3, 1), (1, 1))
    exchange(made.cache, 1, 2)
    check(made, (1, 1), (2, 2))


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("pieces", [[20], [1] * 20, [7, 1, 5, 3, 4], [4] * 5])
def test_entries_do_not_depend_on_how_tokens_were_batched(pieces: list[int]) -> None:
    """Each is the mean of its group's keys and of its values."""
    made = world("deepseek_v4")
    for tokens in pieces:
        made.attend(made.prepare(((1, tokens),)))
    for group in range(20 // RATIO):
        own = made.history[1][group * RATIO : (group + 1) * RATIO].mean(0)  # [layers, 2, G, D]
        page = made.cache.geometry.tokens_per_block // RATIO
        assert made.cache.entries is not None  # type: ignore[attr-defined]  # SlidingKVCache
        entry = made.cache.entries[:, places(made.cache, 1)[group // page], group % page]  # type: ignore[attr-defined]
        torch.testing.assert_close(entry, own)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("options", [{}, {"graphs": "whole"}, {"overlap": True}], ids=["eager", "graph", "overlap"])
def test_rejected_tokens_leave_no_entry_behind(options: dict[str, Any]) -> None:
    """After steps with rejections, the entries of all known groups are those of the target alone."""
    kept = []
    for kind in (None, "other"):
        loop = DecodeLoop(target(), draft(kind) if kind else None, settings("deepseek_v4", **(options if kind else {})))
        request = loop.submit(prompt(28, 6), 30)
        emissions = []
        while not loop.running or loop.running[0].target_rows < 24:
            emissions += loop.step()
        assert kind is None or any(each.accepted < each.proposed for each in emissions)
        if loop.pending:
            loop._drain()
        cache: Any = loop.cache
        entries = cache.entries[:, places(cache, request)]  # [layers, blocks, entries a block, 2, G, D]
        kept.append(entries.flatten(1, 2)[:, : 24 // RATIO])
    torch.testing.assert_close(kept[0], kept[1], atol=1e-4, rtol=1e-4)


# The draft.


def test_draft_has_a_window_and_nothing_else() -> None:
    """Ratio 1 alone: no entries in its cache, no pointer to any on the metadata while it is served."""
    loop = DecodeLoop(target(), draft("early-exit"), settings("deepseek_v4"))
    loop.submit(prompt(30, 9), 6)
    loop.run()
    caches: list[Any] = list(loop.caches)
    assert [each.entries is None for each in caches] == [False, True]
    assert loop.fsm.value("sparse_mla_base_ptrs", Domain.TARGET).keys() == {1, RATIO}
    assert loop.fsm.value("sparse_mla_base_ptrs", Domain.DRAFT).keys() == {1}


# The cache.


def geometry(**changes: Any) -> Geometry:
    sizes = {"tokens_per_block": 8, "blocks_in_primary_pool": 6, "max_blocks_per_seq": 4, "num_layers": 3}
    return Geometry(**{**sizes, "num_kv_heads": 2, "head_dim": 4, "index_scale": 6, **changes})


def test_cache_is_a_sliding_manager() -> None:
    assert isinstance(SlidingKVCache(geometry(), max_requests=2), SlidingKVManager)


def test_pages_must_hold_whole_groups() -> None:
    with pytest.raises(ValueError, match="pages of 6 tokens do not hold whole groups of 4"):
        SlidingKVCache(geometry(tokens_per_block=6), max_requests=2, compressed=True)
    SlidingKVCache(geometry(tokens_per_block=6), max_requests=2)


@pytest.mark.parametrize("order", RowOrder)
def test_base_is_decoded_slots(order: RowOrder) -> None:
    """-1 where nothing is assigned and where a page is on the host; the same buffer every time."""
    cache = SlidingKVCache(
        geometry(row_order=order, index_scale=6 if order is RowOrder.BATCH else 1), max_requests=2, host_blocks=2
    )
    for request, tokens in ((5, 17), (3, 8)):
        cache.add(request)
        cache.reserve(request, tokens)
    cache.offload(5, 1)
    base = cache.compute_sliding_base([3, 5])
    [three, five] = cache.arrange([3, 5])
    assert base[0, three, 0].tolist() == [4, -1, -1, -1]
    assert base[0, five, 0].tolist() == [1, -1, 3, -1]
    assert cache.compute_sliding_base([3, 5]) is base


def test_addresses_are_those_of_the_pools() -> None:
    """A layer's first page, a layer's first entry; anything else is refused, another cache's addresses too."""
    cache = SlidingKVCache(geometry(), max_requests=2, compressed=True)
    other = SlidingKVCache(geometry(), max_requests=2)
    assert cache.entries is not None
    for layer in range(3):
        assert cache.pages_at(cache.window_pointers[layer]).data_ptr() == cache.pool[0, layer].data_ptr()
        assert cache.entries_at(cache.compressed_pointers[layer])[0].data_ptr() == cache.entries[layer].data_ptr()
    assert cache.sparse_pointers == {1: cache.pool.data_ptr(), RATIO: cache.entries.data_ptr()}
    with pytest.raises(ValueError, match="is no address in this cache"):
        cache.pages_at(cache.window_pointers[0] + 4)
    with pytest.raises(ValueError, match="is no address in this cache"):
        other.pages_at(cache.window_pointers[0])
    with pytest.raises(ValueError, match="has no compressed entries"):
        other.entries_at(cache.compressed_pointers[0])


def test_entries_go_where_the_page_goes() -> None:
    """To the host, and back to another slot."""
    made = world("deepseek_v4")
    made.step((1, 9), (2, 6))
    cache: Any = made.cache
    before = cache.entries[:, places(cache, 1)].clone()
    assert before.any()
    exchange(cache, 1, 2)
    assert torch.equal(cache.entries[:, places(cache, 1)], before)
