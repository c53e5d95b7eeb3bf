"""Verification: how many drafted tokens the target agrees with, and what it says next."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["accept_greedy"]


def accept_greedy(drafted: Sequence[int], logits: torch.Tensor) -> tuple[int, int]:
    """Greedy acceptance: the longest prefix of the draft that the target would have written itself.

    Args:
        drafted: L tokens.
        logits: [1 + L, vocabulary], the target's after the last known token and after each drafted one.

    Returns:
        how many of `drafted` are accepted, and the target's own next token.
    """
    choices: list[int] = logits.argmax(-1).tolist()
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == choices[accepted]:
        accepted += 1
    return accepted, choices[accepted]
