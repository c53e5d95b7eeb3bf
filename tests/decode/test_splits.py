"""The split-KV schedule covers every block once, and joining its pieces is attention over the whole."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specfsm.decode.splits import Splits, plan_splits

PAGE = 4
lengths = st.lists(st.integers(1, 60), min_size=1, max_size=6)


def pieces(lens: list[int]) -> list[tuple[int, int, int]]:
    """(request, first block, block after the last) of each piece that holds a block."""
    tiles, num_splits = plan_splits(torch.tensor(lens), PAGE)
    splits = Splits.read(tiles, num_splits, -(-max(lens) // PAGE))
    listed = zip(splits.request.tolist(), splits.begin.tolist(), splits.end.tolist(), strict=True)
    return [(request, begin, end) for request, begin, end in listed if begin < end]


@given(lengths)
def test_every_block_is_covered_once(lens: list[int]) -> None:
    """No block of any request is left out, attended to twice, or invented."""
    covered = Counter((request, block) for request, *span in pieces(lens) for block in range(*span))
    assert covered == Counter((request, block) for request, n in enumerate(lens) for block in range(-(-n // PAGE)))


@given(lengths)
def test_no_piece_is_wider_than_said(lens: list[int]) -> None:
    """Attention gathers `width` blocks of a piece: no piece has more."""
    splits = Splits.read(*plan_splits(torch.tensor(lens), PAGE), -(-max(lens) // PAGE))
    assert int((splits.end - splits.begin).max()) <= splits.width


def test_long_requests_are_split() -> None:
    """Otherwise nothing here would join anything."""
    assert max(Counter(request for request, *_ in pieces([40, 3])).values()) > 1


@pytest.mark.parametrize("lens", [[1], [4, 5], [60, 1, 17, 4]])
def test_shapes_and_columns(lens: list[int]) -> None:
    """int32, eight columns a worker as FlashMLA has them, and the running number of pieces."""
    tiles, num_splits = plan_splits(torch.tensor(lens), PAGE)
    assert (tiles.dtype, num_splits.dtype, tiles.shape[1]) == (torch.int32, torch.int32, 8)
    assert (num_splits.shape, int(num_splits[0])) == ((len(lens) + 1,), 0)
    assert not tiles[:, 4:].any()
    made = Counter(tiles[:, 0].tolist())
    assert num_splits.diff().tolist() == [made[request] for request in range(len(lens))]


@given(lengths, st.integers(0, 2**16))
def test_join_is_attention_over_the_whole(lens: list[int], seed: int) -> None:
    """Pieces weighted by their log-sum-exps give the softmax over all of a request's scores."""
    generator = torch.Generator().manual_seed(seed)
    splits = Splits.read(*plan_splits(torch.tensor(lens), PAGE), -(-max(lens) // PAGE))
    scores = [torch.randn(n, generator=generator) * 5 for n in lens]
    values = [torch.randn(n, 3, generator=generator) for n in lens]
    outputs, lses = [], []
    for request, begin, end in zip(splits.request.tolist(), splits.begin.tolist(), splits.end.tolist(), strict=True):
        part = slice(begin * PAGE, end * PAGE)
        lses.append(scores[request][part].logsumexp(0))
        outputs.append(scores[request][part].softmax(0) @ values[request][part])
    joined = splits.join(torch.stack(outputs)[:, None, None], torch.stack(lses)[:, None, None], len(lens))
    whole = torch.stack([score.softmax(0) @ value for score, value in zip(scores, values, strict=True)])
    torch.testing.assert_close(joined[:, 0, 0], whole, atol=1e-5, rtol=1e-5)


def test_join_without_any_visible_key_is_zero() -> None:
    """A padded query sees nothing in any piece: it gets zeros, not NaN."""
    splits = Splits.read(*plan_splits(torch.tensor([40]), PAGE), 10)
    count = splits.request.shape[0]
    lse = torch.full((count, 1, 1), float("-inf"))
    assert splits.join(torch.ones(count, 1, 1, 3), lse, 1).tolist() == [[[[0.0] * 3]]]
