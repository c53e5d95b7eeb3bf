"""What each check level costs a decode step: off, stamps, tensors, contents, in one process.

    python -m benchmarks.levels
    python -m benchmarks.levels --backend dsa --device cuda --json levels.json

Four loops decode the same prompt with the same weights, in lockstep: a step of each in turn, in an order that rotates,
so that whatever else the machine does falls on all four alike. They differ in the check level alone. Ratios are of the
same step in two loops; the share of a step is what a level takes longer than "off", over that. The tokens must be the
same, and nothing may be found.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.decode import Runner, options_of, prepare, quartiles
from specfsm.decode.loop import DecodeLoop
from specfsm.verify import Check

LEVELS = tuple(level.name.lower() for level in Check)
AIMS = {"stamps": 0.01, "tensors": 0.03}
"""Level → what it may take of a step."""


def measure(runners: Sequence[Runner], prompt: list[int], new: int, *, counted: bool) -> None:
    """Decode a prompt in all loops, a step of each in turn."""
    for runner in runners:
        runner.loop.submit(prompt, new)
    turn = 0
    while any(runner.loop.running or runner.loop.waiting for runner in runners):
        first = turn % len(runners)
        for runner in (*runners[first:], *runners[:first]):
            runner.step()
        turn += 1
    for runner in runners:
        # Without the first step, which prefills; a warm-up counts for nothing at all.
        del runner.steps[len(runner.steps) - turn : len(runner.steps) - turn + 1 if counted else None]
        runner.loop.fsm.settle()
        assert runner.tokens == runners[0].tokens, f"{runner.name} writes other tokens"
        assert not runner.loop.fsm.violations, f"{runner.name} finds {runner.loop.fsm.violations[0]}"


def report(runners: Sequence[Runner]) -> dict[str, Any]:
    """Print the table; the figures."""
    off, rows = runners[0], {}
    print("| level | ms a step (quartiles) | over off (quartiles) | of a step | aim |\n|---|---|---|---|---|")
    for runner in runners:
        low, middle, high = quartiles([each / 1e6 for each in runner.steps])
        ratios = quartiles([own / other for own, other in zip(runner.steps, off.steps, strict=True)])
        aim = AIMS.get(runner.name)
        rows[runner.name] = {"step_ms": (low, middle, high), "over_off": ratios, "aim": aim}
        over = "–" if runner is off else f"{ratios[1]:.4f} ({ratios[0]:.4f} to {ratios[2]:.4f})"
        share = "–" if runner is off else f"{ratios[1] - 1:.2%}"
        judged = "" if aim is None else f"under {aim:.0%}: {'met' if ratios[1] - 1 < aim else 'missed'}"
        print(f"| `{runner.name}` | {middle:.2f} ({low:.2f} to {high:.2f}) | {over} | {share} | {judged} |")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_of(parser)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    target, draft, settings, prompt = prepare(options)
    runners = [Runner(level, DecodeLoop(target, draft, settings, check=level)) for level in LEVELS]
    for turn in range(options.rounds + 1):
        measure(runners, prompt, options.new_tokens, counted=turn > 0)
    versions = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    print(f"{options.backend}, draft {options.draft}, {len(runners[0].steps)} steps of each; {versions}\n")
    rows = report(runners)
    if options.json:
        facts = {"options": {**vars(options), "json": None}, "versions": versions, "rows": rows}
        options.json.write_text(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
