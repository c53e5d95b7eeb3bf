"""DSA's pass: its bytes lie where the mappings say, its indexer picks what it must, and attention reads only that."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from specfsm.decode.dsa import index_keys, index_queries, quantise, schedule
from specfsm.decode.loop import DecodeLoop
from specfsm.decode.splits import WORKERS
from specfsm.domain import Batch, Domain, RowOrder
from tests.decode.conftest import draft, exchange, places, prompt, reference, settings, target
from tests.decode.test_attention import SCALE, SHAPES, World, world

TOP_K = 4  # of the fixture `narrow`


# The indexer.


@pytest.mark.parametrize(("heads", "groups", "dim"), [*SHAPES, (9, 3, 64), (2, 1, 192)])
def test_score_is_the_mean_logit_of_the_first_groups(heads: int, groups: int, dim: int) -> None:
    """As many KV heads as fit 128 elements, each with the mean of its own group's queries; a wider head is cut."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(5, count, dim, generator=generator) for count in (heads, groups))
    rows, queries = index_keys(key), index_queries(query, groups)
    assert rows.shape == queries.shape == (5, 128)
    fit = max(1, 128 // dim)
    grouped = query.view(5, groups, heads // groups, dim).mean(2)[:, :fit, :128]
    expected = torch.einsum("tgd,ngd->tn", grouped, key[:, :fit, :128])
    torch.testing.assert_close(queries @ rows.T, expected, atol=1e-4, rtol=1e-4)


def test_quantised_keys_are_within_half_a_step() -> None:
    """FP8 with three bits of mantissa, scaled by the row's largest element; a row of zeros stays zeros."""
    keys = torch.randn(7, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 7)[:, None]
    keys[3] = 0
    data, scales = quantise(keys)
    assert (data.dtype, tuple(data.shape), scales.dtype, tuple(scales.shape)) == (
        torch.uint8,
        (7, 128),
        torch.uint8,
        (7, 4),
    )
    back = data.view(torch.float8_e4m3fn).float() * scales.view(torch.float32)
    largest = keys.abs().amax(1, keepdim=True)
    assert ((back - keys).abs() <= keys.abs() / 16 + largest * 2**-18).all()
    assert not back[3].any()


@pytest.mark.parametrize("page", [1, 4, 64])
def test_schedule_scores_every_block_once(page: int) -> None:
    lens = torch.tensor([1, 3, 64, 65, 130])
    plan = schedule(lens, page)
    assert (plan.dtype, tuple(plan.shape)) == (torch.int32, (len(lens) * WORKERS + 1, 2))
    assert plan[-1].tolist() == [len(lens), WORKERS]
    for row, length in enumerate(lens.tolist()):
        pieces = plan[row * WORKERS : (row + 1) * WORKERS].tolist()
        assert [block for begin, end in pieces for block in range(begin, end)] == list(range(-(-length // page)))


# The pool.


def test_bytes_of_a_page_are_data_rows_then_scales() -> None:
    """Read back with nothing but the formula: slot, page, 128 bytes of data a token, then 4 of scale."""
    made = world("dsa", order=RowOrder.SLOT)
    made.step((1, 9), (2, 6))
    made.step((1, 2), (2, 1))
    cache, page = made.cache, made.cache.geometry.tokens_per_block
    for request, history in made.history.items():
        for layer in range(2):
            data, scales = quantise(index_keys(history[:, layer, 0]))
            for position in range(len(history)):
                raw = cache.extra["indexer"][layer, places(cache, request)[position // page]].flatten()
                at, scale_at = position % page * 128, page * 128 + position % page * 4
                assert torch.equal(raw[at : at + 128], data[position])
                assert torch.equal(raw[scale_at : scale_at + 4], scales[position])


def test_indexer_keys_go_where_the_page_goes() -> None:
    """To the host, and back to another slot."""
    made = world("dsa")
    made.step((1, 9), (2, 6))
    before = made.cache.extra["indexer"][:, places(made.cache, 1)].clone()
    exchange(made.cache, 1, 2)
    assert torch.equal(made.cache.extra["indexer"][:, places(made.cache, 1)], before)
    assert made.cache.pool_pointers == (made.cache.pool.data_ptr(), made.cache.extra["indexer"].data_ptr())


# What is attended to.


def expected(made: World, request: int, layer: int, query: torch.Tensor, position: int) -> torch.Tensor:
    """Attention of one query [H, D] to the best of the keys up to its position, straight from the history."""
    keys, values = made.history[request][: position + 1, layer].unbind(1)
    data, scales = quantise(index_keys(keys))
    rows = data.view(torch.float8_e4m3fn).float() * scales.view(torch.float32)
    scores = rows @ index_queries(query[None], keys.shape[1])[0]
    best = scores.topk(min(TOP_K, len(scores))).indices
    heads = query.shape[0] // keys.shape[1]
    key, value = (each[best].repeat_interleave(heads, dim=1) for each in (keys, values))
    weights = (torch.einsum("hd,nhd->hn", query, key) * SCALE).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, value)


def check(made: World, *rows: tuple[int, int]) -> None:
    batch = made.prepare(rows)
    made.generator.manual_seed(99)
    layers, (heads, groups, dim) = made.cache.geometry.num_layers, made.shape
    torch.randn(batch.num_tokens, layers, 2, groups, dim, generator=made.generator)
    query = torch.randn(batch.num_tokens, layers, heads, dim, generator=made.generator)
    made.generator.manual_seed(99)
    for layer, (found, dense) in enumerate(made.attend(batch)):
        token = 0
        for request, length, new in zip(batch.request_ids, batch.kv_lens, batch.tokens, strict=True):
            for position in range(length - new, length):
                want = expected(made, request, layer, query[token, layer], position)
                torch.testing.assert_close(found[token], want, atol=1e-4, rtol=1e-4)
                token += 1
        assert max(batch.kv_lens) <= TOP_K or not torch.allclose(found, dense, atol=1e-3)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", RowOrder)
def test_attention_reads_the_best_tokens_and_no_others(order: RowOrder, shape: tuple[int, int, int]) -> None:
    """Contexts, several queries a request, one query; also after pages moved."""
    made = world("dsa", shape, order)
    check(made, (1, 9), (2, 3))
    check(made, (1, 3), (2, 5), (3, 6))
    check(made, (2, 1), (3, 1), (1, 1))
    exchange(made.cache, 1, 2)
    check(made, (1, 1), (2, 2))


def test_cached_context_is_refused() -> None:
    """Its mappings would have to hold the cached tokens too."""
    made = world("dsa")
    made.step((1, 5))
    made.cache.reserve(1, 8)
    made.loop.fsm.target_prepare(Batch([1], [8], [3], num_contexts=1))
    forward_pass = made.loop.forward(Batch([1], [8], [3], num_contexts=1), Domain.TARGET)
    new = torch.zeros(3, 2, 16)
    with pytest.raises(ValueError, match="a context of which a part is cached is not supported"):
        forward_pass.attend(0, torch.zeros(3, 4, 16), new, new, SCALE)


# Schedules.


@pytest.mark.parametrize(
    ("plan", "tokens"), [("scheduler_metadata_buffer", 1), ("scheduler_metadata_buffer_expanded", 2)]
)
def test_stale_schedule_leaves_the_newest_block_unread(plan: str, tokens: int) -> None:
    """Made by the first layer, published, dropped when lengths move; kept, it costs what it does not cover."""
    made = world("dsa")
    made.step((1, 4), (2, 5))
    made.step((1, tokens), (2, tokens))
    kept = getattr(made.loop.metadata, plan)
    assert kept is made.loop.fsm.value(plan)
    made.step((1, 1 if tokens == 2 else 2), (2, 3))
    batch = made.prepare(((1, tokens), (2, tokens)))
    assert getattr(made.loop.metadata, plan) is None
    setattr(made.loop.metadata, plan, kept)
    assert not all(torch.allclose(*pair, atol=1e-3) for pair in made.attend(batch))


# The whole loop.


def test_with_all_tokens_picked_it_is_dense() -> None:
    """Top-k at the longest context: the tokens are transformers' own. (Beyond it: tests/decode/test_loop.py.)"""
    loop = DecodeLoop(target(), draft("early-exit"), settings("dsa", max_tokens=64))
    request = loop.submit(prompt(40, 44), 19)
    assert loop.forward_pass.top_k >= 63  # type: ignore[attr-defined]  # DSAPass
    assert loop.run() == {request: reference(prompt(40, 44), 19)}


def test_every_row_may_be_prefilled_at_once() -> None:
    """The mappings have room for the tokens of all, not of the longest alone."""
    loop = DecodeLoop(target(), draft("early-exit"), settings("dsa", max_tokens=40))
    prompts = [prompt(seed, 30) for seed in (40, 41, 42)]
    outputs = {loop.submit(each, 6): reference(each, 6) for each in prompts}
    assert loop.run() == outputs


@pytest.mark.usefixtures("narrow")
def test_narrow_attention_is_not_dense() -> None:
    """Else the tests above would show nothing."""
    loop = DecodeLoop(target(), None, settings("dsa", max_tokens=64))
    loop.submit(prompt(40, 44), 19)
    assert loop.run() != {1: reference(prompt(40, 44), 19)}


def test_softmax_of_the_expected_is_the_passes() -> None:
    """The reference above agrees with torch's own attention when nothing is left out."""
    made = world("dsa")
    made.step((1, 3))
    query = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
    keys, values = made.history[1][:, 0].unbind(1)
    dense = functional.scaled_dot_product_attention(
        query[:, None], keys.transpose(0, 1), values.transpose(0, 1), scale=SCALE, enable_gqa=True
    )
    torch.testing.assert_close(expected(made, 1, 0, query, 2), dense[:, 0], atol=1e-5, rtol=1e-5)
