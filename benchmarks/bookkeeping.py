"""What the state machine costs: a trigger compiled and through `transitions`, and a whole step with nothing stale.

    python -m benchmarks.bookkeeping
    python -m benchmarks.bookkeeping --json bookkeeping.json

Trigger: one event of the phase table, without a protocol around it, through the compiled mapping and through the
`transitions` machine that it was compiled from, in one process, in turns. Step: `target_prepare`, `draft_forward` and
the `restore` that leaves it, of a bound orchestrator whose inputs do not move, so that what is timed is bookkeeping
alone: admission, record of the originals, rebinding there and back, stamps, trace. The ten-resource backend has no
`Shared` resource, which is never proven unnecessary: its contents are copied at each switch, whatever moved.

Each figure is the median over `--rounds` rounds of the mean of a loop. CPU, one thread; nothing is launched.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transitions
from attrs import asdict, frozen

from specfsm.backends.backend import Backend, Sizes
from specfsm.backends.flash_mla import FlashMLA
from specfsm.backends.resource import Alias, Cache, DomainView, Plan, Pointer, Staged, Table
from specfsm.backends.trtllm import Trtllm
from specfsm.domain import AddressSpace, Batch, Geometry, Unit
from specfsm.explain import text_table
from specfsm.kernels.recipes import GatherTable
from specfsm.orchestrator import Orchestrator
from specfsm.states.machine import Compiled, build, compile_machine
from specfsm.states.phase import PHASE

CYCLE = ("target_prepare", "draft_forward", "draft_step", "restore")
"""Events that lead round and round."""


@frozen
class Figure:
    """One measured time.

    Args:
        what: what was timed.
        us: microseconds, median over the rounds.
        spread_us: from the fastest round to the slowest.
        aim: what it should be, in words.
    """

    what: str
    us: float
    spread_us: tuple[float, float]
    aim: str = ""


def timed(body: Callable[[], Any], rounds: int, repeats: int, calls: int = 1) -> tuple[float, tuple[float, float]]:
    """Median, fastest and slowest round of the mean time of one call, in microseconds. `calls`: calls in one body."""
    body()
    means = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(repeats):
            body()
        means.append((time.perf_counter() - started) / repeats / calls * 1e6)
    return statistics.median(means), (min(means), max(means))


# Triggers.


def triggers(rounds: int) -> list[Figure]:
    machine = build(PHASE)
    compiled = Compiled(PHASE, compile_machine(machine, PHASE))
    fire = compiled.fire
    through = [getattr(machine.model, event) for event in CYCLE]

    def fast() -> None:
        fire("target_prepare")
        fire("draft_forward")
        fire("draft_step")
        fire("restore")

    def slow() -> None:
        for event in through:
            event()

    def empty() -> None:
        pass

    idle, _ = timed(empty, rounds, 5000, len(CYCLE))
    ours, ours_spread = timed(fast, rounds, 5000, len(CYCLE))
    theirs, theirs_spread = timed(slow, rounds, 200, len(CYCLE))
    ratio = (theirs - idle) / (ours - idle)
    return [
        Figure("trigger, compiled", ours - idle, ours_spread, "under 1 µs"),
        Figure("trigger, transitions", theirs - idle, theirs_spread, f"{ratio:.0f} times ours; at least 5"),
        Figure("a step's three triggers, transitions, no protocol", 3 * (theirs - idle), (0.0, 0.0)),
    ]


# Steps.


class Manager:
    """A KV manager that holds still."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.generation = 1
        self.blocks_version = 1
        shape = (1, 4, geometry.kv_factor, geometry.max_blocks_per_seq)
        self.host_block_offsets = torch.zeros(shape, dtype=torch.int32)
        self.pool_pointers = (4096,)

    def arrange(self, request_ids: Sequence[int]) -> Sequence[int]:
        return range(len(request_ids))


class Metadata:
    """An engine's attention metadata."""


def fill(view: DomainView, host: torch.Tensor) -> torch.Tensor:
    return host.fill_(len(view.batch or ()))


SLOTS, ENTRIES, ROWS = (AddressSpace("kv", unit) for unit in (Unit.SLOT, Unit.ENTRY, Unit.ROW))


def ten() -> Backend:
    """Ten resources of every kind that can be proven fresh."""
    table: dict[str, Any] = {"dtype": "int32", "shape": ("S", "B"), "space": SLOTS, "reads": ("base", "rows")}
    recipe = GatherTable(base="base", rows="rows", unit=Unit.SLOT)
    base: dict[str, Any] = {"dtype": "int32", "shape": ("P", "R", "Q", "B"), "space": ENTRIES, "attribute": None}
    rows: dict[str, Any] = {"dtype": "int32", "shape": ("S",), "sentinel": -1, "host_attribute": "host_rows"}
    return Backend(
        "ten",
        (
            Pointer("manager_ref", reads=("manager",), of=lambda view: view.manager),
            Pointer("num_contexts", reads=("batch",), of=lambda view: view.batch.num_contexts if view.batch else 0),
            Staged("base", reads=("manager", "blocks", "batch"), fill=fill, **base),
            Staged("rows", reads=("manager", "blocks", "batch"), fill=fill, space=ROWS, **rows),
            Staged("kv_lens", reads=("batch", "lengths"), fill=fill, dtype="int32", shape=("S",), sentinel=0),
            Alias("kv_lens_runtime", of="kv_lens", reads=("batch",), derive=lambda lens, view: lens[: len(view.batch)]),
            Table("block_ids", recipe=recipe, **table),
            Table("kv_block_ids", recipe=recipe, **table),
            Plan("schedule", reads=("manager", "batch", "lengths", "layout")),
            Cache("layouts", reads=("manager",)),
        ),
    )


def bound(backend: Backend, kv_factor: int, check: str) -> Orchestrator:
    """An orchestrator over managers that hold still."""
    facts: dict[str, Any] = {"tokens_per_block": 4, "max_blocks_per_seq": 8, "kv_factor": kv_factor}
    target = Manager(Geometry(blocks_in_primary_pool=64, num_layers=4, **facts))
    draft = Manager(Geometry(blocks_in_primary_pool=32, num_layers=1, **facts))
    metadata = Metadata()
    backend.allocate(metadata, target, draft, Sizes(max_sequences=4, max_tokens=16), "cpu")
    return Orchestrator(metadata, backend=backend, target=target, draft=draft, check=check)


def step(rounds: int, backend: Backend, kv_factor: int, *, check: str = "stamps", aim: str = "") -> Figure:
    fsm = bound(backend, kv_factor, check)
    batch = Batch((1, 2, 3), kv_lens=(9, 9, 9), tokens=(1, 1, 1))

    def body() -> None:
        fsm.target_prepare(batch)
        with fsm.draft_forward(batch):
            pass

    body()
    fsm.trace.clear()
    body()
    refreshed = [one.refreshed for one in fsm.trace]
    assert refreshed == [0, 0, 0], f"something was stale: {refreshed}"
    us, spread = timed(body, rounds, 1000)
    what = f"step, {len(backend.resources)} resources ({backend.name}), checks {check}"
    return Figure(what, us, spread, aim)


def figures(rounds: int) -> list[Figure]:
    return [
        *triggers(rounds),
        step(rounds, ten(), 2, aim="under 5 µs"),
        step(rounds, ten(), 2, check="off"),
        step(rounds, ten(), 2, check="tensors"),
        step(rounds, Trtllm(), 2),
        step(rounds, FlashMLA(), 1),
    ]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=21, help="rounds of each measurement (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    measured = figures(arguments.rounds)
    rows = [
        (each.what, f"{each.us:.2f}", f"{each.spread_us[0]:.2f} – {each.spread_us[1]:.2f}", each.aim)
        for each in measured
    ]
    print(text_table(("what", "µs, median", "fastest – slowest", "aim"), rows))
    versions = {"python": platform.python_version(), "transitions": transitions.__version__}
    print(f"\n{platform.processor() or platform.machine()}, {versions}")
    if arguments.json:
        report = {"command": sys.argv, "versions": versions, "figures": [asdict(each) for each in measured]}
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
