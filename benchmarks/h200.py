"""What the decode loop does on a Hopper GPU: one script that checks and times, section by section.

    python -m benchmarks.h200 --target MODEL --out DIR

Sections: `matrix` (losslessness over eager and graphs, overlap, draft lengths, backends and kernels), `missed` (a
dropped refresh with the real FlashMLA kernel, checked and unchecked), `rebound` (a replay after a table was
reallocated), `steps` (step time with the machine, with a switch by hand and without any). Each is guarded: one that
fails says so and the rest still run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode import ByHand
from benchmarks.losslessness import differences
from specfsm.decode.loop import DecodeLoop, Settings
from specfsm.decode.model import Model, make_draft
from specfsm.decode.training.prompts import encode
from specfsm.decode.weights import load_target
from specfsm.domain import Batch, Domain
from specfsm.errors import GraphContractBroken, StaleResource

PROMPTS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "List five vegetables that grow well in spring.",
    "Explain how a bicycle stays upright.",
)
VARIANTS = {
    "trtllm float32": {"backend": "trtllm", "dtype": "float32"},
    "flash_mla float32": {"backend": "flash_mla", "dtype": "float32"},
    "trtllm bfloat16": {"backend": "trtllm", "dtype": "bfloat16"},
    "dsa float32": {"backend": "dsa", "dtype": "float32"},
    "deepseek_v4 float32": {"backend": "deepseek_v4", "dtype": "float32"},
    "flash_mla bfloat16, FlashMLA kernel": {"backend": "flash_mla", "dtype": "bfloat16", "kernels": "flash_mla"},
}


class Bench:
    """Models of both dtypes and the prompts. The draft is named by the section that runs it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.models: dict[str, Model] = {}
        for dtype in ("float32", "bfloat16"):
            lm, self.tokenizer = load_target(options.target, dtype=getattr(torch, dtype), device=options.device)
            self.models[dtype] = Model(lm)
        self.plain, _ = load_target(options.target, dtype=torch.float32, device=options.device)

    def ids(self, prompt: str) -> list[int]:
        return encode(self.tokenizer, [prompt])[0]

    def loop(self, variant: dict[str, Any], draft_len: int, requests: int = len(PROMPTS), **more: Any) -> DecodeLoop:
        """A loop of this variant; draft_len 0 decodes with the target alone."""
        machine = {key: more.pop(key) for key in ("check", "drop") if key in more}
        spec = more.pop("draft", self.options.draft)
        settings = Settings(
            draft_len=max(draft_len, 1),
            max_requests=requests,
            graph_sizes=(requests,),
            device=self.options.device,
            **({"max_tokens": 192} | variant | more),
        )
        target = self.models[variant["dtype"]]
        place = {"dtype": getattr(torch, variant["dtype"]), "device": self.options.device}
        draft = make_draft(spec, target, None, **place) if draft_len else None
        return DecodeLoop(target, draft, settings, stop=[self.tokenizer.eos_token_id], **machine)

    def outputs(self, loop: DecodeLoop, new: int) -> list[list[int]]:
        requests = [loop.submit(self.ids(prompt), new) for prompt in PROMPTS]
        outputs = loop.run()
        return [outputs[request] for request in requests]


def matrix(bench: Bench) -> list[dict[str, Any]]:
    """Speculative against target-only decoding, through the same kernels."""
    rows = []
    for name in bench.options.variants:
        variant = VARIANTS[name]
        alone = bench.outputs(bench.loop(variant, 0), bench.options.new_tokens)
        for nextn, graphs, overlap in itertools.product((1, 2, 3), ("off", "whole", "draft"), (False, True)):
            loop = bench.loop(variant, nextn, graphs=graphs, overlap=overlap)
            outputs = bench.outputs(loop, bench.options.new_tokens)
            row = {"variant": name, "nextn": nextn, "graphs": graphs, "overlap": overlap, "forwards": loop.forwards}
            found = differences(bench.plain, [bench.ids(prompt) for prompt in PROMPTS], outputs, alone)
            row |= {"replays": loop.replays, "differs": [str(each) for each in found]}
            rows.append(row)
            print(row, flush=True)
    return rows


def missed(bench: Bench) -> dict[str, Any]:
    """The upstream bug: the draft's FlashMLA table is not refreshed."""
    variant, facts = VARIANTS["flash_mla bfloat16, FlashMLA kernel"], {}
    for graphs in ("off", "whole"):
        for check in ("stamps", "off"):
            try:
                drop = [("block_ids_per_seq", Domain.DRAFT)]
                loop = bench.loop(variant, 3, draft="self", graphs=graphs, check=check, drop=drop)
                bench.outputs(loop, bench.options.new_tokens)
                facts[f"{graphs}, check {check}"] = (
                    f"ran: {bench.options.new_tokens * len(PROMPTS) / loop.forwards:.2f} tokens a forward"
                )
            except StaleResource as error:
                facts[f"{graphs}, check {check}"] = f"refused: {str(error).splitlines()[1].strip()}"
    healthy = bench.loop(variant, 3, draft="self")
    bench.outputs(healthy, bench.options.new_tokens)
    facts["healthy"] = f"{bench.options.new_tokens * len(PROMPTS) / healthy.forwards:.2f} tokens a forward"
    return facts | kernel_on_wrong_pages(bench.options.device)


def kernel_on_wrong_pages(device: str) -> dict[str, Any]:
    """The kernel itself, given the right table, another cache's, and one with an id outside the pool."""
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    torch.manual_seed(0)
    pool = torch.randn(256, 64, 1, 576, device=device, dtype=torch.bfloat16)
    queries = torch.randn(4, 4, 16, 576, device=device, dtype=torch.bfloat16)
    lens = torch.tensor([100, 500, 900, 1000], device=device, dtype=torch.int32)
    tables = torch.randperm(256, device=device, dtype=torch.int32)[: 2 * 4 * 16].view(2, 4, 16)

    def attend(table: torch.Tensor) -> torch.Tensor:
        schedule, _ = get_mla_metadata()
        out, _ = flash_mla_with_kvcache(queries, pool, table, lens, 512, schedule, causal=True, use_legacy=True)
        return out.float()

    def reference() -> torch.Tensor:
        outs = []
        for row in range(4):
            keys = pool[tables[0, row].long()].flatten(0, 1)[: lens[row], 0].float()
            scores = torch.einsum("qhd,kd->hqk", queries[row].float(), keys) / 576**0.5
            places = torch.arange(keys.shape[0], device=device)
            mask = places[None] > (lens[row] - 4 + torch.arange(4, device=device))[:, None]
            outs.append(torch.einsum("hqk,kd->qhd", scores.masked_fill(mask, -torch.inf).softmax(-1), keys[:, :512]))
        return torch.stack(outs)

    right = attend(tables[0])
    outside = tables[0].clone()
    outside[2, 3] = 100_000
    facts = {
        "kernel against float32 reference": relative(right, reference()),
        "kernel on the other cache's table": relative(attend(tables[1]), right),
    }
    try:
        wild = attend(outside)
        torch.cuda.synchronize()
        facts["kernel with an id outside the pool"] = relative(wild, right)
    except RuntimeError as error:
        facts["kernel with an id outside the pool"] = str(error).splitlines()[0]
    return facts


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def rebound(bench: Bench) -> dict[str, Any]:
    """A graph replayed after its table was bound to another buffer."""
    facts: dict[str, Any] = {}
    for check in ("stamps", "off"):
        loop = bench.loop({"backend": "trtllm", "dtype": "float32"}, 3, draft="self", graphs="whole", check=check)
        for prompt in PROMPTS:
            loop.submit(bench.ids(prompt), bench.options.new_tokens)
        emissions = [emission for _ in range(6) for emission in loop.step()]
        name, table = "kv_cache_block_offsets", loop.fsm.value("kv_cache_block_offsets", Domain.DRAFT)
        loop.fsm.bind(name, torch.zeros_like(table), Domain.DRAFT)
        table.zero_()  # what an allocator may do with memory that was given back
        try:
            emissions = [emission for _ in range(6) for emission in loop.step()]
            share = sum(each.accepted for each in emissions) / max(1, sum(each.proposed for each in emissions))
            facts[f"check {check}"] = f"replayed: {share:.0%} of the drafted tokens accepted"
        except GraphContractBroken as error:
            facts[f"check {check}"] = f"refused: {str(error).splitlines()[1].strip()}"
    return facts


class NoSwitch:
    """Prepares nothing: what is left is the scheduler and the replay. Its tables are right until a page is added."""

    def target_prepare(self, batch: Batch, **_: Any) -> None:
        """Nothing."""

    def draft_replay(self, graph: Any, batch: Batch) -> AbstractContextManager[None]:
        return nullcontext()

    def batch(self, domain: Domain) -> None:
        """Nothing."""

    def moved(self, source: str) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""


def steps(bench: Bench) -> list[dict[str, Any]]:
    """A replayed step with the machine, with a switch by hand that refreshes everything, and without any switch.

    The loops run in lockstep, a step of each in turn.
    """
    rows = []
    for requests, overlap in itertools.product((1, 16, 64), (False, True)):
        loops = {name: replaying(bench, requests, overlap) for name in ("machine", "by hand", "no switch")}
        by_hand: Any = ByHand(loops["by hand"].fsm)
        none: Any = NoSwitch()
        loops["by hand"].fsm, loops["no switch"].fsm = by_hand, none
        trace = loops["machine"].fsm.trace
        trace.clear()
        times: dict[str, list[float]] = {name: [] for name in loops}
        for _ in range(60):
            for name, loop in loops.items():
                times[name].append(timed(loop.step))
        ours = times["machine"]
        row: dict[str, Any] = {"batch": requests, "overlap": overlap}
        row |= {f"{name} µs": statistics.median(each) for name, each in times.items()}
        row["in events µs"] = sum(one.end_ns - one.start_ns for one in trace) / 1e3 / len(ours)
        for name in ("by hand", "no switch"):
            ratios = [one / other for one, other in zip(ours, times[name], strict=True)]
            row[f"machine over {name}, quartiles"] = [round(each, 4) for each in statistics.quantiles(ratios, n=4)]
        rows.append(row)
        print(row, flush=True)
    return rows


def replaying(bench: Bench, requests: int, overlap: bool) -> DecodeLoop:
    """A loop whose steps are replays by now, with tokens enough for all that is timed."""
    variant = {"backend": "trtllm", "dtype": "bfloat16", "max_tokens": 768}
    loop = bench.loop(variant, 3, requests, graphs="whole", overlap=overlap)
    for index in range(requests):
        loop.submit(bench.ids(PROMPTS[index % len(PROMPTS)]), 600)
    for _ in range(10):
        loop.step()
    assert loop.replays, "no step was replayed"
    return loop


def timed(run: Callable[[], Any]) -> float:
    """Microseconds of one call, the device waited for."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e6


SECTIONS: dict[str, Callable[[Bench], Any]] = {"steps": steps, "missed": missed, "rebound": rebound, "matrix": matrix}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft", default="mtp", help="of the sections matrix and steps (%(default)s)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--sections", nargs="+", choices=tuple(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS), help="of the matrix")
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    bench = Bench(options)
    facts: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in options.sections:
        started = time.perf_counter()
        try:
            facts[name] = SECTIONS[name](bench)
        except Exception:  # one section must not cost the others
            facts[name] = traceback.format_exc()
        print(f"== {name}: {time.perf_counter() - started:.0f} s\n{facts[name]}", flush=True)
        (options.out / "h200.json").write_text(json.dumps(facts, indent=1, default=str))


if __name__ == "__main__":
    main()
