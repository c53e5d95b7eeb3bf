"""A draft cache of its own against one that the draft shares with the target: throughput and memory, side by side.

    python -m benchmarks.unified --target MODEL --device cuda --dtype bfloat16 --graphs whole

Every request has `--input` tokens of prompt and writes `--output` tokens, whatever it says (no token ends it). The
two loops run in lockstep, a step of each in turn, over the same prompts. Both have room for the same requests.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field

from benchmarks.losslessness import differences
from benchmarks.speculation import Bench as Models
from benchmarks.speculation import options_of
from specfsm.decode.cache import PagedKVCache
from specfsm.decode.loop import DecodeLoop, Settings

LAYOUTS: dict[str, str | None] = {
    "separate": None,
    "unified": "the draft's layers lie behind the target's in every page",
}

WARM = 8
"""Steps that are not counted."""


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_of(parser)
    parser.add_argument("--nextn", type=int, default=1)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--input", type=int, default=2048, help="tokens of each prompt (%(default)s)")
    parser.add_argument("--output", type=int, default=2048, help="tokens each request writes (%(default)s)")
    return parser.parse_args(words)


@define
class Run:
    """One loop, and what it took.

    Args:
        memory: bytes of the device that the loop took when it was built.
        seconds: of each step; the first is the prefill, and the next few warm up and capture.
        emitted: tokens of each step.
        rows: requests that each step wrote for.
    """

    loop: DecodeLoop
    memory: int
    seconds: list[float] = field(factory=list)
    emitted: list[int] = field(factory=list)
    rows: list[int] = field(factory=list)
    outputs: dict[int, list[int]] = field(factory=dict)

    @property
    def busy(self) -> bool:
        return bool(self.loop.waiting or self.loop.running or self.loop.pending)

    def step(self) -> None:
        started = time.perf_counter()
        emissions = self.loop.step()
        if self.loop.settings.device != "cpu":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - started)
        self.emitted.append(sum(len(each.tokens) for each in emissions))
        self.rows.append(len(emissions))
        for each in emissions:
            self.outputs.setdefault(each.request, []).extend(each.tokens)


def build(models: Models, requests: int, unified: str | None) -> Run:
    options = models.options
    settings = Settings(
        backend=options.backend,
        draft_len=options.nextn,
        max_requests=requests,
        max_tokens=options.input + options.output,
        dtype=options.dtype,
        device=options.device,
        graphs=options.graphs,
        graph_sizes=(requests,),
        unified=unified,
    )
    before = allocated(options.device)
    loop = DecodeLoop(models.target, models.draft, settings)
    return Run(loop, allocated(options.device) - before)


def allocated(device: str) -> int:
    return 0 if device == "cpu" else torch.cuda.memory_allocated()


def prompts(models: Models, requests: int) -> list[list[int]]:
    """Held-out prompts one after another, cut to length; request i begins with the i-th."""
    texts = [ids for _, ids in models.prompts(max(requests, 32))]
    joined = [[token for ids in (*texts[at:], *texts[:at]) for token in ids] for at in range(requests)]
    length = models.options.input
    return [(row * -(-length // len(row)))[:length] for row in joined]


def page_bytes(cache: PagedKVCache) -> int:
    return cache.pool[0].nbytes


def measure(models: Models, requests: int) -> list[dict[str, Any]]:
    """Both layouts at one concurrency."""
    options, asked = models.options, prompts(models, requests)
    runs = {name: build(models, requests, unified) for name, unified in LAYOUTS.items()}
    for run in runs.values():
        for prompt in asked:
            run.loop.submit(prompt, options.output)
    while any(run.busy for run in runs.values()):
        for run in runs.values():
            if run.busy:
                run.step()
    rows = [row(name, run, requests) for name, run in runs.items()]
    ours, theirs = (list(run.outputs.values()) for run in runs.values())
    found = differences(models.plain(), asked, ours, theirs) if ours != theirs else []
    for each in rows:
        each["outputs"] = f"{len(found)} of {requests} differ; first {found[0]}" if found else "same"
        print("| " + " | ".join(map(str, each.values())) + " |", flush=True)
    return rows


def row(name: str, run: Run, requests: int) -> dict[str, Any]:
    loop, steps, emitted = run.loop, run.seconds[WARM:], sum(run.emitted[WARM:])
    gib = 2**30
    return {
        "concurrency": requests,
        "draft cache": name,
        "prefill s": round(run.seconds[0], 3),
        "tokens/s": round(emitted / sum(steps), 1),
        "ms a step": round(statistics.median(steps) * 1e3, 3),
        "tokens a forward": round(emitted / sum(run.rows[WARM:]), 3),
        "replayed": f"{loop.replays} of {loop.forwards}",
        "pools GiB": round(sum(cache.pool.nbytes for cache in loop.caches) / gib, 3),
        "page KiB": " + ".join(str(round(page_bytes(cache) / 1024, 1)) for cache in loop.caches),
        "loop GiB": round(run.memory / gib, 3),
    }


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(words)
    models = Models(options)
    versions = {"torch": torch.__version__}
    if options.device != "cpu":
        versions["card"] = torch.cuda.get_device_name()
    print(json.dumps(versions))
    rows: list[dict[str, Any]] = []
    for requests in options.concurrency:
        rows += measure(models, requests)
    print("columns: " + ", ".join(rows[0]))
    if options.json:
        options.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
