"""Where two runs part, and the unified benchmark that says so. Never how fast anything is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import unified
from benchmarks.losslessness import differences, logit_gap


class Ladder:
    """A language model that scores token n by n times the number of tokens before it."""

    device = torch.device("cpu")

    def __call__(self, tokens: torch.Tensor) -> Any:
        scores = torch.arange(10.0) * tokens.shape[1]
        return SimpleNamespace(logits=scores.expand(1, tokens.shape[1], 10))


def test_gap_is_between_the_two_candidates() -> None:
    assert logit_gap(Ladder(), [1, 2, 3], 4, 6) == 6.0


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]], []),
        ([[1, 2], [3, 4]], [[1, 2], [3, 5]], ["prompt 1, token 1 (logit gap 3.0000)"]),
        ([[9, 2, 3]], [[8, 2, 4]], ["prompt 0, token 0 (logit gap 2.0000)"]),
        ([[1, 2]], [[1]], ["prompt 0, token 1 (one ended)"]),
    ],
)
def test_first_difference_of_each_prompt(ours: Any, theirs: Any, found: list[str]) -> None:
    prompts = [[7, 7]] * len(ours)
    assert [str(each) for each in differences(Ladder(), prompts, ours, theirs)] == found


def test_both_layouts_are_run_and_counted(models: Any) -> None:
    rows = {row["draft cache"]: row for row in unified.measure(models, 2)}
    assert rows.keys() == unified.LAYOUTS.keys()
    for row in rows.values():
        assert row["outputs"] == "same"
        assert row["tokens a forward"] >= 1
    separate, shared = rows["separate"], rows["unified"]
    assert " + " in separate["page KiB"], "a page of each cache"
    assert sum(map(float, separate["page KiB"].split(" + "))) == float(shared["page KiB"])


@pytest.fixture
def models() -> Any:
    from specfsm.decode.model import Model, early_exit
    from tests.decode.conftest import llama

    target = Model(llama(3, damped=2))
    options = unified.arguments(["--input", "20", "--output", "30"])
    texts = [("question", list(range(5, 14 + n % 3))) for n in range(32)]
    return SimpleNamespace(
        options=options, target=target, draft=early_exit(target, 1), prompts=lambda count: texts[:count], plain=None
    )
