"""The answers: a target decodes thousands of prompts at once into a `Corpus`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from specfsm.decode.training.prompts import Prompt

ATTENTION = "specfsm_sampler"
"""Name of `sampler_attention` in transformers' attention interface."""


@dataclass
class Corpus:
    """Prompts with their answers: ``tokens`` [document, position] int32, ``prompt_lens`` and ``lens`` [document]."""

    tokens: Tensor
    prompt_lens: Tensor
    lens: Tensor
    kinds: list[str]

    def select(self, chosen: Tensor) -> Corpus:
        """The documents with these indices, or for which this mask [document] holds."""
        rows = chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen
        kinds = [self.kinds[row] for row in rows.tolist()]
        return Corpus(self.tokens[rows], self.prompt_lens[rows], self.lens[rows], kinds)

    @property
    def answer_tokens(self) -> int:
        return int((self.lens - self.prompt_lens).sum())


class Sampler:
    """Lets a target answer many prompts at once: each of ``batch`` rows takes the next prompt when it has ended one.

    A step feeds one token a row, a prompt's or an answer's, each row at its own position, so that every step is
    the same work, whatever the rows are at. ``capacity`` is the longest document.
    """

    def __init__(self, target: Any, batch: int, capacity: int, eos: int) -> None:
        weight = target.lm_head.weight
        config = target.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cache = (config.num_hidden_layers, batch, config.num_key_value_heads, capacity, head_dim)
        self.target, self.batch, self.capacity, self.eos = target, batch, capacity, eos
        self.device, self.dtype = weight.device, weight.dtype
        self.keys = torch.zeros(cache, dtype=self.dtype, device=self.device)
        self.values = torch.zeros_like(self.keys)
        # one tensor, so that one copy logs a step: what each row feeds, where, and which prompt's document that is
        self.cursor = torch.zeros((3, batch), dtype=torch.long, device=self.device)
        self.tokens, self.positions, self.documents = self.cursor
        self.slots = torch.arange(capacity, device=self.device)
        self.bias = torch.zeros((batch, 1, 1, capacity), dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def answer(
        self,
        prompts: Sequence[Prompt],
        temperatures: Sequence[float],
        *,
        limit: int | None = None,
        deadline: float = math.inf,
        advance: Callable[[int], object] = lambda answered: None,
    ) -> Corpus:
        """Answer prompts, each until its end token or ``limit`` tokens with its prompt.

        A temperature of 0 is greedy. Past ``deadline`` (of `time.monotonic`) answers are cut where they are.
        """
        self._take(prompts, temperatures, min(limit or self.capacity, self.capacity))
        log: list[Tensor] = []
        with attention(self.target.config, ATTENTION):
            while time.monotonic() < deadline:
                for _ in range(32):
                    log.append(self.cursor.to(torch.int32, copy=True))
                    self._step()
                answered = int(self.taken) - self.batch
                advance(min(len(prompts), answered))
                if answered >= len(prompts) and bool((self.documents == len(prompts)).all()):
                    break
        return self._harvest(log, [kind for kind, _ in prompts])

    def _take(self, prompts: Sequence[Prompt], temperatures: Sequence[float], limit: int) -> None:
        """Lay the prompts out as a table [prompt, position], closed by one that idle rows repeat."""
        lens = [len(tokens) for _, tokens in prompts] + [1]
        table = torch.full((len(lens), max(lens)), self.eos)
        for row, (_, tokens) in enumerate(prompts):
            table[row, : len(tokens)] = torch.tensor(tokens)
        self.prompts, self.prompt_lens = table.to(self.device), torch.tensor(lens, device=self.device)
        self.temperatures = torch.tensor([*temperatures, 0.0], device=self.device)
        self.limit = limit
        self.documents.copy_(torch.arange(self.batch, device=self.device).clamp(max=len(prompts)))
        self.positions.zero_()
        self.tokens.copy_(self.prompts[self.documents, 0])
        self.taken = torch.tensor(self.batch, device=self.device)

    def _step(self) -> None:
        """Feed each row's token, then move each row on."""
        model = self.target.model
        self.bias.copy_(torch.where(self.slots <= self.positions[:, None], 0.0, -math.inf)[:, None, None])
        hidden = model.embed_tokens(self.tokens)[:, None]
        positions = self.positions[:, None]
        rotary = model.rotary_emb(hidden, positions)
        for layer in model.layers:
            hidden = layer(hidden, position_ids=positions, position_embeddings=rotary, sampler=self)
        self._move_on(self._draw(self.target.lm_head(model.norm(hidden))[:, 0]))

    def _draw(self, logits: Tensor) -> Tensor:
        """Sample by adding Gumbel noise times the temperature: [row, vocabulary] → [row]."""
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_().clamp_(min=1e-20).log_()
        return (logits.float() - self.temperatures[self.documents, None] * noise).argmax(-1)

    def _move_on(self, drawn: Tensor) -> None:
        following = self.positions + 1
        answering = following >= self.prompt_lens[self.documents]
        ended = (following > self.prompt_lens[self.documents]) & (self.tokens == self.eos)
        ended |= following >= self.limit
        fresh = self.taken + ended.cumsum(0) - 1
        documents = torch.where(ended, fresh.clamp(max=len(self.prompts) - 1), self.documents)
        positions = torch.where(ended, 0, following)
        prompted = self.prompts[documents, positions.clamp(max=self.prompts.shape[1] - 1)]
        self.tokens.copy_(torch.where(answering & ~ended, drawn, prompted))
        self.positions.copy_(positions)
        self.documents.copy_(documents)
        self.taken += ended.sum()

    def _harvest(self, log: list[Tensor], kinds: list[str]) -> Corpus:
        """Gather the log, [3, row] a step, into documents. Rows that were idle fall into the closing prompt's."""
        if not log:
            raise ValueError("no time was left to answer any prompt: give more --minutes or a larger --answering")
        tokens, positions, documents = (part.flatten().long() for part in torch.stack(log).unbind(1))
        table = torch.full((len(self.prompts), self.capacity), self.eos, dtype=torch.int32, device=self.device)
        table[documents, positions] = tokens.int()
        lens = torch.zeros_like(self.prompt_lens).scatter_reduce_(0, documents, positions + 1, "amax")
        corpus = Corpus(table[:-1].cpu(), self.prompt_lens[:-1].cpu(), lens[:-1].cpu(), kinds)
        return corpus.select(corpus.lens > corpus.prompt_lens + 1)


def sampler_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sampler: Sampler,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of one token a row over the sampler's cache: query [row, heads, 1, head_dim]."""
    layer = cast("Any", module).layer_idx
    keys, values = sampler.keys[layer], sampler.values[layer]
    slot = sampler.positions[:, None, None, None].expand_as(key)
    keys.scatter_(2, slot, key)
    values.scatter_(2, slot, value)
    # the heads of a group become the rows of one query, so that each key and value is read once
    rows, _heads, _one, head_dim = query.shape
    grouped = query.reshape(rows, keys.shape[1], -1, head_dim)
    bias = sampler.bias.expand(-1, keys.shape[1], grouped.shape[2], -1)
    attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scaling)
    return attended.reshape(rows, 1, -1, head_dim), None


@contextlib.contextmanager
def attention(config: Any, name: str) -> Iterator[None]:
    """Run a model with this config through another function of transformers' attention interface."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def install() -> None:
    """Register `sampler_attention` with transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, sampler_attention)


@torch.no_grad()
def require_own_answers(target: Any, corpus: Corpus, share: float = 0.9) -> float:
    """Check that greedy answers are the target's: where its argmax over whole documents is the token that follows.

    Rounding lets near ties differ. Returns the share of tokens that agree; raises `ValueError` below ``share``.
    """
    device = target.lm_head.weight.device
    tokens = corpus.tokens.to(device).long()
    position = torch.arange(tokens.shape[1] - 1)
    answer = (position >= corpus.prompt_lens[:, None] - 1) & (position + 1 < corpus.lens[:, None])
    states = target.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1][answer.to(device)]
    best = torch.cat([target.lm_head(part).argmax(-1) for part in states.split(4096)])
    agreed = float((best == tokens[:, 1:][answer.to(device)]).float().mean())
    if agreed < share:
        raise ValueError(
            f"the sampled answers are not the target's: it agrees with {agreed:.0%} of their tokens. "
            f"This machine's attention kernels cannot be trusted with a mask"
        )
    return agreed
