"""Acceptance: greedy case by case, sampled by adding up every outcome."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from specfsm.decode.loop import DecodeLoop
from specfsm.decode.verify import Sampler, accept_greedy, accept_sampled, draw
from tests.decode.conftest import draft, prompt, reference, settings, target

VOCABULARY = 7


def logits(choices: list[int]) -> torch.Tensor:
    """[1, len(choices), vocabulary], each row highest at its choice."""
    return functional.one_hot(torch.tensor([choices]), VOCABULARY).float()


def accepted_and_own(drafted: list[int], choices: list[int]) -> tuple[int, int]:
    counts, own = accept_greedy(torch.tensor([drafted], dtype=torch.long), logits(choices))
    return int(counts), int(own)


@pytest.mark.parametrize(
    ("drafted", "choices", "accepted", "own"),
    [
        ([], [4], 0, 4),  # nothing drafted: plain decoding
        ([3], [3, 5], 1, 5),
        ([3], [2, 5], 0, 2),
        ([1, 2, 3], [1, 2, 3, 4], 3, 4),
        ([1, 2, 3], [1, 6, 3, 4], 1, 6),  # a token that agrees again after a rejected one does not count
        ([1, 2, 3], [0, 2, 3, 4], 0, 0),
    ],
)
def test_longest_agreeing_prefix(drafted: list[int], choices: list[int], accepted: int, own: int) -> None:
    """How many tokens agree before the first that does not, and the target's own token there."""
    assert accepted_and_own(drafted, choices) == (accepted, own)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=5), st.integers(0, 2))
def test_what_is_written_is_the_targets(pairs: list[tuple[int, int]], last: int) -> None:
    """Accepted tokens and the target's own are exactly its choices, and no longer prefix would be."""
    drafted, choices = [pair[0] for pair in pairs], [*(pair[1] for pair in pairs), last]
    accepted, own = accepted_and_own(drafted, choices)
    assert [*drafted[:accepted], own] == choices[: accepted + 1]
    assert accepted == len(drafted) or drafted[accepted] != choices[accepted]


def test_rows_are_judged_each_on_its_own() -> None:
    """A batch gives what its rows give alone."""
    drafted, choices = torch.tensor([[1, 2], [3, 3], [0, 5]]), ([1, 2, 6], [3, 4, 0], [1, 5, 5])
    counts, own = accept_greedy(drafted, torch.cat([logits(each) for each in choices]))
    assert (counts.tolist(), own.tolist()) == ([2, 1, 0], [6, 4, 1])


# Sampling.

GRID = 240
MIDDLES = (torch.arange(GRID) + 0.5) / GRID
"""Evenly spread uniform numbers: their share is a probability, to 1 / GRID."""


@pytest.mark.parametrize("probs", [[0.1, 0.2, 0.3, 0.4], [0.0, 1.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.5]])
def test_draw_follows_the_distribution(probs: list[float]) -> None:
    """Each token as often as its probability says, and never one that has none."""
    tokens = draw(torch.tensor([probs]).expand(GRID, -1), MIDDLES)
    shares = torch.bincount(tokens, minlength=4) / GRID
    torch.testing.assert_close(shares, torch.tensor(probs), atol=2 / GRID, rtol=0)
    assert not shares[torch.tensor(probs) == 0].any()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_draw_at_the_edges(uniform: float) -> None:
    """The lowest and highest uniform numbers give tokens that can be drawn."""
    [token] = draw(torch.tensor([[0.0, 0.3, 0.7, 0.0]]), torch.tensor([uniform])).tolist()
    assert token in (1, 2)


@pytest.mark.parametrize(
    ("target_probs", "draft_probs"),
    [
        ([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]),
        ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]),
        ([0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 0.0, 0.0]),  # nothing in common: every draft is rejected
        ([0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0]),
    ],
)
def test_what_is_emitted_is_distributed_as_the_target(target_probs: list[float], draft_probs: list[float]) -> None:
    """Over every drafted token and an even grid of both uniform numbers, the first emitted token is the target's."""
    p, q = torch.tensor(target_probs), torch.tensor(draft_probs)
    keep, own_draw = (each.flatten() for each in torch.meshgrid(MIDDLES, MIDDLES, indexing="ij"))
    count, emitted = keep.shape[0], torch.zeros(4)
    for token in q.nonzero().flatten().tolist():
        accepted, own = accept_sampled(
            torch.full((count, 1), token),
            q.expand(count, 1, -1),
            torch.stack((p, torch.tensor([1.0, 0, 0, 0]))).expand(count, -1, -1),
            torch.stack((keep, own_draw), dim=1),
        )
        first = torch.where(accepted == 1, token, own)
        emitted += q[token] * torch.bincount(first, minlength=4) / count
        assert bool((own[accepted == 1] == 0).all()), "after an accepted draft the target's next token follows"
    torch.testing.assert_close(emitted, p, atol=4 / GRID, rtol=0)


def test_sampler_is_greedy_at_zero() -> None:
    """No probabilities are kept, and the uniform numbers do not matter."""
    sampler = Sampler()
    tokens, probs = sampler.choose(logits([2, 5])[0], torch.rand(2))
    assert (sampler.greedy, tokens.tolist(), probs) == (True, [2, 5], None)


def test_negative_temperature_is_refused() -> None:
    """In one line that says what 0 means."""
    with pytest.raises(ValueError, match=r"the temperature must be 0 \(greedy\) or more, not -1"):
        Sampler(-1)


def sampled(temperature: float, seed: int) -> tuple[dict[int, list[int]], DecodeLoop]:
    loop = DecodeLoop(target(), draft("self"), settings(), sampler=Sampler(temperature, seed))
    for number in range(2):
        loop.submit(prompt(number, 5), 12)
    return loop.run(), loop


def test_seed_decides_what_is_sampled() -> None:
    """The same seed gives the same text, another one another; a low temperature gives the greedy one."""
    assert sampled(1.0, 3)[0] == sampled(1.0, 3)[0] != sampled(1.0, 4)[0]
    assert sampled(1e-4, 3)[0] == {number + 1: reference(prompt(number, 5), 12) for number in range(2)}


def test_sampled_draft_of_the_target_itself_is_kept() -> None:
    """Where both distributions are one, nothing is rejected."""
    _, loop = sampled(1.0, 5)
    assert loop.forwards == 1 + -(-11 // 4)
