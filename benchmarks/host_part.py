"""The host's part of a switch alone: what `benchmarks.phase_switch` times, with everything handed to a device left out.

    python -m benchmarks.host_part

A refresh that comes again is recorded and replayed: here the recording is empty, so a replay costs nothing and writes
nothing. What remains is what the host executes before and after: events, ledger, staging, the exchange of the values.

Times are medians in µs of a switch after a step of the target, as in `benchmarks.phase_switch`: caches are cold. What
the host executes no noise moves: Python bytecodes, and calls from Python into C.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, frozen

from benchmarks.phase_switch import OURS, Contender, World, bytecodes, c_calls, contenders, no_collector
from specfsm.explain import text_table

CASES = (("dsa", 64), ("dsa", 1024), ("flash_mla", 64), ("flash_mla", 1024), ("trtllm", 64), ("trtllm", 1024))


class EmptyRecorder:
    """Records that there is something to replay, and not what."""

    def capturing(self) -> bool:
        return False

    def record(self, issue: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


class HostWorld(World):
    """The caches of one backend and batch, and a machine whose device does nothing once a refresh has come again."""

    def __init__(self, name: str, batch: int) -> None:
        super().__init__(name, batch, torch.device("cpu"))
        recorder: Any = EmptyRecorder()
        for fsm in (self.fsm, self.ahead_fsm, self.stale_fsm):
            fsm.refresher.recorder = recorder
        for _ in range(8):  # until it has
            for contender in OURS:
                self.ready(contender)()

    def upcoming(self, contender: str) -> Contender:
        """The next step of this kind."""
        if contender != "nothing stale":
            self.advance()
        return contenders(self)[contender]

    def ready(self, contender: str) -> Callable[[], None]:
        """The target's part of it, done; what is left is the switch."""
        made = self.upcoming(contender)
        made.ready()
        return made.body


@frozen
class Row:
    """What the host does in one switch, and in one step: the target's part and the switch. Times in µs."""

    backend: str
    batch: int
    contender: str
    host: float
    bytecodes: int
    c_calls: int
    step: float
    step_bytecodes: int
    step_c_calls: int


def measure(name: str, batch: int, rounds: int) -> list[Row]:
    world, rows = HostWorld(name, batch), []
    for contender in OURS:
        with no_collector():
            switch = measured(lambda contender=contender: world.ready(contender), rounds)  # type: ignore[misc]
            step = measured(lambda contender=contender: world.upcoming(contender).step, rounds)  # type: ignore[misc]
        rows.append(Row(name, batch, contender, *switch, *step))
    return rows


def measured(ready: Callable[[], Callable[[], None]], rounds: int) -> tuple[float, int, int]:
    """Median of `rounds` calls, each of another one that was made ready; bytecodes and C calls of one."""
    times = []
    for _ in range(rounds):
        body = ready()
        started = time.perf_counter_ns()
        body()
        times.append((time.perf_counter_ns() - started) / 1e3)
    return statistics.median(times), bytecodes(ready()), c_calls(ready())


HEAD = ("backend", "batch", "contender", "switch µs", "bytecodes", "C calls", "step µs", "bytecodes", "C calls")


def show(rows: Sequence[Row]) -> str:
    return text_table(
        HEAD,
        [
            (
                row.backend,
                str(row.batch),
                row.contender,
                f"{row.host:.1f}",
                str(row.bytecodes),
                str(row.c_calls),
                f"{row.step:.1f}",
                str(row.step_bytecodes),
                str(row.step_c_calls),
            )
            for row in rows
        ],
    )


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200, help="steps that are timed (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    torch.set_num_threads(1)
    rows = [row for name, batch in CASES for row in measure(name, batch, options.rounds)]
    print(show(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
