"""What a switch to the draft's cache and back costs: `specfsm` beside two hand-written ones and the floors.

    python -m benchmarks.phase_switch --device cuda --json phase_switch.json --plot phase_switch.svg
    python -m benchmarks.phase_switch --device cpu --batches 2 --rounds 1      # does it run, do the tables agree
    python -m benchmarks.phase_switch --read phase_switch.json --plot phase_switch.svg

Timed is one switch: the metadata becomes the draft's, all of its tables are what they must be, and the metadata is the
target's again. All contenders run in one process, in turns, on the same two caches of the same step, in which every
request gained TOKENS tokens and so a few rows crossed a page boundary:

- *generation 1*, *generation 2*: `benchmarks.handwritten`; neither skips a refill;
- *all stale*: `specfsm`, every input of both caches reported as moved, so that every row is staged again;
- *typical*: `specfsm`, the step as it is: blocks and lengths moved;
- *all stale, ahead*, *typical, ahead*: the same, where `target_prepare` is told the draft's batch, and so refreshes
  both caches' tables in one submission; the switch then finds it done;
- *nothing stale*: `specfsm`, the same step again;
- *empty launch*, *empty graph*, *copy*: one kernel that does nothing, a graph that holds it, and one copy to the device
  of the bytes that the step changed (a length of each request, the rows that grew);
- *batch object*: the `Batch` that describes a step, which an engine builds once for target and draft.

Columns: the host's time of the switch (Python and driver, nothing waited for; the device is idle before it, and the
target's part of the step was just done in the contender's own way); the host's time of a step, which is the target's
part and the switch, one after the other; and of a step its device time (between two events behind a sleeping kernel, so
that the host's time is hidden), launches, copies and bytes copied (from torch's profiler; without a GPU, torch
operations), and what the host executed: Python bytecodes and calls into C, which no noise moves. Times are medians in
µs, with quartiles. Before anything is timed the draft's tables of those that refill are compared, bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import asdict, define, frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.caches import Cache
from benchmarks.handwritten import TABLES, Generation1, Generation2, Metadata, Step
from specfsm.backends import named
from specfsm.backends.backend import Sizes
from specfsm.domain import INPUTS, Batch, Domain, Geometry
from specfsm.explain import text_table
from specfsm.orchestrator import Orchestrator

BACKENDS = ("trtllm", "flash_mla", "dsa", "deepseek_v4")
BATCHES = (1, 16, 64, 256, 1024)
WIDTH, PAGE, TOKENS = 64, 64, 3
POISON = -77777
SLEEP = 6_000_000  # cycles: 3 ms at 2 GHz, longer than any contender's host time
REFILLING = ("generation 1", "generation 2", "all stale", "all stale, ahead")
OURS = ("all stale", "all stale, ahead", "typical", "typical, ahead", "nothing stale")
DRAFT = Domain.DRAFT


class Holder:
    """An engine's attention metadata."""


class World:
    """Both caches of one backend and batch, the three ways to switch between them, and the step they are in.

    Args:
        name: of the backend.
        batch: requests.
        device: where the tables are.
        check: level of the orchestrator.
    """

    def __init__(self, name: str, batch: int, device: torch.device, check: str = "stamps") -> None:
        self.name, self.batch, self.device = name, batch, device
        latent = name in ("flash_mla", "dsa")
        shape: dict[str, Any] = {"tokens_per_block": PAGE, "max_blocks_per_seq": WIDTH, "kv_factor": 1 if latent else 2}
        shape["sliding_types"] = 2 if name == "deepseek_v4" else 1
        pinned = device.type == "cuda"
        self.caches = [
            Cache(
                Geometry(
                    blocks_in_primary_pool=batch * WIDTH + spare,
                    num_layers=layers,
                    index_scale=layers * shape["kv_factor"],
                    **shape,
                ),
                batch,
                seed=seed,
                pinned=pinned,
            )
            for seed, (layers, spare) in enumerate(((61, 4096), (1, 16)))
        ]
        target, draft = self.caches
        self.by_hand = {
            "generation 1": Generation1(Metadata(name, target, draft, batch, TOKENS, device)),
            "generation 2": Generation2(Metadata(name, target, draft, batch, TOKENS, device)),
        }
        # Three machines over the same caches: each sees a step once, and to report that everything moved has the next
        # refresh stage all rows.
        self.fsm, self.ahead_fsm, self.stale_fsm = (self._machine(check) for _ in range(3))
        self.requests = tuple(range(100, 100 + batch))
        self.tokens = (TOKENS,) * batch
        self.lens = torch.arange(batch) * 37 % (WIDTH * PAGE // 2) + 20
        self.changed_bytes = 0
        for _ in range(4):
            self.advance()
            self.prepare()
            self.switch()
            self.prepare_ahead()
            self.switch_ahead()

    def _machine(self, check: str) -> Orchestrator:
        backend, holder = named(self.name), Holder()
        target, draft = self.caches
        sizes = Sizes(max_sequences=self.batch, max_tokens=self.batch * TOKENS, max_draft_len=TOKENS - 1)
        backend.allocate(holder, target, draft, sizes, self.device)
        return Orchestrator(holder, backend=backend, target=target, draft=draft, check=check)

    def advance(self) -> None:
        """The next step: TOKENS more tokens a request; where no row would cross a page boundary the first one does.

        Where a row is full, another request took its place, whose prompt is short.
        """
        before = torch.where(self.lens < (WIDTH - 1) * PAGE, self.lens, PAGE)
        self.lens = before + TOKENS
        if not ((before - 1) // PAGE < (self.lens - 1) // PAGE).any():
            self.lens[0] = (before[0] - 1) // PAGE * PAGE + PAGE + 1
        for cache in self.caches:
            cache.reserve(self.lens)
        draft = self.caches[DRAFT]
        self.changed_bytes = 4 * self.batch + draft.blocks[0].nbytes * len(draft.changed) * draft.geometry.kv_factor
        owner = torch.arange(self.batch).repeat_interleave(TOKENS)
        position = self.lens[owner] - TOKENS + torch.arange(TOKENS).repeat(self.batch)
        self.step = Step(self.new_batch(), self.lens, owner, position)

    def new_batch(self) -> Batch:
        return Batch(self.requests, self.lens.tolist(), self.tokens)

    # The target's part of a step, which is not timed. Every contender finds its own just done, as in a decode loop.

    def prepare(self) -> None:
        self.fsm.target_prepare(self.step.batch)

    def prepare_ahead(self) -> None:
        self.ahead_fsm.target_prepare(self.step.batch, draft=self.step.batch)

    def prepare_stale(self, ahead: bool = False) -> None:
        """Everything is stale in both caches, and refreshed in the target's, or in both."""
        for name in INPUTS:
            self.stale_fsm.moved(name)
        self.stale_fsm.target_prepare(self.step.batch, draft=self.step.batch if ahead else None)

    def prepare_by_hand(self, generation: str) -> Callable[[], None]:
        switch = self.by_hand[generation]
        return lambda: switch.refill(switch.metadata, self.step)

    # Timed bodies.

    def switch(self) -> None:
        with self.fsm.draft_forward():
            pass

    def switch_ahead(self) -> None:
        with self.ahead_fsm.draft_forward():
            pass

    def switch_stale(self) -> None:
        with self.stale_fsm.draft_forward():
            pass

    def hand(self, generation: str) -> Callable[[], None]:
        switch = self.by_hand[generation]

        def body() -> None:
            switch.prepare_for_draft_forward(self.step)
            switch.restore_after_draft_forward()

        return body

    # Equality.

    def tables(self, contender: str) -> dict[str, Tensor]:
        """What stands in the draft's tables between switch and restore, poisoned before."""
        if contender in self.by_hand:
            switch = self.by_hand[contender]
            self._poison(vars(switch.metadata).items())
            switch.prepare_for_draft_forward(self.step)
            found = {name: getattr(switch.metadata, name).clone() for name in TABLES[self.name]}
            switch.restore_after_draft_forward()
            if "sliding_block_tables" in found:
                layers = self.caches[DRAFT].geometry.num_layers
                found["sliding_block_tables"] = found["sliding_block_tables"][:layers]
            return found
        fsm = self.stale_fsm
        ahead = contender.endswith("ahead")
        if not ahead:
            self.prepare_stale()
        self._poison((name, fsm.value(name, DRAFT)) for name in TABLES[self.name])
        if ahead:
            self.prepare_stale(ahead)
        return self._refreshed(fsm)

    def _refreshed(self, fsm: Orchestrator) -> dict[str, Tensor]:
        with fsm.draft_forward():
            return {name: getattr(fsm.metadata, name).clone() for name in TABLES[self.name]}

    def _poison(self, tensors: Any) -> None:
        kept = ("req_idx_per_token", "draft_req_idx_per_token")  # by hand it is refilled when the layout changes only
        for name, tensor in tensors:
            written = name.removeprefix("draft_") in TABLES[self.name]
            if written and not (name in kept and name in vars(self.by_hand["generation 1"].metadata)):
                tensor.fill_(POISON)

    def require_equal(self) -> None:
        found = {name: self.tables(name) for name in REFILLING}
        self.prepare()
        self.prepare_ahead()
        found["typical"] = self._refreshed(self.fsm)  # not poisoned: it may skip what is fresh
        found["typical, ahead"] = self._refreshed(self.ahead_fsm)
        for table in TABLES[self.name]:
            ours = found["all stale"][table]
            for other in found:
                if not torch.equal(ours, found[other][table]):
                    differs = int((ours != found[other][table]).sum())
                    raise SystemExit(f"{self.name}, batch {self.batch}: {table} of {other} differs in {differs}")
            if bool((ours == POISON).any()):
                raise SystemExit(f"{self.name}, batch {self.batch}: {table} was not written whole")


@frozen
class Contender:
    """What is timed: the target's part of a step, and the switch."""

    ready: Callable[[], None]
    body: Callable[[], None]

    def step(self) -> None:
        self.ready()
        self.body()


def contenders(world: World) -> dict[str, Contender]:
    """In the order in which they run each round; all see the same step."""

    def nothing() -> None:
        pass

    made = {name: Contender(world.prepare_by_hand(name), world.hand(name)) for name in world.by_hand}
    # The typical step first: it is the first that sees the new lengths and blocks.
    made["typical"] = Contender(world.prepare, world.switch)
    made["nothing stale"] = Contender(world.prepare, world.switch)
    made["typical, ahead"] = Contender(world.prepare_ahead, world.switch_ahead)
    made["all stale"] = Contender(world.prepare_stale, world.switch_stale)
    made["all stale, ahead"] = Contender(lambda: world.prepare_stale(ahead=True), world.switch_stale)
    made |= {name: Contender(nothing, body) for name, body in floors(world).items()}
    return made


def floors(world: World) -> dict[str, Callable[[], None]]:
    device = world.device
    size = max(1, world.changed_bytes)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros(size, dtype=torch.uint8, device=device)

    def copy() -> None:
        there.copy_(host, non_blocking=True)

    made = {"batch object": lambda: (world.new_batch(), None)[1], "copy": copy}
    if device.type != "cuda":
        return made
    from benchmarks.refresh import empty_launch

    launch = empty_launch(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return made | {"empty launch": lambda: (launch(), None)[1], "empty graph": graph.replay}


@define
class Samples:
    """Everything seen of one contender."""

    host: list[float] = attrs.field(factory=list)
    step: list[float] = attrs.field(factory=list)
    device: list[float] = attrs.field(factory=list)


def time_switch(contender: Contender, device: torch.device) -> float:
    """Microseconds of the host in the switch, the device idle before and never waited for within."""
    contender.ready()
    return time_host(contender.body, device)


def time_host(body: Callable[[], None], device: torch.device) -> float:
    wait(device)
    started = time.perf_counter_ns()
    body()
    return (time.perf_counter_ns() - started) / 1e3


def time_device(contender: Contender) -> float:
    """Microseconds of a step between events, all enqueued while the device sleeps."""
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP)
    start.record()
    contender.step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def sample(world: World, rounds: int, warm: int) -> dict[str, Samples]:
    """Host and device times of `rounds` steps of each kind, after `warm` that are not kept."""
    taking, found = contenders(world), {name: Samples() for name in contenders(world)}
    ways: dict[str, Callable[[Contender], float]] = {
        "host": lambda each: time_switch(each, world.device),
        "step": lambda each: time_host(each.step, world.device),
    }
    if world.device.type == "cuda":
        ways["device"] = time_device
    with no_collector():
        for turn in range(-warm, rounds):
            for way, timed in ways.items():
                world.advance()
                for name, contender in taking.items():
                    elapsed = timed(contender)
                    if turn >= 0:
                        getattr(found[name], way).append(elapsed)
    return found


# Counts.


@define
class Counts:
    """Of one step. `submissions` are what the host hands the driver; a graph is one and holds several launches."""

    submissions: int = 0
    launches: int = 0
    copies: int = 0
    copied_bytes: int = 0
    bytecodes: int = 0
    c_calls: int = 0


COPIES = ("aten::copy_", "aten::_to_copy", "aten::clone")
SUBMITS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch")


class OpCounter(TorchDispatchMode):
    """Counts torch operations, for a machine without a GPU: views are none, copies are counted apart."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in COPIES:
            self.counts.copies += 1
            self.counts.copied_bytes += result.nbytes
        elif not func.is_view:
            self.counts.launches += 1
        return result


def count(world: World, name: str, contender: Contender) -> Counts:
    """Each count of a step of its own: a typical step is typical once."""
    counts = Counts()

    def fresh() -> None:
        world.advance()
        if name == "nothing stale":
            world.prepare()
            world.switch()
        wait(world.device)

    fresh()
    if world.device.type == "cuda":
        _count_on_device(contender, counts)
    else:
        with OpCounter(counts):
            contender.step()
    fresh()
    counts.bytecodes = bytecodes(contender.step)
    fresh()
    counts.c_calls = c_calls(contender.step)
    return counts


def _count_on_device(contender: Contender, counts: Counts) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        contender.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    for event in events:
        kind, name = event.get("cat"), event.get("name", "")
        if kind in ("cuda_runtime", "cuda_driver") and name.startswith(SUBMITS):
            counts.submissions += 1
        elif kind in ("kernel", "gpu_memset"):
            counts.launches += 1
        elif kind == "gpu_memcpy":
            counts.copies += 1
            counts.copied_bytes += int(event["args"].get("bytes", 0))


def bytecodes(body: Callable[[], None]) -> int:
    """Python bytecodes that one call executes."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    def traced(run: Callable[[], None]) -> None:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            run()
        finally:
            sys.settrace(before)

    traced(lambda: None)  # Python 3.12 reports no bytecode to the first trace of a process
    count = 0
    traced(body)
    return count


def c_calls(body: Callable[[], None]) -> int:
    """Calls from Python into C that one call makes."""
    count = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "c_call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        body()
    finally:
        sys.setprofile(before)
    return count - 1  # the call that ends the profile


# Report.


Quartiles = tuple[float, float, float]


@define
class Row:
    """One contender at one batch. Times in µs, as (quartile, median, quartile): of the host in the switch and in
    a step, of the device in a step.
    """

    backend: str
    batch: int
    contender: str
    host: Quartiles
    step: Quartiles
    device: Quartiles | None
    counts: Counts


def quartiles(samples: Sequence[float]) -> Quartiles:
    if len(samples) < 2:
        return (samples[0],) * 3
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def measure(name: str, batch: int, device: torch.device, rounds: int, warm: int) -> list[Row]:
    world = World(name, batch, device)
    world.require_equal()
    samples = sample(world, rounds, warm)
    world.require_equal()
    return [
        Row(
            name,
            batch,
            each,
            quartiles(seen.host),
            quartiles(seen.step),
            quartiles(seen.device) if seen.device else None,
            Counts(),
        )
        for each, seen in samples.items()
    ]


def count_all(rows: Sequence[Row], device: torch.device) -> None:
    """Counts, after all times: once the profiler was used, every call of the driver takes longer for good."""
    for name, batch in dict.fromkeys((row.backend, row.batch) for row in rows):
        world = World(name, batch, device)
        for _ in range(12):  # until what comes again is recorded, for each side of the staging rings
            world.advance()
            world.prepare()
            world.switch()
            world.prepare_ahead()
            world.switch_ahead()
            for ahead in (False, True):
                world.prepare_stale(ahead)
                world.switch_stale()
        made = contenders(world)
        for row in rows:
            if (row.backend, row.batch) == (name, batch):
                row.counts = count(world, row.contender, made[row.contender])


def ratio(rows: Sequence[Row], row: Row, other: str, what: str = "host") -> float | None:
    """How many times the host's time of `other` in the switch, or in a step, is that of `row`."""
    for each in rows:
        if (each.backend, each.batch, each.contender) == (row.backend, row.batch, other):
            mine, its = getattr(row, what), getattr(each, what)
            return float(its[1] / mine[1])
    return None


HEAD = (
    "backend", "batch", "contender", "switch µs", "quartiles", "gen 1 /", "gen 2 /", "step µs", "quartiles", "gen 1 /",
    "gen 2 /", "device µs", "submits", "launches", "copies", "bytes", "bytecodes", "C calls",
)  # fmt: skip


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    lines = []
    for row in rows:
        counts = asdict(row.counts).values()
        times: list[str] = []
        for what, (low, middle, high) in (("host", row.host), ("step", row.step)):
            ratios = [ratio(rows, row, other, what) for other in ("generation 1", "generation 2")]
            times += [f"{middle:.1f}", f"{low:.1f} – {high:.1f}"]
            times += ["" if each is None else f"{each:.1f}" for each in ratios]
        lines.append(
            (
                row.backend,
                str(row.batch),
                row.contender,
                *times,
                "" if row.device is None else f"{row.device[1]:.1f}",
                *(str(each) for each in counts),
            )
        )
    return lines


AIMS: tuple[tuple[str, str, str, float], ...] = (
    ("dsa", "all stale", "generation 1", 10),
    ("dsa", "all stale", "generation 2", 4),
    ("dsa", "typical", "generation 1", 20),
    ("dsa", "typical", "generation 2", 8),
    ("dsa", "nothing stale", "generation 1", 40),
    ("dsa", "nothing stale", "generation 2", 15),
    ("flash_mla", "typical", "generation 1", 8),
    ("flash_mla", "typical", "generation 2", 4),
)
"""At batch 64: (backend, contender, against what, how many times less host time in the switch)."""
GROWTH = 1.5
"""Typical step: host time of batch 1024 over that of batch 64, at most."""
AIM = ("aim", "wanted", "switch", "", "step")


def verdicts(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """What was aimed at and what came out of the switch, as far as the batches were run; beside it the whole step's."""
    by = {(row.backend, row.batch, row.contender): row for row in rows}
    if any(row.device is None for row in rows):
        return []  # the aims are a GPU's
    lines = []
    for backend, contender, other, aim in AIMS:
        for way in ("", ", ahead"):
            row = by.get((backend, 64, contender + way))
            found = [ratio(rows, row, other, what) if row else None for what in ("host", "step")]
            if found[0] is not None and found[1] is not None:
                what = f"{backend}, batch 64, {contender}{way}, against {other}"
                verdict = "met" if found[0] >= aim else "missed"
                lines.append((what, f"≥ {aim:.0f} ×", f"{found[0]:.1f} ×", verdict, f"{found[1]:.1f} ×"))
    for backend, way in ((backend, way) for backend in BACKENDS for way in ("typical", "typical, ahead")):
        small, large = (by.get((backend, batch, way)) for batch in (64, 1024))
        if small and large:
            growth, of_step = large.host[1] / small.host[1], large.step[1] / small.step[1]
            verdict = "met" if growth <= GROWTH else "missed"
            what = f"{backend}, {way}, batch 1024 / 64"
            lines.append((what, f"≤ {GROWTH} ×", f"{growth:.2f} ×", verdict, f"{of_step:.2f} ×"))
    return lines


def report(rows: Sequence[Row], device: torch.device) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    if device.type == "cuda":
        import triton

        versions["triton"] = triton.__version__
    return {
        "command": sys.argv,
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "processors": os.cpu_count(),
        "versions": versions,
        "tokens": TOKENS,
        "width": WIDTH,
        "rows": [asdict(row) for row in rows],
    }


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    facts = json.loads(path.read_text())
    rows = [Row(**{**row, "counts": Counts(**row["counts"])}) for row in facts["rows"]]
    return facts, rows


STYLES = {
    "generation 1": ("#b22222", "-"), "generation 2": ("#e08214", "-"), "all stale": ("#08306b", "-"),
    "all stale, ahead": ("#08306b", "--"), "typical": ("#2171b5", "-"), "typical, ahead": ("#2171b5", "--"),
    "nothing stale": ("#6baed6", "-"), "empty launch": ("#888888", ":"), "copy": ("#444444", ":"),
}  # fmt: skip
"""Contender → colour and line."""


def draw(axis: Any, rows: Sequence[Row], what: str) -> None:
    """One contender in one panel: medians, and a band between the quartiles."""
    if not rows:
        return
    contender = rows[0].contender
    colour, line = STYLES[contender]
    at, times = [row.batch for row in rows], [getattr(row, what) for row in rows]
    label = f"specfsm, {contender}" if contender in OURS else contender
    low, middle, high = zip(*times, strict=True)
    axis.plot(at, middle, line, color=colour, marker=".", label=label)
    axis.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)


def plot(rows: Sequence[Row], path: Path) -> None:
    """The host's time over batch, in the switch above and in a step below, a panel for each backend. Without matplotlib
    it says so and draws nothing."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install specfsm[docs])", file=sys.stderr)
        return
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "specfsm", "font.size": 9})
    from matplotlib import pyplot

    backends = list(dict.fromkeys(row.backend for row in rows))
    size = (3.2 * len(backends), 6.0)
    figure, axes = pyplot.subplots(2, len(backends), figsize=size, sharey="row", sharex=True, squeeze=False)
    for line, what in enumerate(("host", "step")):
        for axis, backend in zip(axes[line], backends, strict=True):
            for contender in STYLES:
                draw(axis, [row for row in rows if (row.backend, row.contender) == (backend, contender)], what)
            batches = sorted({row.batch for row in rows})
            axis.set(xscale="log", yscale="log")
            axis.set_xticks(batches, [str(each) for each in batches], minor=False)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    for axis, backend in zip(axes[0], backends, strict=True):
        axis.set(title=backend)
    for axis in axes[1]:
        axis.set(xlabel="batch")
    axes[0][0].set_ylabel("host, switch and back, µs")
    axes[1][0].set_ylabel("host, the target's part too, µs")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def show(rows: Sequence[Row]) -> None:
    print(text_table(HEAD, cells(rows)))
    aims = verdicts(rows)
    if aims:
        print("\n" + text_table(AIM, aims))


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--backends", type=lambda text: text.split(","), default=list(BACKENDS))
    parser.add_argument("--batches", type=lambda text: [int(each) for each in text.split(",")], default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=41, help="steps that are timed (%(default)s)")
    parser.add_argument("--warm", type=int, default=16, help="steps before them (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw host times over batch")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing: show an earlier run's figures")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    if options.read:
        _, rows = read(options.read)
    else:
        device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
        torch.set_num_threads(1)
        rows = []
        for name in options.backends:
            for batch in options.batches:
                rows += measure(name, batch, device, options.rounds, options.warm)
                if options.json:  # each time: a run that is cut short leaves what it had
                    options.json.write_text(json.dumps(report(rows, device), indent=1))
        count_all(rows, device)
        facts = report(rows, device)
        if options.json:
            options.json.write_text(json.dumps(facts, indent=1))
        print(f"{facts['card']}, {facts['versions']}\n")
    show(rows)
    if options.plot:
        plot(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
