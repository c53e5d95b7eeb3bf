"""What the switch is of a decode step whose whole step is one CUDA graph: with the machine, by hand, and without any.

    python -m benchmarks.whole_loop --target MODEL.gguf --draft mtp --json whole_loop.json
    python -m benchmarks.whole_loop --device cpu --tiny --batches 2 --blocks 1   # does it run, are the tokens the same

Four loops decode the same requests with the same weights (`trtllm`, batch-ordered managers), in turns of BLOCK steps:

- *machine*: the orchestrator, checks at ``stamps``; *unchecked*: the same with checks ``off``;
- *generation 2*: `Generation2` below, which rebinds and refills everything at every phase, as engines do;
- *none*: nothing is switched or refilled: what is left is the scheduler and the replay. Right until a page is added, so
  its tokens are not compared; those of the others must be the same.

Columns, medians over the blocks: a step (wall time over a block, the device waited for at its ends only, so that with
overlap host and device do overlap); of that, the host's time in the switch (`target_prepare`, and entering and leaving
`draft_replay`); what the device is busy in a step (the union of its kernels and copies, from torch's profiler, after
all times were taken, since it slows the host for good) and so the fraction of a step in which it idles. Without a GPU
the last two are not measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, define, field, frozen

from benchmarks.h200 import PROMPTS, NoSwitch
from specfsm.decode.loop import DecodeLoop, Settings
from specfsm.decode.model import Model, make_draft
from specfsm.decode.training.prompts import encode
from specfsm.domain import Batch, Domain
from specfsm.explain import text_table
from specfsm.orchestrator import Orchestrator

BLOCK = 10
WARM = 10
CONTENDERS = ("machine", "unchecked", "generation 2", "none")
COMPARED = CONTENDERS[:-1]
TWO_MS = 2000.0
"""The step of which checks may cost one percent, in µs."""


class Window:
    """What `draft_replay` returns: entering was done; leaving is `leave`."""

    def __init__(self, leave: Any) -> None:
        self.leave = leave

    def __enter__(self) -> None:
        """Nothing: the switch was done when the window was made."""

    def __exit__(self, *_: object) -> None:
        self.leave()


class Generation2:
    """Twins, rebound and refilled at each phase; see `benchmarks.handwritten`. Source buffers are pinned, and two deep.

    Args:
        fsm: whose buffers and managers it takes over; its machine is not asked any more.
    """

    def __init__(self, fsm: Orchestrator) -> None:
        self.metadata = fsm.metadata
        self.sides = [self._side(fsm, domain) for domain in Domain]

    @staticmethod
    def _side(fsm: Orchestrator, domain: Domain) -> dict[str, Any]:
        names = ("kv_cache_block_offsets", "kv_lens_cuda", "_seq_lens_cuda")
        buffers = {name: fsm.value(name, domain) for name in names}
        pin = buffers["kv_lens_cuda"].is_cuda
        hosts = [
            {name: torch.zeros(each.shape, dtype=each.dtype, pin_memory=pin) for name, each in buffers.items()}
            for _ in range(2)
        ]
        return {"manager": fsm.value("kv_cache_manager", domain), "buffers": buffers, "hosts": hosts}

    def target_prepare(self, batch: Batch, **_: Any) -> None:
        self._enter(self.sides[Domain.TARGET], batch)

    def draft_replay(self, graph: Any, batch: Batch) -> Window:
        self._enter(self.sides[Domain.DRAFT], batch)
        return Window(lambda: self._rebind(self.sides[Domain.TARGET], len(batch)))

    def _enter(self, side: dict[str, Any], batch: Batch) -> None:
        live = len(batch)
        self._rebind(side, live)
        side["hosts"].reverse()
        host, device = side["hosts"][0], side["buffers"]
        side["manager"].arrange(batch.request_ids)
        table = side["manager"].host_block_offsets[:, :live]
        torch.clamp(table, min=0, out=host["kv_cache_block_offsets"][:, :live])  # no page: page 0, as upstream
        host["kv_lens_cuda"][:live] = torch.tensor(batch.kv_lens)
        host["_seq_lens_cuda"][:live] = torch.tensor(batch.tokens)
        for name, buffer in device.items():
            buffer.copy_(host[name], non_blocking=True)

    def _rebind(self, side: dict[str, Any], live: int) -> None:
        metadata, buffers = self.metadata, side["buffers"]
        metadata.kv_cache_manager = side["manager"]
        metadata.host_kv_cache_block_offsets = side["manager"].host_block_offsets
        metadata.host_kv_cache_pool_pointers = side["manager"].pool_pointers
        for name, buffer in buffers.items():
            setattr(metadata, name, buffer)
        metadata.kv_lens, metadata._seq_lens = side["hosts"][0]["kv_lens_cuda"], side["hosts"][0]["_seq_lens_cuda"]
        metadata.kv_lens_cuda_runtime = buffers["kv_lens_cuda"][:live]
        metadata._seq_lens_cuda_runtime = buffers["_seq_lens_cuda"][:live]
        metadata.num_contexts = 0


class Clocked:
    """Another switch, and the host's time in it.

    Args:
        fsm: the machine, for whatever else the loop asks of it.
        switch: what prepares and enters a replay; by default the machine.
    """

    def __init__(self, fsm: Orchestrator, switch: Any = None) -> None:
        self.fsm, self.switch, self.ns = fsm, switch or fsm, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fsm, name)

    def target_prepare(self, batch: Batch, **ahead: Any) -> None:
        started = time.perf_counter_ns()
        self.switch.target_prepare(batch, **ahead)
        self.ns += time.perf_counter_ns() - started

    def draft_replay(self, graph: Any, batch: Batch) -> Window:
        started = time.perf_counter_ns()
        window = self.switch.draft_replay(graph, batch)
        window.__enter__()
        self.ns += time.perf_counter_ns() - started

        def leave() -> None:
            started = time.perf_counter_ns()
            window.__exit__(None, None, None)
            self.ns += time.perf_counter_ns() - started

        return Window(leave)

    def finish(self) -> None:
        """The contender's machine was not told of every phase, so it is not told of the end."""


@define
class Runner:
    """One loop, and what its blocks took, in µs a step."""

    loop: DecodeLoop
    clock: Clocked
    tokens: dict[int, list[int]] = field(factory=dict)
    steps: list[float] = field(factory=list)
    switch: list[float] = field(factory=list)

    def block(self, steps: int) -> None:
        wait(self.loop)
        self.clock.ns, started = 0, time.perf_counter_ns()
        for _ in range(steps):
            self.step()
        wait(self.loop)
        self.steps.append((time.perf_counter_ns() - started) / 1e3 / steps)
        self.switch.append(self.clock.ns / 1e3 / steps)

    def step(self) -> None:
        for emission in self.loop.step():
            self.tokens.setdefault(emission.request, []).extend(emission.tokens)


def wait(loop: DecodeLoop) -> None:
    if loop.settings.device != "cpu":
        torch.cuda.synchronize()


class Bench:
    """The models and the prompts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, dtype = options, getattr(torch, options.dtype)
        if options.tiny:
            from specfsm.decode.training.tiny import tiny_target

            lm, self.tokenizer = tiny_target(0)
            lm.config._attn_implementation = "sdpa"
        else:
            from specfsm.decode.weights import load_target

            lm, self.tokenizer = load_target(options.target, dtype=dtype, device=options.device)
        self.target = Model(lm)
        self.draft = make_draft(options.draft, self.target, None, dtype=dtype, device=options.device)

    def runner(self, contender: str, batch: int, overlap: bool) -> Runner:
        """A loop whose steps are replays by now, with tokens enough for all that is timed."""
        options = self.options
        steps = WARM + BLOCK * (options.blocks + 2)
        new = (steps + 4) * (options.draft_len + 1)
        prompts = encode(self.tokenizer, [PROMPTS[index % len(PROMPTS)] for index in range(batch)])
        settings = Settings(
            draft_len=options.draft_len,
            max_requests=batch,
            max_tokens=max(map(len, prompts)) + new + 4 * (options.draft_len + 1),
            graph_sizes=(batch,),
            graphs="whole",
            overlap=overlap,
            dtype=options.dtype,
            device=options.device,
        )
        check = "off" if contender == "unchecked" else "stamps"
        loop = DecodeLoop(self.target, self.draft, settings, check=check)
        for prompt in prompts:
            loop.submit(prompt, new)
        fsm = loop.fsm
        runner = Runner(loop, Clocked(fsm))
        for _ in range(WARM):
            runner.step()
        if not loop.replays:
            raise SystemExit("no step was replayed")
        switches = {"generation 2": lambda: Generation2(fsm), "none": NoSwitch}
        runner.clock = Clocked(fsm, switches[contender]() if contender in switches else None)
        clocked: Any = runner.clock
        loop.fsm = clocked
        return runner


@frozen
class Row:
    """One contender at one batch, in µs a step; `idle` is a fraction. None where it was not measured."""

    batch: int
    overlap: bool
    contender: str
    step: float
    switch: float
    busy: float | None
    idle: float | None


def measure(bench: Bench, batch: int, overlap: bool) -> list[Row]:
    runners = {name: bench.runner(name, batch, overlap) for name in CONTENDERS}
    for turn in range(bench.options.blocks):
        names = CONTENDERS[turn % len(CONTENDERS) :] + CONTENDERS[: turn % len(CONTENDERS)]
        for name in names:
            runners[name].block(BLOCK)
    require_same_tokens(runners[name] for name in COMPARED)
    rows = []
    for name, runner in runners.items():
        step, switch = statistics.median(runner.steps), statistics.median(runner.switch)
        rows.append(Row(batch, overlap, name, step, switch, None, None))
    return rows


def require_same_tokens(runners: Iterable[Runner]) -> None:
    first, *others = [[*each.tokens.values()] for each in runners]
    if any(other != first for other in others):
        raise SystemExit("the loops do not write the same tokens")


def profile(bench: Bench, rows: list[Row]) -> list[Row]:
    """The rows with what the device does in a step: each loop is made anew, after everything was timed."""
    found = []
    for row in rows:
        runner = bench.runner(row.contender, row.batch, row.overlap)
        runner.block(BLOCK)
        busy = device_time(lambda runner=runner: runner.block(BLOCK)) / BLOCK  # type: ignore[misc]  # bound at once
        facts = asdict(row) | {"busy": busy, "idle": max(0.0, 1 - busy / row.step)}
        found.append(Row(**facts))
    return found


def device_time(body: Any) -> float:
    """Microseconds in which the device ran anything."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        body()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return union(spans)


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of these intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


HEAD = ("batch", "overlap", "contender", "step µs", "over none", "switch µs", "of a step", "device µs", "idle")


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    none = {(row.batch, row.overlap): row.step for row in rows if row.contender == "none"}
    return [
        (
            str(row.batch),
            "on" if row.overlap else "off",
            row.contender,
            f"{row.step:.0f}",
            f"{row.step / none[row.batch, row.overlap]:.4f}",
            f"{row.switch:.1f}",
            f"{row.switch / row.step:.2%}",
            "not measured" if row.busy is None else f"{row.busy:.0f}",
            "not measured" if row.idle is None else f"{row.idle:.1%}",
        )
        for row in rows
    ]


def checks(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """(batch, overlap, what the checks cost): the host's time in the switch at ``stamps`` less that at ``off``."""
    by = {(row.batch, row.overlap, row.contender): row.switch for row in rows}
    pairs = dict.fromkeys((row.batch, row.overlap) for row in rows)
    costs = {pair: by[*pair, "machine"] - by[*pair, "unchecked"] for pair in pairs}
    return [
        (str(batch), "on" if overlap else "off", f"{cost:.2f} µs, {cost / TWO_MS:.2%} of a step of 2 ms")
        for (batch, overlap), cost in costs.items()
    ]


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", help="as for specfsm decode")
    parser.add_argument("--tiny", action="store_true", help="a random target, for a run that measures nothing")
    parser.add_argument("--draft", default="self", help="as for specfsm decode (%(default)s)")
    parser.add_argument("--draft-len", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--batches", type=lambda text: [int(each) for each in text.split(",")], default=[1, 16, 64])
    parser.add_argument("--blocks", type=int, default=12, help=f"blocks of {BLOCK} steps that are timed (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    bench = Bench(options)
    rows: list[Row] = []
    for batch in options.batches:
        for overlap in (False, True):
            rows += measure(bench, batch, overlap)
            print(text_table(HEAD, cells(rows)[-len(CONTENDERS) :]), flush=True)  # a run that is cut short leaves them
    if options.device == "cuda":
        rows = profile(bench, rows)
    facts = {
        "command": sys.argv,
        "card": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
        "rows": [asdict(row) for row in rows],
    }
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1))
    print(f"\n{facts['card']}, {facts['versions']}\n")
    print(text_table(HEAD, cells(rows)))
    print("\n" + text_table(("batch", "overlap", "checks at stamps"), checks(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
