"""What a training run depends on, and the options of ``specfsm train-draft``. Nothing here needs torch."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any, cast


def _option(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Settings:
    """What a run depends on. Each field is an option of the command line."""

    target: str = _option("", "transformers folder or GGUF file of the target (default: SmolLM2-135M-Instruct)")
    output: str = _option("draft_head.safetensors", "where the best head goes, each time it gets better")
    report: str = _option("", "JSON file for the acceptance on held-out prompts")
    checkpoint: str = _option("", "file to save progress in at each evaluation")
    resume: bool = _option(False, "go on from --checkpoint, with the answers and the head that it holds")
    device: str = _option("", "cuda or cpu (default: cuda if there is one)")
    seed: int = _option(0, "seed of prompts, answers and order")
    minutes: float = _option(0.0, "stop after so many minutes in all, answers included (default: no bound)")
    prompts: int = _option(60_000, "prompts to answer")
    asked: float = _option(0.4, "share of the prompts that the target writes itself")
    greedy: float = _option(0.75, "share of the prompts answered greedily; the others at --temperature")
    temperature: float = _option(0.7, "temperature of the other answers")
    answering: float = _option(0.25, "share of --minutes after which answering stops")
    held_out: int = _option(504, "held-out prompts, answered greedily")
    length: int = _option(384, "longest document, prompt and answer, in tokens")
    batch: int = _option(4096, "documents answered at once")
    steps: int = _option(0, "optimizer steps (default: what --minutes allows, else 3000)")
    batch_tokens: int = _option(24_576, "padded tokens a step")
    chunk: int = _option(4096, "rows of logits at once")
    rate: float = _option(0.02, "peak learning rate, relative to each parameter's size")
    soft: float = _option(0.7, "weight of the target's distribution against its argmax")
    decay: float = _option(0.9, "weight of each further draft step")
    keep_states: bool = _option(
        False, "keep the target's states of all answers on the device: twice as fast, if they fit"
    )
    nextn: int = _option(3, "draft steps to unroll")
    mlp_width: int = _option(0, "width of the head's MLP (default: the target's)")
    every: int = _option(500, "steps between evaluations")
    tiny: bool = _option(False, "a small random target on the CPU, in a minute: a test of the code")


GROUPS = {
    "models and files": ("target", "output", "report", "checkpoint", "resume", "device"),
    "how long": ("minutes", "steps", "every", "seed", "tiny"),
    "data": ("prompts", "asked", "greedy", "temperature", "answering", "held_out", "length", "batch"),
    "training": ("nextn", "mlp_width", "keep_states", "batch_tokens", "chunk", "rate", "soft", "decay"),
}
"""The options as ``--help`` shows them."""

TINY = {
    "device": "cpu",
    "prompts": 96,
    "held_out": 18,
    "length": 192,
    "batch": 48,
    "steps": 60,
    "batch_tokens": 2048,
    "chunk": 512,
    "every": 30,
}

EXAMPLES = """\
  specfsm train-draft --tiny                       does it run here? a minute on a CPU, nothing worth keeping
  specfsm train-draft --minutes 5.5 --mlp-width 2304 --keep-states
                                                   the shipped head's run, on one H200
  specfsm train-draft --target MODEL --output head.safetensors --checkpoint progress
                                                   a head for another Llama model
  specfsm train-draft --target MODEL --output head.safetensors --checkpoint progress --resume
                                                   go on with it
  specfsm decode --target MODEL --draft mtp:head.safetensors --verify
                                                   use it"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser one option for each field of `Settings`."""
    options = {option.name: option for option in dataclasses.fields(Settings)}
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            flag, default = "--" + name.replace("_", "-"), options[name].default
            meaning = options[name].metadata["meaning"]
            if isinstance(default, bool):
                group.add_argument(flag, action="store_true", help=meaning)
                continue
            shown = "" if default in ("", 0) or "default" in meaning else " (%(default)s)"
            metavar = {str: "FILE", int: "N", float: "X"}[type(default)]
            group.add_argument(flag, type=type(default), default=default, metavar=metavar, help=meaning + shown)


def from_arguments(arguments: argparse.Namespace) -> Settings:
    """The settings that a parser with `add_arguments` has read."""
    settings = Settings(**{option.name: getattr(arguments, option.name) for option in dataclasses.fields(Settings)})
    return shrink(settings) if settings.tiny else settings


def shrink(settings: Settings) -> Settings:
    """The settings of a ``--tiny`` run, but for those that were given."""
    left = {name: value for name, value in TINY.items() if getattr(settings, name) == getattr(Settings, name)}
    return dataclasses.replace(settings, **cast("dict[str, Any]", left))
