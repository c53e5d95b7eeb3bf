"""What the state machine costs a decode loop: step times with it and without it, in one process.

    python -m benchmarks.decode
    python -m benchmarks.decode --backend flash_mla --draft early-exit:8 --json decode.json

Three loops decode the same prompt with the same weights, in lockstep: a step of each in turn, so that whatever else the
machine does falls on all three alike. They differ in what switches the metadata between the two caches:

- machine: the orchestrator, as `specfsm decode` runs it;
- by hand: a switch without any bookkeeping that rebinds and refreshes everything at every phase, as engines do;
- oracle: the same switch, told beforehand exactly what is stale. Nobody can know that without keeping book, so this is
  the floor: what the machine takes longer than it is the price of its bookkeeping.

Ratios are of the same step in two loops. The tokens of all three must be the same.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define, field

from specfsm.backends.refresher import only
from specfsm.decode.command import DEFAULT_PROMPT
from specfsm.decode.loop import DecodeLoop, Settings
from specfsm.decode.model import Model, make_draft
from specfsm.decode.training.prompts import encode
from specfsm.decode.weights import load_target
from specfsm.domain import Batch, Domain
from specfsm.orchestrator import Orchestrator

REFRESHING = ("target_prepare", "draft_forward", "draft_step")


class ByHand:
    """The switch of an engine that keeps no book. Buffers and refresh code are those of the orchestrator it replaces.

    Args:
        fsm: whose bindings it switches.
        told: masks of what to refresh at each phase; None refreshes everything.
    """

    def __init__(self, fsm: Orchestrator, told: deque[int] | None = None) -> None:
        self.metadata, self.bindings, self.ledger, self.told = fsm.metadata, fsm.bindings, fsm.ledger, told
        self.refresher, self.resources = fsm.refresher, fsm.backend.resources
        self.place = {resource.name: place for place, resource in enumerate(self.resources)}
        self.everything = sum(1 << place for place, resource in enumerate(self.resources) if not resource.lazy)
        self.written = [0 for _ in Domain]
        self.active = self.bindings[0]

    def target_prepare(self, batch: Batch, **_: Any) -> None:
        self._enter(self.bindings[Domain.TARGET], batch)

    @contextmanager
    def draft_forward(self, batch: Batch) -> Iterator[None]:
        self._enter(self.bindings[Domain.DRAFT], batch)
        yield
        self._carry(self.bindings[Domain.TARGET])

    def draft_step(self, batch: Batch | None = None) -> None:
        binding = self.bindings[Domain.DRAFT]
        assert binding.batch is not None
        self._enter(binding, batch or binding.batch.next_step())

    @contextmanager
    def draft_replay(self, graph: Any, batch: Batch) -> Iterator[None]:
        with self.draft_forward(batch):
            yield

    def announce(self, batch: Batch, domain: Domain | None = None) -> None:
        binding = self.active if domain is None else self.bindings[domain]
        binding.see(batch)
        self.written[binding.domain] = 0

    def publish(self, resource: str, value: Any, domain: Domain | None = None) -> None:
        binding, place = self.active if domain is None else self.bindings[domain], self.place[resource]
        binding.values[place] = value
        self.written[binding.domain] |= 1 << place
        if self.resources[place].lazy:
            setattr(self.metadata, resource, value)

    def value(self, resource: str, domain: Domain) -> Any:
        return self.bindings[domain].values[self.place[resource]]

    def batch(self, domain: Domain) -> Batch | None:
        return self.bindings[domain].batch

    def moved(self, source: str) -> None:
        """What the step has corrected counts for nothing: all of it is refreshed again."""
        self.written = [0 for _ in Domain]

    def finish(self) -> None:
        """Nothing to note."""

    def _enter(self, binding: Any, batch: Batch) -> None:
        """Refresh all but what the step itself has just corrected on the device: that may not be overwritten."""
        binding.see(batch)
        stale = self.everything & ~self.written[binding.domain] if self.told is None else self.told.popleft()
        self.refresher.refresh(only(binding, stale), self.ledger)
        self._carry(binding)
        self.written[binding.domain] = 0

    def _carry(self, binding: Any) -> None:
        self.active = binding
        for place, resource in enumerate(self.resources):
            for half, attribute in enumerate(resource.attributes):
                value = binding.hosts.get(place) if half else binding.values[place]
                setattr(self.metadata, attribute, resource.empty() if resource.lazy else value)


@define
class Runner:
    """One of the loops, and what its steps took."""

    name: str
    loop: DecodeLoop
    tokens: list[int] = field(factory=list)
    steps: list[int] = field(factory=list)
    events: list[int] = field(factory=list)

    def step(self) -> None:
        """One step of the loop, timed; and of that, the time inside the machine's events."""
        started = time.perf_counter_ns()
        emissions = self.loop.step()
        if self.loop.settings.device != "cpu":
            torch.cuda.synchronize()
        self.steps.append(time.perf_counter_ns() - started)
        for emission in emissions:
            self.tokens += emission.tokens
        if self.name == "machine":
            self.events.append(sum(one.end_ns - one.start_ns for one in self.loop.fsm.trace))


def lockstep(runners: dict[str, Runner], told: deque[int], prompt: list[int], new: int, counted: bool) -> None:
    """Decode a prompt in all loops, a step of each in turn; the oracle after the machine, whose notes it reads."""
    for runner in runners.values():
        runner.loop.submit(prompt, new)
    orders = (("machine", "oracle", "by hand"), ("by hand", "machine", "oracle"))
    turn = 0
    while any(runner.loop.running or runner.loop.waiting for runner in runners.values()):
        for name in orders[turn % 2]:
            runners[name].step()
            if name == "machine":
                trace = runners[name].loop.fsm.trace
                told.extend(one.refreshed for one in trace if one.event in REFRESHING)
                trace.clear()
        turn += 1
    for runner in runners.values():
        # Without the first step, which prefills; a warm-up counts for nothing at all.
        for times in (runner.steps, runner.events):
            del times[len(times) - turn : len(times) - turn + 1 if counted else None]
    outputs = [runner.tokens for runner in runners.values()]
    assert outputs[0] == outputs[1] == outputs[2], "the loops do not write the same tokens"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile)."""
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def options_of(parser: argparse.ArgumentParser) -> None:
    """What every benchmark of the loop asks."""
    parser.add_argument("--target", help="as for specfsm decode")
    parser.add_argument("--draft", default="self", help="as for specfsm decode (%(default)s)")
    parser.add_argument("--draft-len", type=int, default=3)
    parser.add_argument("--backend", default="trtllm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompt", default=DEFAULT_PROMPT)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up (%(default)s)")
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch; more than one waits for whatever else runs (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_of(parser)
    parser.add_argument("--check", default="stamps", choices=("off", "stamps", "tensors"))
    return parser.parse_args()


def prepare(options: argparse.Namespace) -> tuple[Model, Any, Settings, list[int]]:
    """Target, draft, settings and prompt, as the options say."""
    place: dict[str, Any] = {"dtype": getattr(torch, options.dtype), "device": options.device}
    lm, tokenizer = load_target(options.target, **place)
    target = Model(lm)
    draft = make_draft(options.draft, target, lambda path: load_target(path, **place)[0], **place)
    [prompt] = encode(tokenizer, [options.prompt])
    settings = Settings(
        backend=options.backend,
        draft_len=options.draft_len,
        max_requests=1,
        max_tokens=len(prompt) + options.new_tokens,
        dtype=options.dtype,
        device=options.device,
    )
    return target, draft, settings, prompt


def make(options: argparse.Namespace) -> tuple[dict[str, Runner], deque[int], list[int]]:
    """The three loops, what the oracle is told, and the prompt."""
    target, draft, settings, prompt = prepare(options)
    loops = {
        name: DecodeLoop(target, draft, settings, check=options.check) for name in ("machine", "by hand", "oracle")
    }
    told: deque[int] = deque()
    by_hand: Any = ByHand(loops["by hand"].fsm)
    oracle: Any = ByHand(loops["oracle"].fsm, told)
    loops["by hand"].fsm, loops["oracle"].fsm = by_hand, oracle
    return {name: Runner(name, loop) for name, loop in loops.items()}, told, prompt


def report(runners: dict[str, Runner], tokens: int) -> dict[str, Any]:
    """Print the table; the figures."""
    machine = runners["machine"]
    rows: dict[str, Any] = {}
    print(
        "| switch | ms a step (quartiles) | tokens/s | time of a step, machine over it (quartiles) |\n|---|---|---|---|"
    )
    for name, runner in runners.items():
        low, middle, high = quartiles([each / 1e6 for each in runner.steps])
        ratios = quartiles([ours / theirs for ours, theirs in zip(machine.steps, runner.steps, strict=True)])
        speed = tokens / (sum(runner.steps) / 1e9)
        rows[name] = {"step_ms": (low, middle, high), "tokens_per_second": speed, "machine_over_it": ratios}
        over = "–" if runner is machine else f"{ratios[1]:.4f} ({ratios[0]:.4f} to {ratios[2]:.4f})"
        print(f"| {name} | {middle:.2f} ({low:.2f} to {high:.2f}) | {speed:.2f} | {over} |")
    inside = quartiles([event / step for event, step in zip(machine.events, machine.steps, strict=True)])
    events = quartiles([event / 1e6 for event in machine.events])
    share = f"{inside[1]:.2%} of it ({inside[0]:.2%} to {inside[2]:.2%})"
    print(f"\ninside the machine's events: {events[1]:.2f} ms of a step, {share}")
    return rows | {"event_ms": events, "event_share": inside}


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    runners, told, prompt = make(options)
    for turn in range(options.rounds + 1):
        lockstep(runners, told, prompt, options.new_tokens, counted=turn > 0)
    versions = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    print(
        f"{options.backend}, draft {options.draft}, {options.new_tokens} tokens, {options.rounds} rounds; {versions}\n"
    )
    # The first token of each round is written by the prefill, which is not counted.
    rows = report(runners, options.rounds * (options.new_tokens - 1))
    if options.json:
        facts = {"options": {**vars(options), "json": None}, "versions": versions, "rows": rows}
        options.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
