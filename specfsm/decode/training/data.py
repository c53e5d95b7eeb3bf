"""The corpus of a run: held-out answers first, then the prompts that the target writes, then all answers."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import torch

from specfsm.decode.training.prompts import ASKED, Prompt, encode, make_prompts, user_turn
from specfsm.decode.training.sampler import Corpus, Sampler, require_own_answers
from specfsm.decode.training.settings import Settings

if TYPE_CHECKING:
    from rich.progress import Progress

    from specfsm.decode.training.run import Clock

ASKING = 0.9
"""Temperature at which the target writes user turns."""
TURN = 96
"""Tokens of the longest user turn that the target may write."""
SHARE = 0.2
"""Of the time for answers, what the user turns may take."""


def generate(
    settings: Settings, clock: Clock, target: Any, tokenizer: Any, progress: Progress
) -> tuple[Corpus, Corpus]:
    """Make the corpus to train on and the held-out one."""
    sampler = Sampler(target, min(settings.batch, settings.prompts), settings.length, tokenizer.eos_token_id)

    def answer(title: str, prompts: list[Prompt], temperatures: list[float], **bounds: Any) -> Corpus:
        task, began = progress.add_task(title, total=len(prompts)), time.monotonic()
        corpus = sampler.answer(
            prompts, temperatures, advance=lambda done: progress.update(task, completed=done), **bounds
        )
        progress.remove_task(task)
        seconds = time.monotonic() - began
        progress.console.print(
            f"{title}: {len(corpus.lens)} of {len(prompts)}, {corpus.answer_tokens:,} tokens in {seconds:.0f} s"
        )
        return corpus

    examples = fitting(tokenizer, make_prompts(settings.held_out, settings.seed, held_out=True), settings)
    held_out = answer("held-out answers", examples, [0.0] * len(examples))
    agreed = require_own_answers(target, held_out.select(torch.arange(min(32, len(held_out.lens)))))
    progress.console.print(f"the target agrees with {agreed:.1%} of its sampled tokens")
    count = round(settings.prompts * settings.asked)
    asked = []
    if count:
        opening = [(ASKED, user_turn(tokenizer))] * count
        limit = min(settings.length, len(opening[0][1]) + TURN)
        turns = answer("the target asks", opening, [ASKING] * count, limit=limit, deadline=clock.asking_end(SHARE))
        asked = questions(tokenizer, turns)
    pairs = asked + make_prompts(settings.prompts - len(asked), settings.seed)
    rng = random.Random(settings.seed)
    rng.shuffle(pairs)
    prompts = fitting(tokenizer, pairs, settings)
    temperatures = [0.0 if rng.random() < settings.greedy else settings.temperature for _ in prompts]
    return answer("answers", prompts, temperatures, deadline=clock.answers_end), held_out


def fitting(tokenizer: Any, pairs: list[tuple[str, str]], settings: Settings) -> list[Prompt]:
    """The prompts, encoded, that leave an answer a third of the longest document."""
    kinds, texts = [kind for kind, _ in pairs], [text for _, text in pairs]
    encoded = zip(kinds, encode(tokenizer, texts), strict=True)
    return [(kind, ids) for kind, ids in encoded if len(ids) < settings.length * 2 // 3]


def questions(tokenizer: Any, corpus: Corpus) -> list[tuple[str, str]]:
    """The different user turns that the target has written and ended, as prompts."""
    ended = corpus.tokens[torch.arange(len(corpus.lens)), corpus.lens - 1] == tokenizer.eos_token_id
    part = corpus.select(ended)
    spans = zip(part.tokens.tolist(), part.prompt_lens.tolist(), part.lens.tolist(), strict=True)
    texts = tokenizer.batch_decode([tokens[start : end - 1] for tokens, start, end in spans])
    return [(ASKED, text) for text in dict.fromkeys(text.strip() for text in texts) if text]
