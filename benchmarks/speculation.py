"""What speculation pays: tokens a second and tokens a target forward, against the target alone, in one process.

    python -m benchmarks.speculation --draft mtp
    python -m benchmarks.speculation --draft mtp --device cuda --dtype bfloat16 --graphs whole --batches 1 16

Held-out prompts of several kinds; the runs with and without a draft are interleaved, and medians are printed. Outputs
are compared token by token; a difference is reported with its place, not hidden.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.losslessness import differences
from specfsm.decode.loop import DecodeLoop, Emission, Settings
from specfsm.decode.model import Model, make_draft
from specfsm.decode.weights import load_target


def options_of(parser: argparse.ArgumentParser) -> None:
    """Models, and where they run."""
    parser.add_argument("--target", help="as for specfsm decode")
    parser.add_argument("--draft", default="mtp", help="as for specfsm decode (%(default)s)")
    parser.add_argument("--backend", default="trtllm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--graphs", default="off", choices=("off", "whole", "draft"))
    parser.add_argument("--json", type=Path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_of(parser)
    parser.add_argument("--kernels", default="torch", choices=("torch", "flash_mla"))
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--nextn", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--prompts", type=int, default=8, help="prompts for each batch size (at least the batch)")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


class Bench:
    """One model and its draft, run over the same prompts in different settings."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        place: dict[str, Any] = {"dtype": getattr(torch, options.dtype), "device": options.device}
        lm, self.tokenizer = load_target(options.target, **place)
        self.target = Model(lm)
        self.draft = make_draft(options.draft, self.target, lambda path: load_target(path, **place)[0], **place)

    def prompts(self, count: int) -> list[tuple[str, list[int]]]:
        """Held-out prompts, every kind in turn: (kind, tokens)."""
        from specfsm.decode.training.prompts import encode, make_prompts

        by_kind: dict[str, list[str]] = defaultdict(list)
        for kind, prompt in make_prompts(40 * count, 1, held_out=True):
            by_kind[kind].append(prompt)
        turns = [
            (kind, each)
            for row in zip(*by_kind.values(), strict=False)
            for kind, each in zip(by_kind, row, strict=True)
        ]
        kinds, texts = zip(*turns[:count], strict=True)
        return list(zip(kinds, encode(self.tokenizer, texts), strict=True))

    def loop(self, batch: int, nextn: int, longest: int) -> DecodeLoop:
        options = self.options
        settings = Settings(
            backend=options.backend,
            draft_len=max(nextn, 1),
            max_requests=batch,
            max_tokens=longest + options.new_tokens,
            dtype=options.dtype,
            device=options.device,
            graphs=options.graphs,
            graph_sizes=(batch,),
            overlap=options.overlap,
            kernels=options.kernels,
        )
        return DecodeLoop(self.target, self.draft if nextn else None, settings, stop=[self.tokenizer.eos_token_id])

    def decode(self, loop: DecodeLoop, prompts: list[tuple[str, list[int]]]) -> dict[str, Any]:
        """All prompts through one loop, a batch at a time as rows come free."""
        kinds = {loop.submit(ids, self.options.new_tokens): kind for kind, ids in prompts}
        per_kind: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        positions = [0] * loop.settings.draft_len
        forwards = 0

        def note(emission: Emission) -> None:
            nonlocal forwards
            if emission.proposed or loop.draft is None:
                counted = per_kind[kinds[emission.request]]
                counted[0] += len(emission.tokens)
                counted[1] += 1
                for place in range(emission.accepted):
                    positions[min(place, len(positions) - 1)] += 1
                forwards += 1

        started = time.perf_counter()
        outputs = loop.run(note)
        if self.options.device != "cpu":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        tokens = sum(map(len, outputs.values()))
        return {
            "outputs": [outputs[request] for request in kinds],
            "tokens_per_second": tokens / seconds,
            "tokens_per_forward": sum(each[0] for each in per_kind.values()) / max(1, forwards),
            "per_kind": {kind: each[0] / each[1] for kind, each in per_kind.items()},
            "accepted_by_position": [count / max(1, forwards) for count in positions],
            "phases_ms": {row.event: row.total_ns / 1e6 for row in loop.fsm.trace.summary()},
        }

    def plain(self) -> Any:
        """The target in float32 with the attention of transformers: the judge of close choices."""
        return load_target(self.options.target, dtype=torch.float32, device=self.options.device)[0]

    def difference(self, prompts: list[tuple[str, list[int]]], ours: list[list[int]], theirs: list[list[int]]) -> str:
        """How many prompts were answered in other words, and the first one's place and logit gap; empty if none."""
        if ours == theirs:
            return ""
        found = differences(self.plain(), [ids for _, ids in prompts], ours, theirs)
        return f"{len(found)} of {len(prompts)} differ; first {found[0]}"


def measure(bench: Bench, batch: int) -> list[dict[str, Any]]:
    """Rounds of every setting in turn; the first round warms up and captures, and is not counted."""
    options = bench.options
    prompts = bench.prompts(max(options.prompts, batch))
    longest = max(len(ids) for _, ids in prompts)
    loops = {nextn: bench.loop(batch, nextn, longest) for nextn in (0, *options.nextn)}
    runs: dict[int, list[dict[str, Any]]] = {nextn: [] for nextn in loops}
    for turn in range(options.rounds + 1):
        for nextn, loop in loops.items():
            loop.fsm.trace.clear()
            result = bench.decode(loop, prompts)
            if turn:
                runs[nextn].append(result)
    rows = []
    alone = statistics.median(run["tokens_per_second"] for run in runs[0])
    for nextn, results in runs.items():
        speed = statistics.median(run["tokens_per_second"] for run in results)
        row = {key: value for key, value in results[-1].items() if key != "outputs"}
        difference = bench.difference(prompts, results[-1]["outputs"], runs[0][-1]["outputs"])
        rows.append(
            row
            | {
                "batch": batch,
                "nextn": nextn,
                "tokens_per_second": speed,
                "ratio": speed / alone,
                "differs": difference,
            }
        )
        print(
            f"| {batch} | {nextn or 'alone'} | {row['tokens_per_forward']:.2f} | {speed:.1f} | {speed / alone:.2f} |"
            f" {difference or 'same'} |",
            flush=True,
        )
    return rows


def main() -> None:
    options = arguments()
    bench = Bench(options)
    versions = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.processor()}
    if options.device != "cpu":
        versions["card"] = torch.cuda.get_device_name()
    print(json.dumps(versions))
    print(
        "| batch | nextn | tokens a forward | tokens/s | against the target alone | tokens |\n|---|---|---|---|---|---|"
    )
    rows = [row for batch in options.batches for row in measure(bench, batch)]
    for row in rows:
        kinds = ", ".join(f"{kind} {value:.2f}" for kind, value in row["per_kind"].items())
        places = ", ".join(f"{share:.2f}" for share in row["accepted_by_position"])
        print(f"batch {row['batch']}, nextn {row['nextn']}: {kinds}; accepted by position {places}")
    if options.json:
        options.json.write_text(
            json.dumps({"options": vars(options) | {"json": None}, "versions": versions, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
