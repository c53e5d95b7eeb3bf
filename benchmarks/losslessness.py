"""Where two runs of the same prompts part, and how close the choice was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen


@frozen
class Difference:
    """The first token in which two runs of a prompt differ; `gap` in logits, None where one run only ended earlier."""

    prompt: int
    token: int
    gap: float | None

    def __str__(self) -> str:
        gap = "one ended" if self.gap is None else f"logit gap {self.gap:.4f}"
        return f"prompt {self.prompt}, token {self.token} ({gap})"


def differences(
    lm: Any, prompts: Sequence[Sequence[int]], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
) -> list[Difference]:
    """The first difference of each prompt.

    Args:
        lm: a model of transformers of its own, in float32: it judges both choices by one pass without a cache.
        prompts: token ids.
        ours, theirs: what either run wrote.
    """
    found = []
    for number, (prompt, one, other) in enumerate(zip(prompts, ours, theirs, strict=True)):
        pairs = enumerate(zip(one, other, strict=False))
        place = next((at for at, pair in pairs if pair[0] != pair[1]), None)
        if place is not None:
            gap = logit_gap(lm, [*prompt, *one[:place]], one[place], other[place])
            found.append(Difference(number, place, gap))
        elif len(one) != len(other):
            found.append(Difference(number, min(len(one), len(other)), None))
    return found


def logit_gap(lm: Any, tokens: Sequence[int], one: int, other: int) -> float:
    """How far apart `lm` finds two candidates for the next token."""
    with torch.no_grad():
        logits = lm(torch.tensor([list(tokens)], device=lm.device)).logits[0, -1].float()
    return abs(float(logits[one] - logits[other]))
