"""What each check level costs a decode step: off, stamps, tensors, contents, in one process.

    python -m benchmarks.levels
    python -m benchmarks.levels --backend dsa --device cuda --json levels.json

Four loops decode the same prompt with the same weights, in lockstep: a step of each in turn, in an order that rotates,
so that whatever else the machine does falls on all four alike. They differ in the check level alone. What a level costs
is told twice: as the ratio of the same step in two loops, which has all the noise of a model's forward in it; and as
the time inside the machine's events, less that of "off", over a step of "off". The aims are judged by the second. The
tokens must be the same, and nothing may be found.
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
            trace = runner.loop.fsm.trace
            runner.events.append(sum(each.end_ns - each.start_ns for each in trace))
            trace.clear()
        turn += 1
    for runner in runners:
        # Without the first step, which prefills; a warm-up counts for nothing at all.
        for times in (runner.steps, runner.events):
            del times[len(times) - turn : len(times) - turn + 1 if counted else None]
        runner.loop.fsm.settle()
        assert runner.tokens == runners[0].tokens, f"{runner.name} writes other tokens"
        assert not runner.loop.fsm.violations, f"{runner.name} finds {runner.loop.fsm.violations[0]}"


def report(runners: Sequence[Runner]) -> dict[str, Any]:
    """Print the table; the figures."""
    off, rows = runners[0], {}
    print("| level | ms a step (quartiles) | over off (quartiles) | ms in events (quartiles) | of a step | aim |")
    print("|---|---|---|---|---|---|")
    step, least = (quartiles([each / 1e6 for each in times])[1] for times in (off.steps, off.events))
    for runner in runners:
        steps, events = (quartiles([each / 1e6 for each in times]) for times in (runner.steps, runner.events))
        ratios = quartiles([own / other for own, other in zip(runner.steps, off.steps, strict=True)])
        share, aim = (events[1] - least) / step, AIMS.get(runner.name)
        rows[runner.name] = {"step_ms": steps, "over_off": ratios, "event_ms": events, "share": share, "aim": aim}
        judged = "" if aim is None else f"under {aim:.0%}: {'met' if share < aim else 'missed'}"
        cells = (f"{middle:.3f} ({low:.3f} to {high:.3f})" for low, middle, high in (steps, ratios, events))
        print(f"| `{runner.name}` | {' | '.join(cells)} | {share:.3%} | {judged} |")
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
