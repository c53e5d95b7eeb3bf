"""Acceptance on held-out documents: greedy decoding, replayed from the drafts of all starts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specfsm.decode.training.fit import Trainer, starts
from specfsm.decode.training.objective import precision
from specfsm.decode.training.sampler import Corpus
from specfsm.decode.training.unroll import unroll


class Acceptance(NamedTuple):
    """Greedy acceptance on some documents, for one nextn: decoding is replayed start by start."""

    tokens: int
    forwards: int
    reached: list[int]
    accepted: list[int]

    @property
    def mean(self) -> float:
        """Mean tokens a target forward, the prompt's forward not counted."""
        return self.tokens / max(1, self.forwards)

    @property
    def by_position(self) -> list[float]:
        """Share of drafts at each position that were accepted, of those that were reached."""
        return [good / max(1, tried) for good, tried in zip(self.accepted, self.reached, strict=True)]


Report = dict[str, dict[int, Acceptance]]
"""Of each kind of prompt, and of all under ``"all"``: nextn → acceptance."""


def replay(matches: Tensor, prompt_lens: Tensor, lens: Tensor, nextn: int) -> Acceptance:
    """Walk through documents as greedy decoding with ``nextn`` drafts would.

    ``matches`` [step, document, start] says where the draft of a step equals the document's token.
    """
    tokens = forwards = 0
    reached, accepted = [0] * nextn, [0] * nextn
    runs = matches[:nextn].int().cumprod(0).sum(0).tolist()
    for run, prompt, end in zip(runs, prompt_lens.tolist(), lens.tolist(), strict=True):
        start = prompt - 1
        while start + 2 < end:
            room = end - 2 - start  # tokens still to come
            good = min(run[start], room)
            for position in range(min(nextn, room, good + 1)):
                reached[position] += 1
                accepted[position] += position < good
            gained = min(good + 1, room)
            tokens, forwards, start = tokens + gained, forwards + 1, start + gained
    return Acceptance(tokens, forwards, reached, accepted)


@torch.no_grad()
def find_matches(trainer: Trainer, corpus: Corpus) -> Tensor:
    """Where the draft of step k equals the document's token: [step, document, start]."""
    nextn, rows = trainer.settings.nextn, max(1, trainer.settings.batch_tokens // corpus.tokens.shape[1])
    matches = torch.zeros((nextn, *corpus.tokens.shape), dtype=torch.bool)
    for chosen in torch.split(torch.arange(len(corpus.lens)), rows):
        states, part = trainer.load(corpus, chosen)
        with precision(trainer.target):
            unrolled = list(unroll(trainer.head, states, part.tokens, nextn))
        for step, drafted in enumerate(unrolled, start=1):
            document, start = starts(part.prompt_lens, part.lens, states.shape[1], step).nonzero(as_tuple=True)
            few = torch.split(drafted[document, start], 4096)
            drafts = torch.cat([trainer.head.logits(each).argmax(-1) for each in few])
            good = drafts == part.tokens[document, start + step + 1]
            matches[step - 1, chosen[document.cpu()], start.cpu()] = good.cpu()
    return matches


def evaluate(trainer: Trainer, corpus: Corpus) -> Report:
    """Acceptance for nextn 1, 2, …, over all documents (under ``"all"``) and for each kind of prompt."""
    matches = find_matches(trainer, corpus)
    report = {}
    for kind in ["all", *dict.fromkeys(corpus.kinds)]:
        rows = torch.tensor([kind in ("all", other) for other in corpus.kinds]).nonzero()[:, 0]
        part = corpus.select(rows)
        report[kind] = {
            nextn: replay(matches[:, rows], part.prompt_lens, part.lens, nextn)
            for nextn in range(1, trainer.settings.nextn + 1)
        }
    return report
