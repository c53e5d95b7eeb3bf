"""Training data, unrolled training and the measure of acceptance, each against a plain way to get the same."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import DynamicCache

from specfsm.decode.head import MTPHead
from specfsm.decode.training import data, evaluation, fit, objective, prompts, run, settings, unroll
from specfsm.decode.training.fit import Trainer, batches, fit_fuse, padded, starts
from specfsm.decode.training.sampler import Corpus, Sampler, require_own_answers
from specfsm.decode.training.settings import Settings


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The tiny target's operations are too small to share: a second thread would only be waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


TINY = settings.shrink(Settings(tiny=True, prompts=24, held_out=9, batch=8, steps=6, every=2, length=160))


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    """A random target with its byte tokenizer, the training's attention functions registered."""
    return run.load(TINY)


def prompts_for(tokenizer: Any, *texts: str) -> list[tuple[str, list[int]]]:
    """(kind, prompt tokens) pairs."""
    return [("question", ids) for ids in prompts.encode(tokenizer, texts)]


def rows_for(target: Any) -> objective.Rows:
    """The loss of TINY's settings."""
    return objective.distiller(target, TINY.soft, TINY.nextn, TINY.chunk)


def untrained(target: Any) -> MTPHead:
    """A head for unrolled steps, as the target's last layer."""
    return MTPHead(target.config, attn_implementation=unroll.ATTENTION).attach(target).start_from(target)


def answers(tiny: tuple[Any, Any], count: int = 5, **bounds: Any) -> Corpus:
    """Greedy answers of the tiny target to ``count`` prompts of different lengths, over two rows."""
    target, tokenizer = tiny
    sampler = Sampler(target, 2, 64, tokenizer.eos_token_id)
    questions = prompts_for(tokenizer, *("ab" * (3 * n + 1) for n in range(count)))
    return sampler.answer(questions, [0.0] * count, **bounds)


def test_prompts_are_different_and_seeded() -> None:
    """As many as asked for, none twice, all kinds, all slots filled, and the same again for the same seed."""
    pairs = prompts.make_prompts(2000, 5)
    assert len({text for _, text in pairs}) == 2000
    assert {kind for kind, _ in pairs} == set(prompts.TEMPLATES)
    assert not any("{" in text or "  " in text for _, text in pairs)
    assert pairs == prompts.make_prompts(2000, 5) != prompts.make_prompts(2000, 6)


def test_held_out_prompts_share_no_template_and_no_word() -> None:
    """Training and held-out prompts are made of disjoint templates and disjoint words."""
    for items in prompts.TEMPLATES.values():
        assert not set(prompts.held(items, 3, True)) & set(prompts.held(items, 3, False))
        assert len(set(items)) == len(items)
    for name, words in prompts.WORDS.items():
        assert len(set(words)) == len(words), name
    known = {text for _, text in prompts.make_prompts(5000, 0)}
    assert not known & {text for _, text in prompts.make_prompts(500, 0, held_out=True)}


@torch.no_grad()
def test_sampler_answers_as_the_target_does(tiny: tuple[Any, Any]) -> None:
    """Each greedy answer, whichever row and however late it began, is the target's own, token for token."""
    target, _ = tiny
    corpus = answers(tiny)
    assert len(corpus.lens) == 5
    for tokens, prompt, end in zip(corpus.tokens, corpus.prompt_lens.tolist(), corpus.lens.tolist(), strict=True):
        logits = target(input_ids=tokens[None, :end].long()).logits[0]
        assert torch.equal(logits[prompt - 1 : -1].argmax(-1).int(), tokens[prompt:end])
        assert end == 64 or tokens[end - 1] == 0
        assert not (tokens[prompt : end - 1] == 0).any()


def test_answers_of_another_model_are_refused(tiny: tuple[Any, Any]) -> None:
    """A sampler that went wrong is noticed before anything is learnt from it."""
    target, _ = tiny
    corpus = answers(tiny)
    assert require_own_answers(target, corpus) == 1.0
    corpus.tokens = (corpus.tokens + 1) % 257
    with pytest.raises(ValueError, match="the sampled answers are not the target's: it agrees with"):
        require_own_answers(target, corpus)


def test_sampler_stops_at_limit_and_deadline(tiny: tuple[Any, Any]) -> None:
    """No document is longer than the limit; past the deadline nothing is begun."""
    assert int(answers(tiny, limit=40).lens.max()) <= 40
    with pytest.raises(ValueError, match="no time was left"):
        answers(tiny, deadline=0.0)


def test_temperature_draws_from_the_distribution(tiny: tuple[Any, Any]) -> None:
    """Frequencies over many rows match softmax(logits / temperature); at temperature 0 all rows take the best."""
    target, _ = tiny
    rows = 20_000
    sampler = Sampler(target, 1, 8, 0)
    sampler.documents = torch.arange(2).repeat_interleave(rows)
    sampler.temperatures = torch.tensor([0.7, 0.0])
    logits = torch.tensor([1.0, 0.5, 0.0, -1.0])
    torch.manual_seed(0)
    warm, cold = sampler._draw(logits.expand(2 * rows, 4)).view(2, rows)
    assert (cold == 0).all()
    frequencies = torch.bincount(warm, minlength=4) / rows
    torch.testing.assert_close(frequencies, (logits / 0.7).softmax(-1), atol=0.015, rtol=0)


def test_questions_are_the_ended_user_turns(tiny: tuple[Any, Any]) -> None:
    """Turns that the target ended become prompts, once each; cut ones are dropped."""
    _, tokenizer = tiny
    begin = prompts.user_turn(tokenizer)
    turns = ["Why?<|end|>", "Why?<|end|>", "How<|end|>", "cut"]
    rows = [begin + tokenizer(turn)["input_ids"] for turn in turns]
    lens = torch.tensor([len(row) for row in rows])
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=9)
    corpus = Corpus(tokens.int(), torch.full((4,), len(begin)), lens, ["x"] * 4)
    assert data.questions(tokenizer, corpus) == [(prompts.ASKED, "Why?"), (prompts.ASKED, "How")]


@torch.no_grad()
@pytest.mark.parametrize("seq", [6, 13])
def test_unrolled_steps_are_the_decode_loops(tiny: tuple[Any, Any], seq: int) -> None:
    """For every start, the unrolled states equal drafting from that start alone with a key-value cache."""
    target, _ = tiny
    nextn = 3
    torch.manual_seed(seq)
    token_ids = torch.randint(0, 257, (1, seq))
    states = target.model(input_ids=token_ids).last_hidden_state
    unrolled_head = MTPHead(target.config, attn_implementation=unroll.ATTENTION).attach(target)
    cached_head = MTPHead(target.config, attn_implementation="sdpa").attach(target)
    cached_head.load_state_dict(unrolled_head.state_dict())
    unrolled = list(unroll.unroll(unrolled_head, states, token_ids, nextn))
    for start in range(seq - nextn):
        for step, drafted in enumerate(draft(cached_head, states, token_ids, start, nextn)):
            torch.testing.assert_close(unrolled[step][0, start], drafted, atol=1e-4, rtol=1e-4)


def draft(head: MTPHead, states: Any, token_ids: Any, start: int, nextn: int) -> list[torch.Tensor]:
    """Draft from one start: the accepted tokens at once, then one token a step on the head's own state."""
    cache = DynamicCache(config=head.config)
    name = "cache" if "cache" in head.layer.forward.__wrapped__.__code__.co_varnames else "past_key_values"
    positions = torch.arange(start + 1)[None]
    current = head(states[:, : start + 1], token_ids[:, 1 : start + 2], positions, **{name: cache})[:, -1:]
    drafted = [current[0, 0]]
    for step in range(1, nextn):
        position = torch.tensor([[start + step]])
        current = head(current, token_ids[:, start + step + 1, None], position, **{name: cache})
        drafted.append(current[0, 0])
    return drafted


@pytest.mark.parametrize("soft", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("count", [1, 8, 13])
def test_distillation_gradient(soft: float, count: int) -> None:
    """Loss and gradient of the chunked operation are autograd's of the formula, whatever the last chunk's size."""
    torch.manual_seed(count)
    lm_head, weight = torch.randn(31, 6, dtype=torch.double), torch.rand(2, count, dtype=torch.double)
    students = torch.randn(2, count, 6, dtype=torch.double, requires_grad=True)
    teacher = torch.randn(count, 6, dtype=torch.double)
    wanted = teacher @ lm_head.T
    goal = soft * wanted.softmax(-1) + (1 - soft) * F.one_hot(wanted.argmax(-1), 31)
    plain = -(goal * (students @ lm_head.T).log_softmax(-1)).sum(-1)
    (expected,) = torch.autograd.grad((plain * weight).sum(), students)

    def rows(*parts: torch.Tensor) -> Any:
        return objective.distill_rows(parts[0], parts[1], parts[2], soft)

    loss, agree = objective.distill(students, teacher, lm_head, 8, rows)
    (grad,) = torch.autograd.grad((loss * weight).sum(), students)
    torch.testing.assert_close(loss, plain, check_dtype=False, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(agree, (students @ lm_head.T).argmax(-1) == wanted.argmax(-1))


def test_loss_is_that_of_each_start(tiny: tuple[Any, Any]) -> None:
    """Start by start, step by step: cross entropy, a quarter of it where an earlier draft was wrong."""
    target, _ = tiny
    trainer = Trainer(target, untrained(target), answers(tiny), TINY, rows_for(target))
    states, part = trainer.load(trainer.corpus, torch.arange(5))
    loss, agreement = trainer.loss(states, part)
    drafted = list(unroll.unroll(trainer.head, states, part.tokens, 3))
    alive: dict[tuple[int, int], bool] = {}
    expected, share = 0.0, []
    for step in (1, 2, 3):
        found = []
        for document, start in starts(part.prompt_lens, part.lens, states.shape[1], step).nonzero().tolist():
            wanted = target.lm_head(states[document, start + step])
            ours = target.lm_head(drafted[step - 1][document, start])
            goal = TINY.soft * wanted.softmax(-1)
            goal[wanted.argmax()] += 1 - TINY.soft
            weight = 1.0 if alive.get((document, start), True) else 0.25
            hit = bool(ours.argmax() == wanted.argmax())
            alive[document, start] = alive.get((document, start), True) and hit
            found.append((weight * float(-(goal * ours.log_softmax(-1)).sum().detach()), hit))
        expected += TINY.decay ** (step - 1) * sum(each for each, _ in found) / len(found)
        share.append(sum(hit for _, hit in found) / len(found))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
    assert agreement.tolist() == pytest.approx(share)


def test_starts_cover_the_answer() -> None:
    """From the last prompt token to the last one that has a token to predict."""
    found = starts(torch.tensor([2, 4]), torch.tensor([7, 5]), 8, 2)
    assert [row.nonzero()[:, 0].tolist() for row in found] == [[1, 2, 3], []]


def test_batches_hold_each_document_once_an_epoch() -> None:
    """Documents of one padded length, at most so many tokens, all seen once, in an order that the seed decides."""
    lens = torch.tensor([10, 60, 64, 65, 100, 128, 190] * 3)
    corpus = Corpus(torch.zeros(21, 192), torch.ones(21), lens, ["x"] * 21)
    order, again = batches(corpus, 256, 1), batches(corpus, 256, 1)
    seen: list[int] = []
    while len(seen) < 21:
        batch = next(order)
        assert torch.equal(batch, next(again))
        assert len(set(padded(lens[batch]).tolist())) == 1
        assert int(padded(lens[batch]).sum()) <= 256
        seen += batch.tolist()
    assert sorted(seen) == list(range(21))


@pytest.mark.parametrize(
    ("matches", "nextn", "tokens", "forwards", "reached", "accepted"),
    [
        # prompt of 2, ten tokens in all: after the first answer token, seven more to come from start 1
        ([[0] * 10, [0] * 10], 1, 7, 7, [7], [0]),
        ([[1] * 10, [1] * 10], 1, 7, 4, [4], [4]),
        ([[1] * 10, [1] * 10], 2, 7, 3, [3, 2], [3, 2]),
        ([[1] * 10, [0] * 10], 2, 7, 4, [4, 3], [4, 0]),
    ],
)
def test_replay_counts_as_decoding_does(
    matches: list[list[int]], nextn: int, tokens: int, forwards: int, reached: list[int], accepted: list[int]
) -> None:
    """Hand-counted documents: never a draft, always one, always two, the second always wrong."""
    found = evaluation.replay(torch.tensor(matches)[:, None], torch.tensor([2]), torch.tensor([10]), nextn)
    assert found.tokens == tokens
    assert found.forwards == forwards
    assert (found.reached, found.accepted) == (reached, accepted)


@torch.no_grad()
def test_replay_agrees_with_a_real_loop(tiny: tuple[Any, Any]) -> None:
    """Tokens a forward, computed from the matches of all starts, are those of drafting and verifying in turn."""
    target, _ = tiny
    corpus = answers(tiny)
    head = untrained(target)
    trainer = Trainer(target, head, corpus, TINY, rows_for(target))
    fit_fuse(trainer, torch.arange(5))
    found = evaluation.evaluate(trainer, corpus)["all"][3]
    cached_head = MTPHead(target.config, attn_implementation="sdpa").attach(target)
    cached_head.load_state_dict(head.state_dict())
    forwards = sum(decode(target, cached_head, corpus, row, 3) for row in range(5))
    assert found.forwards == forwards
    assert found.tokens == int((corpus.lens - corpus.prompt_lens - 1).sum()) > forwards


def decode(target: Any, head: MTPHead, corpus: Corpus, row: int, nextn: int) -> int:
    """Decode a document again with drafts; returns the target's forwards after the prompt's."""
    tokens, end = corpus.tokens[row : row + 1].long(), int(corpus.lens[row])
    states = target.model(input_ids=tokens[:, :end]).last_hidden_state
    start, forwards = int(corpus.prompt_lens[row]) - 1, 0
    while start + 2 < end:
        forwards += 1
        # drafting on the document's own tokens is drafting on the drafts, as long as those are right
        reach = min(nextn, end - 2 - start)
        guesses = [int(head.logits(state).argmax()) for state in draft(head, states, tokens, start, reach)]
        good = 0
        while good < reach and guesses[good] == tokens[0, start + 2 + good]:
            good += 1
        start += good + 1
    return forwards


def test_tiny_run_learns_and_saves(tmp_path: Path) -> None:
    """The whole of it: data, training, report, and a head that loads and drafts better than at the start."""
    wanted = dataclasses.replace(
        TINY, steps=20, every=10, output=str(tmp_path / "head.safetensors"), report=str(tmp_path / "report.json")
    )
    report = run.train(wanted)
    assert set(report["all"]) == {1, 2, 3}
    head = MTPHead.load(wanted.output)
    assert head.metadata["seed"] == "0"
    assert head.metadata["nextn"] == "3"
    written = json.loads(Path(wanted.report).read_text())
    assert written["held_out"]["all"]["3"]["tokens_per_forward"] == round(report["all"][3].mean, 4)
    assert set(written["held_out"]) == {"all", *prompts.TEMPLATES}


def test_loss_falls(tiny: tuple[Any, Any]) -> None:
    """A few steps on the same documents lower the loss and raise the agreement."""
    target, _ = tiny
    head = untrained(target)
    trainer = Trainer(target, head, answers(tiny), dataclasses.replace(TINY, rate=0.02), rows_for(target))
    losses, agreements = zip(*(trainer.step(torch.arange(5), 0.2) for _ in range(60)), strict=True)
    assert losses[-1] < 0.9 * losses[0]
    assert agreements[-1][0] > agreements[0][0]


def test_kept_states_are_the_targets(tiny: tuple[Any, Any]) -> None:
    """Loading a batch gives the same states, up to each document's end, as computing them anew."""
    target, _ = tiny
    trainer = Trainer(target, untrained(target), answers(tiny), TINY, rows_for(target))
    chosen = torch.tensor([3, 0, 4])
    expected, part = trainer.load(trainer.corpus, chosen)
    trainer.keep_states()
    found, same = trainer.load(trainer.corpus, chosen)
    assert torch.equal(part.tokens, same.tokens)
    for ours, theirs, end in zip(found, expected, part.lens.tolist(), strict=True):
        torch.testing.assert_close(ours[:end], theirs[:end])


def test_each_step_computes_with_the_weights_of_the_last(
    tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under autocast, as on a GPU, neither training nor evaluation goes on with the first step's bf16 copies."""
    target, _ = tiny
    for module in (fit, evaluation):
        monkeypatch.setattr(module, "precision", lambda _: torch.autocast("cpu", torch.bfloat16))
    trainer = Trainer(target, untrained(target), answers(tiny), TINY, rows_for(target))
    before = evaluation.find_matches(trainer, trainer.corpus)
    losses = [float(trainer.step(torch.arange(5), 0.2)[0]) for _ in range(20)]
    assert losses[-1] < losses[0]
    with torch.no_grad():
        for parameter in trainer.head.parameters():
            parameter.zero_()
    assert not torch.equal(evaluation.find_matches(trainer, trainer.corpus), before)


def test_same_seed_same_head_and_resuming_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs, one of them stopped and resumed from its checkpoint, end in the same weights."""

    def trained(name: str, **changes: Any) -> dict[str, torch.Tensor]:
        output = tmp_path / f"{name}.safetensors"
        run.train(dataclasses.replace(TINY, output=str(output), **changes))
        return load_file(output)

    checkpoint = str(tmp_path / "checkpoint")
    expected = trained("whole")
    step, taken = Trainer.step, []

    def stopped(trainer: Trainer, *rest: Any) -> Any:
        taken.append(rest)
        if len(taken) == 4:
            raise KeyboardInterrupt
        return step(trainer, *rest)

    monkeypatch.setattr(Trainer, "step", stopped)
    with pytest.raises(KeyboardInterrupt):
        trained("resumed", checkpoint=checkpoint)
    resumed = trained("resumed", checkpoint=checkpoint, resume=True)
    assert len(taken) == 4 + 4, "it went on from step 2"
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_a_run_without_time_says_so(tmp_path: Path) -> None:
    """A run without the time to answer a prompt says so."""
    output = tmp_path / "head.safetensors"
    hurried = dataclasses.replace(TINY, steps=0, minutes=1e-6, asked=0.0, output=str(output))
    with pytest.raises(ValueError, match="no time was left"):
        run.train(hurried)


def test_resuming_needs_a_checkpoint(tmp_path: Path) -> None:
    """Its name, and the file."""
    with pytest.raises(ValueError, match="name its file with --checkpoint"):
        run.train(dataclasses.replace(TINY, resume=True))
    with pytest.raises(FileNotFoundError, match="no checkpoint to resume from"):
        run.train(dataclasses.replace(TINY, resume=True, checkpoint=str(tmp_path / "none")))


def test_options_are_the_settings() -> None:
    """Each setting is an option with its default; ``--tiny`` shrinks what was not given."""
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    assert settings.from_arguments(parser.parse_args([])) == Settings()
    found = settings.from_arguments(parser.parse_args(["--tiny", "--steps", "7", "--batch-tokens", "512"]))
    assert (found.steps, found.batch_tokens, found.batch) == (7, 512, settings.TINY["batch"])
    grouped = [name for names in settings.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(option.name for option in dataclasses.fields(Settings))
