"""Verification: which drafted tokens the target keeps, and what it says next. Greedy, or by rejection sampling.

Rejection sampling (arXiv:2211.17192) keeps a drafted token x with probability min(1, p(x) / q(x)), where p is the
target's distribution and q the one that x was drawn from; the first token that is not kept is drawn anew from the
normalised positive part of p - q. What is emitted is then distributed as the target's own text, whatever the draft is.

All randomness comes in as uniform numbers, so that a step is the same whether it runs eagerly or in a graph.
"""

from __future__ import annotations

import torch

__all__ = ["Sampler", "accept_greedy", "accept_sampled", "draw"]


def draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw by the inverse of the cumulated distribution: probs [n, vocabulary] and uniform [n] → tokens [n]."""
    cumulated = probs.cumsum(-1)
    below = cumulated <= (uniform * cumulated[..., -1])[..., None]
    return below.sum(-1).clamp(max=probs.shape[-1] - 1)


def accept_greedy(drafted: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The longest prefix of the draft that the target would have written itself.

    Args:
        drafted: [n, L] tokens.
        logits: [n, 1 + L, vocabulary], the target's after the last known token and after each drafted one.

    Returns:
        how many of `drafted` are accepted, [n], and the target's own next token, [n].
    """
    choices = logits.argmax(-1)
    accepted = (drafted == choices[:, :-1]).long().cumprod(1).sum(1)
    return accepted, choices.gather(1, accepted[:, None])[:, 0]


def accept_sampled(
    drafted: torch.Tensor, draft_probs: torch.Tensor, probs: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rejection sampling.

    Args:
        drafted: [n, L] tokens.
        draft_probs: [n, L, vocabulary], what each was drawn from.
        probs: [n, 1 + L, vocabulary], the target's distribution at each place.
        uniform: [n, L + 1], one number for each drafted token and one for the target's own.

    Returns:
        as `accept_greedy`.
    """
    length = drafted.shape[1]
    p = probs[:, :length].gather(2, drafted[..., None])[..., 0]
    q = draft_probs.gather(2, drafted[..., None])[..., 0]
    accepted = (uniform[:, :length] * q < p).long().cumprod(1).sum(1)
    at = accepted[:, None, None].expand(-1, 1, probs.shape[-1])
    theirs = probs.gather(1, at)[:, 0]
    ours = torch.cat((draft_probs, torch.zeros_like(probs[:, :1])), dim=1).gather(1, at)[:, 0]
    residual = (theirs - ours).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, theirs)
    return accepted, draw(residual, uniform[:, length])


class Sampler:
    """How tokens are chosen: greedily at temperature 0, else drawn from the softmax at that temperature.

    Args:
        temperature: 0 or more.
        seed: of the uniform numbers.
    """

    def __init__(self, temperature: float = 0.0, seed: int = 0) -> None:
        if temperature < 0:
            raise ValueError(f"the temperature must be 0 (greedy) or more, not {temperature}")
        self.temperature = temperature
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def noise(self, rows: int, draft_len: int) -> torch.Tensor:
        """Uniform numbers of one step on the host, [rows, 2 L + 1]: to draft with, to accept with, to choose with."""
        return torch.rand((rows, 2 * draft_len + 1), generator=self.generator)

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        return (logits.float() / self.temperature).softmax(-1)

    def choose(self, logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [n, vocabulary] and uniform [n] → tokens [n], and what they were drawn from."""
        if self.greedy:
            return logits.argmax(-1), None
        probs = self.probs(logits)
        return draw(probs, uniform), probs

    def accept(
        self, drafted: torch.Tensor, draft_probs: torch.Tensor | None, logits: torch.Tensor, uniform: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafted [n, L], logits [n, 1 + L, vocabulary], uniform [n, L + 1] → accepted counts and own tokens, [n]."""
        if self.greedy:
            return accept_greedy(drafted, logits)
        probs = self.probs(logits)
        if draft_probs is None:
            draft_probs = probs[:, :0]
        return accept_sampled(drafted, draft_probs, probs, uniform)
