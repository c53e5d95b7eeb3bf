"""A whole run: load, generate, optimize, keep the best head, report."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specfsm.decode.head import MTPHead
from specfsm.decode.training import sampler, unroll
from specfsm.decode.training.data import generate
from specfsm.decode.training.evaluation import Acceptance, Report, evaluate
from specfsm.decode.training.fit import Trainer, batches, fit_fuse
from specfsm.decode.training.objective import distiller
from specfsm.decode.training.sampler import Corpus
from specfsm.decode.training.settings import Settings
from specfsm.decode.training.tiny import tiny_target
from specfsm.decode.weights import load_target

if TYPE_CHECKING:
    from rich.progress import Progress


def train(settings: Settings) -> Report:
    """Make the data, train, save the best head to ``settings.output``; return its held-out acceptance."""
    saved = restore(settings) if settings.resume else None
    torch.manual_seed(settings.seed)
    clock = Clock(settings)
    target, tokenizer = load(settings)
    with _progress() as progress:
        corpus, held_out = saved["data"] if saved else generate(settings, clock, target, tokenizer, progress)
        head = MTPHead(target.config, mlp_width=settings.mlp_width or None, attn_implementation=unroll.ATTENTION)
        head.to(target.device).attach(target).start_from(target)
        rows = distiller(target, settings.soft, settings.nextn, settings.chunk)
        trainer = Trainer(target, head, corpus, settings, rows)
        if settings.keep_states:
            trainer.keep_states()
            progress.console.print(f"states kept; {clock.spent:.0f} s")
        report = optimize(trainer, held_out, clock, progress, saved)
        _show(progress, report)
    return report


class Clock:
    """What is left of a run that is bounded by ``--minutes``."""

    RESERVE = 15.0
    """Seconds kept for the last evaluation."""

    def __init__(self, settings: Settings) -> None:
        self.began = time.monotonic()
        self.budget = settings.minutes * 60 or math.inf
        self.answers_end = self.began + self.budget * settings.answering
        self.end = self.began + max(self.budget - self.RESERVE, self.budget / 2)

    def asking_end(self, share: float) -> float:
        """When a share of what is left for answers is over."""
        now = time.monotonic()
        return now + share * (self.answers_end - now)

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began


def load(settings: Settings) -> tuple[Any, Any]:
    """Target and tokenizer, the training's attention functions registered."""
    sampler.install()
    unroll.install()
    if settings.tiny and not settings.target:
        target, tokenizer = tiny_target(settings.seed)
        return target.to(settings.device, torch.bfloat16 if settings.device != "cpu" else None), tokenizer
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    return load_target(settings.target or None, dtype=dtype, device=device, attn_implementation="sdpa")


def optimize(
    trainer: Trainer, held_out: Corpus, clock: Clock, progress: Progress, saved: dict[str, Any] | None = None
) -> Report:
    """Train to the last step or the deadline; keep the best head and return its report."""
    settings = trainer.settings
    limit = settings.steps or (sys.maxsize if settings.minutes else 3000)
    order = batches(trainer.corpus, settings.batch_tokens, settings.seed)
    began, done, resumed_at, best = clock.spent, 0, 0.0, Best(trainer, held_out)
    if saved:
        done, resumed_at = resume(trainer, best, saved)
        for _ in range(done):
            next(order)
    else:
        count = max(1, settings.batch_tokens // settings.length)
        fit_fuse(trainer, torch.randperm(len(trainer.corpus.lens))[:count])
        best.consider(0, progress)
    task = progress.add_task("training", total=1.0)
    while done < limit and time.monotonic() < clock.end:
        timed = (clock.spent - began) / (clock.end - clock.began - began)
        by_steps = settings.steps or not settings.minutes
        share = done / limit if by_steps else resumed_at + (1 - resumed_at) * timed
        loss, agreement = trainer.step(next(order), share)
        done += 1
        evaluated = done % settings.every == 0 and done < limit
        if done % 10 and not evaluated:
            continue  # reading the loss waits for the device
        agreed = " ".join(f"{rate:.3f}" for rate in agreement.tolist())
        line = f"step {done}  loss {float(loss):.3f}  agree {agreed}"
        progress.update(task, completed=share, description=line)
        if evaluated:
            progress.console.print(f"{line}  {clock.spent:.0f} s")
            best.consider(done, progress)
            save(best, done, share)
    best.consider(done, progress)
    save(best, done, 1.0)
    return best.report


class Best:
    """The best head so far by held-out tokens a forward at the largest nextn, written out at once."""

    def __init__(self, trainer: Trainer, held_out: Corpus) -> None:
        self.trainer, self.held_out = trainer, held_out
        self.mean = 0.0
        self.report: Report = {}

    def consider(self, step: int, progress: Progress) -> None:
        """Evaluate the head as it is, and save it if none was better."""
        settings, corpus = self.trainer.settings, self.trainer.corpus
        report = evaluate(self.trainer, self.held_out)
        means = [result.mean for result in report["all"].values()]
        progress.console.print(f"step {step}: tokens a forward {' '.join(f'{mean:.3f}' for mean in means)}")
        if means[-1] <= self.mean:
            return
        self.mean, self.report = means[-1], report
        facts = {
            "target": Path(self.trainer.target.config.name_or_path or "tiny").name,
            "nextn": settings.nextn,
            "seed": settings.seed,
            "steps": step,
            "documents": len(corpus.lens),
            "answer_tokens": corpus.answer_tokens,
            "tokens_per_forward": json.dumps([round(mean, 4) for mean in means]),
        }
        self.trainer.head.save(settings.output, facts)
        if settings.report:
            Path(settings.report).write_text(json.dumps(_as_json(facts, settings, report), indent=1))


def _as_json(facts: dict[str, object], settings: Settings, report: Report) -> object:
    kinds = {
        kind: {
            nextn: {
                "tokens_per_forward": round(result.mean, 4),
                "by_position": [round(p, 4) for p in result.by_position],
            }
            for nextn, result in results.items()
        }
        for kind, results in report.items()
    }
    return {"facts": facts, "settings": dataclasses.asdict(settings), "held_out": kinds}


# checkpoints


def save(best: Best, step: int, share: float) -> None:
    """Write the checkpoint, if one is wanted: it replaces the one before only once it is whole."""
    trainer, checkpoint = best.trainer, best.trainer.settings.checkpoint
    if not checkpoint:
        return
    partial = Path(checkpoint + ".partial")
    state = {
        "data": [dataclasses.asdict(trainer.corpus), dataclasses.asdict(best.held_out)],
        "head": trainer.head.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "step": step,
        "share": share,
        "best": best.mean,
        "report": {kind: {n: tuple(r) for n, r in results.items()} for kind, results in best.report.items()},
    }
    torch.save(state, partial)
    partial.rename(checkpoint)


def restore(settings: Settings) -> dict[str, Any]:
    """What `save` wrote. Raises `FileNotFoundError` or `ValueError`."""
    if not settings.checkpoint:
        raise ValueError("--resume goes on from a checkpoint: name its file with --checkpoint")
    if not Path(settings.checkpoint).is_file():
        raise FileNotFoundError(f"no checkpoint to resume from: {settings.checkpoint}")
    saved: dict[str, Any] = torch.load(settings.checkpoint, map_location="cpu", weights_only=True)
    saved["data"] = [Corpus(**fields) for fields in saved["data"]]
    return saved


def resume(trainer: Trainer, best: Best, saved: dict[str, Any]) -> tuple[int, float]:
    """Set head, optimizer and best report as they were; returns the steps done and their share of the run."""
    trainer.head.load_state_dict(saved["head"])
    trainer.optimizer.load_state_dict(saved["optimizer"])
    best.mean = saved["best"]
    best.report = {k: {n: Acceptance(*r) for n, r in results.items()} for k, results in saved["report"].items()}
    return saved["step"], saved["share"]


# what is shown


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())


def _show(progress: Progress, report: Report) -> None:
    from rich.table import Table

    nextns = list(report["all"])
    table = Table(title="held-out prompts, greedy", title_justify="left")
    table.add_column("kind")
    for nextn in nextns:
        table.add_column(f"tokens a forward, nextn {nextn}", justify="right")
    table.add_column(f"accepted by position, nextn {nextns[-1]}")
    for kind, results in report.items():
        rates = "  ".join(f"{rate:.3f}" for rate in results[nextns[-1]].by_position)
        table.add_row(kind, *(f"{results[nextn].mean:.3f}" for nextn in nextns), rates)
    progress.console.print(table)
