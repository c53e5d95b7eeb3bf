"""The optimizer's side: batches of documents, the loss of the unrolled steps, one step after another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specfsm.decode.head import MTPHead
from specfsm.decode.training.objective import Rows, distill, precision
from specfsm.decode.training.sampler import Corpus
from specfsm.decode.training.settings import Settings
from specfsm.decode.training.unroll import unroll


def starts(prompt_lens: Tensor, lens: Tensor, seq: int, step: int) -> Tensor:
    """Where draft step ``step`` has a token to predict: [document, seq], from the last prompt token on."""
    position = torch.arange(seq, device=lens.device)
    return (position >= prompt_lens[:, None] - 1) & (position + step + 1 < lens[:, None])


def padded(lens: Tensor) -> Tensor:
    """Lengths rounded up to a multiple of 64."""
    return (lens + 63) // 64 * 64


def batches(corpus: Corpus, tokens: int, seed: int) -> Iterator[Tensor]:
    """Forever, indices of documents of about the same length, ``tokens`` padded tokens a batch, shuffled by seed."""
    width = padded(corpus.lens)
    for epoch in range(1 << 30):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(width), generator=generator)
        ready = [
            part
            for size in sorted(set(width.tolist()))
            for part in torch.split(order[width[order] == size], max(1, tokens // size))
        ]
        for index in torch.randperm(len(ready), generator=generator).tolist():
            yield ready[index]


@dataclass
class Trainer:
    """A head in training, and what the steps need."""

    target: Any
    head: MTPHead
    corpus: Corpus
    settings: Settings
    rows: Rows
    optimizer: torch.optim.Optimizer = field(init=False)
    kept: tuple[Tensor, Tensor] | None = field(init=False, default=None)
    """The target's states of the corpus, packed [token, width], and where each document begins among them."""

    def __post_init__(self) -> None:
        self.device = self.target.lm_head.weight.device
        # A step moves a parameter by a share of its own size: those of the target's last layer, made for a residual
        # stream of 25, are ten times as large as fresh ones.
        groups = [
            {"params": [parameter], "scale": max(float(parameter.detach().pow(2).mean().sqrt()), 1e-2)}
            for parameter in self.head.parameters()
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)

    def load(self, corpus: Corpus, chosen: Tensor) -> tuple[Tensor, Corpus]:
        """Documents on the device, cut to their padded length, and the target's states [document, seq, width].

        States past a document's end are of no meaning.
        """
        part = corpus.select(chosen)
        seq = min(int(padded(part.lens).max()), part.tokens.shape[1])
        tokens = part.tokens[:, :seq].to(self.device).long()
        loaded = Corpus(tokens, part.prompt_lens.to(self.device), part.lens.to(self.device), part.kinds)
        if self.kept is not None and corpus is self.corpus:
            packed, begins = self.kept
            rows = begins[chosen.to(self.device), None] + torch.arange(seq, device=self.device)
            return packed[rows.clamp(max=len(packed) - 1)], loaded
        with torch.no_grad():
            return self.target.model(input_ids=tokens, use_cache=False).last_hidden_state, loaded

    def keep_states(self) -> None:
        """Compute the target's states of the whole corpus once, and keep them on the device."""
        lens = self.corpus.lens
        begins = (lens.cumsum(0) - lens).to(self.device)
        weight = self.target.lm_head.weight
        packed = weight.new_empty((int(lens.sum()), weight.shape[1]))
        order, rows = lens.argsort(), max(1, self.settings.batch_tokens // self.corpus.tokens.shape[1])
        for chosen in torch.split(order, rows):
            states, part = self.load(self.corpus, chosen)
            position = torch.arange(states.shape[1], device=self.device)
            inside = position < part.lens[:, None]
            packed[(begins[chosen.to(self.device), None] + position)[inside]] = states[inside]
        self.kept = packed, begins

    def step(self, chosen: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        """One optimizer step on these documents; returns the loss a token and the agreement at each draft step."""
        with precision(self.target):
            loss, agreement = self.loss(*self.load(self.corpus, chosen))
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        rate = self.settings.rate * schedule(progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        self.optimizer.step()
        return loss.detach(), agreement

    def loss(self, states: Tensor, part: Corpus) -> tuple[Tensor, Tensor]:
        """The distillation loss of the unrolled steps, and each step's share of argmaxes that agree: [step].

        A later step counts fully only where the earlier ones agreed: elsewhere the decode loop never gets to it.
        Rows are the target's states that predict a token which step 1 can draft; the student of step k there is the
        one that started k tokens before, if that is no earlier than the prompt's last token.
        """
        settings, seq = self.settings, states.shape[1]
        drafted = torch.stack(list(unroll(self.head, states, part.tokens, settings.nextn)))
        document, before = starts(part.prompt_lens, part.lens, seq, 1).nonzero(as_tuple=True)
        step = torch.arange(settings.nextn, device=self.device)[:, None]
        start = before - step
        valid = start >= part.prompt_lens[document] - 1
        at = (step, document, start.clamp(min=0))
        loss, agree = distill(
            drafted[at], states[document, before + 1], self.target.lm_head.weight, settings.chunk, self.rows
        )
        hits = torch.ones((settings.nextn + 1, *states.shape[:2]), device=self.device)
        hits[1:][tuple(index.expand_as(valid)[valid] for index in at)] = agree[valid].float()
        alive = hits.cumprod(0)[at]
        weight = settings.decay**step * (0.25 + 0.75 * alive) * valid / valid.sum(1, keepdim=True).clamp(min=1)
        return (loss * weight).sum(), (agree & valid).sum(1) / valid.sum(1).clamp(min=1)


def schedule(progress: float) -> float:
    """A short warm-up, then a cosine to zero, over a run's progress from 0 to 1."""
    return min(1.0, progress / 0.03 + 0.01) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


@torch.no_grad()
def fit_fuse(trainer: Trainer, chosen: Tensor) -> None:
    """Fit the head's first linear layer so that its output resembles what the target's last layer reads.

    Ridge regression from (state i, token i + 1) to the last layer's input at i + 1, on a batch of documents: the
    head then starts as the target's last layer on a guess of its input.
    """
    target, head = trainer.target, trainer.head
    _, part = trainer.load(trainer.corpus, chosen)
    output = target.model(input_ids=part.tokens, use_cache=False, output_hidden_states=True)
    document, start = starts(part.prompt_lens, part.lens, part.tokens.shape[1], 1).nonzero(as_tuple=True)
    with torch.autocast(trainer.device.type, enabled=False):  # bf16 sums would spoil the normal equations
        state = head.state_norm(output.last_hidden_state[document, start].float())
        token = head.token_norm(target.model.embed_tokens(part.tokens[document, start + 1]).float())
        known = torch.cat((state, token), dim=-1)
        goal = output.hidden_states[-2][document, start + 1].float()
        gram = known.T @ known
        gram.diagonal().add_(1e-2 * gram.diagonal().mean())
        head.fuse.weight.copy_(torch.linalg.solve(gram, known.T @ goal).T)
