"""Refresh kernel: equality with its reference, and time beside the floors measured in the same run.

    python benchmarks/refresh.py --out refresh.json     # on a GPU
    python benchmarks/refresh.py --check                # sizes for Triton's interpreter, no timing, no GPU

Two sets of tables, each refreshed by one launch: ``dsa`` (K/V table of all pools, indexer table, block table, expanded
block table, four slot mappings) and ``sliding`` (a table for every layer and type). Columns:

- host: Python and driver time of one call, nothing waiting on the device;
- events: one launch between two CUDA events, enqueued behind a sleeping kernel so that the host's time is hidden;
- replay: one of many launches recorded in a CUDA graph, so caches are warm and gaps between launches are short;
- bytes floor: bytes that must move (every output once, every entry and operand read once) over the bandwidth of a
  large device-to-device copy, read and write counted;
- empty floor: an empty kernel, by events and by replay.

The ratio is replay over the larger of the bytes floor and the empty kernel's replay.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, define, frozen
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

from specfsm.domain import Geometry, RowOrder, Unit
from specfsm.kernels import ExpandRows, GatherTable, Recipe, RefreshLaunch, SlidingTable, SlotMapping, refresh_reference
from specfsm.kernels.refresh import Tile

POISON = -77777
DRAFT_TOKENS = 3
LAUNCHES_IN_GRAPH = 50
ROUNDS = 50


@frozen(kw_only=True)
class Workload:
    """One launch's recipes and tensors, and the bytes that must move."""

    name: str
    batch: int
    width: int
    recipes: dict[str, Recipe]
    tensors: dict[str, Tensor]
    geometry: Geometry
    bytes_read: int

    @property
    def bytes_written(self) -> int:
        return sum(self.tensors[name].nbytes for name in self.recipes)

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written


@define(kw_only=True)
class Row:
    """One line of the report; times in microseconds."""

    workload: str
    batch: int
    width: int
    tables: int
    programs: int
    vector: int
    megabytes: float
    host: float
    events: float
    replay: float
    reference: float
    bytes_floor: float
    empty_events: float
    empty_replay: float
    ratio: float


def _ints(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int64)


def manager_table(generator: torch.Generator, geometry: Geometry, scale: int, rows: int) -> Tensor:
    """i32 [P, R, Q, Bb]: one entry in sixteen is unassigned, one in sixteen in the secondary pool."""
    shape = (geometry.num_pools, rows, geometry.kv_factor, geometry.max_blocks_per_seq)
    entry = _ints(generator, 0, geometry.blocks_in_primary_pool, *shape) * scale
    kind = _ints(generator, 0, 16, *shape)
    return torch.where(kind == 0, -1, torch.where(kind == 1, entry - 2**31, entry)).to(torch.int32)


def batch_operands(generator: torch.Generator, geometry: Geometry, batch: int) -> dict[str, Tensor]:
    """A slot-ordered manager with twice the rows, one padded row in eight, 1 + DRAFT_TOKENS tokens a request."""
    rows = torch.randperm(2 * batch, generator=generator)[:batch]
    rows[_ints(generator, 0, 8, batch) == 0] = -1
    lens = _ints(generator, 1 + DRAFT_TOKENS, geometry.max_tokens_per_seq, batch)
    requests = torch.arange(batch).repeat_interleave(1 + DRAFT_TOKENS)
    back = torch.arange(1 + DRAFT_TOKENS, 0, -1).repeat(batch)
    operands = {"rows": rows, "lens": lens, "requests": requests, "back": back}
    return {name: tensor.to(torch.int32) for name, tensor in operands.items()}


def outputs(device: torch.device, sizes: dict[str, tuple[int, ...]], recipes: dict[str, Recipe]) -> dict[str, Tensor]:
    dtypes = {name: torch.int64 if isinstance(recipe, SlotMapping) else torch.int32 for name, recipe in recipes.items()}
    return {name: torch.full(size, POISON, dtype=dtypes[name], device=device) for name, size in sizes.items()}


def dsa(device: torch.device, batch: int, width: int) -> Workload:
    """The tables of DSA: 64-token pages, FP8 indexer keys of 128 bytes and a 4-byte scale."""
    geometry = Geometry(
        tokens_per_block=64, blocks_in_primary_pool=200_000, max_blocks_per_seq=width, num_layers=61, kv_factor=1,
        index_scale=61, row_order=RowOrder.SLOT,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(batch * width)
    operands = batch_operands(generator, geometry, batch)
    operands["base"] = manager_table(generator, geometry, geometry.index_scale, 2 * batch)
    mapping: dict[str, Any] = {
        "requests": "requests",
        "back": "back",
        "lens": "lens",
        "data_bytes": 128,
        "scale_bytes": 4,
    }
    recipes: dict[str, Recipe] = {
        "kv_cache_block_offsets": GatherTable(base="base", rows="rows", unit=Unit.PAGE, planes=True),
        "indexer_k_cache_block_offsets": GatherTable(base="base", rows="rows", unit=Unit.SLOT),
        "block_table": GatherTable(base="base", rows="rows", unit=Unit.SLOT, lens="lens", sentinel=-1),
        "block_table_expanded": ExpandRows(table="block_table", times=1 + DRAFT_TOKENS),
        "slot_mapping_fp8": SlotMapping(table="indexer_k_cache_block_offsets", part="data", **mapping),
        "slot_mapping_scale": SlotMapping(table="indexer_k_cache_block_offsets", part="scale", **mapping),
        "slot_mapping_fp8_fullkv": SlotMapping(table="block_table", part="data", **mapping),
        "slot_mapping_scale_fullkv": SlotMapping(table="block_table", part="scale", **mapping),
    }
    tokens = batch * (1 + DRAFT_TOKENS)
    tables = {"indexer_k_cache_block_offsets": batch, "block_table": batch, "block_table_expanded": tokens}
    sizes: dict[str, tuple[int, ...]] = {name: (rows, width) for name, rows in tables.items()}
    sizes["kv_cache_block_offsets"] = (geometry.num_pools, batch, geometry.kv_factor, width)
    sizes |= {name: (tokens,) for name in recipes if name.startswith("slot_mapping")}
    return _workload("dsa", device, batch, width, recipes, operands, sizes, geometry, geometry.num_pools)


def sliding(device: torch.device, batch: int, width: int, layers: int = 61, types: int = 2) -> Workload:
    """The sliding-window tables of DeepSeek-V4: one for every layer and type, out of one base table a pool."""
    geometry = Geometry(
        tokens_per_block=128, blocks_in_primary_pool=100_000, max_blocks_per_seq=width, num_layers=layers, kv_factor=1,
        num_pools=3, row_order=RowOrder.SLOT,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(batch * width + 1)
    operands = batch_operands(generator, geometry, batch)
    operands["base"] = manager_table(generator, geometry, 1, 2 * batch)
    operands["pools"] = _ints(generator, 0, geometry.num_pools, layers, types).to(torch.int32)
    operands["scales"] = torch.full((layers, types), layers, dtype=torch.int32)
    operands["offsets"] = torch.arange(layers, dtype=torch.int32)
    recipes: dict[str, Recipe] = {
        "sliding_block_tables": SlidingTable(
            base="base", rows="rows", pools="pools", scales="scales", offsets="offsets"
        )
    }
    sizes: dict[str, tuple[int, ...]] = {"sliding_block_tables": (layers, types, batch, width)}
    return _workload("sliding", device, batch, width, recipes, operands, sizes, geometry, geometry.num_pools)


def _workload(
    name: str,
    device: torch.device,
    batch: int,
    width: int,
    recipes: dict[str, Recipe],
    operands: dict[str, Tensor],
    sizes: dict[str, tuple[int, ...]],
    geometry: Geometry,
    pools_read: int,
) -> Workload:
    tensors = {key: tensor.to(device) for key, tensor in operands.items()} | outputs(device, sizes, recipes)
    others = sum(tensor.nbytes for key, tensor in operands.items() if key != "base")
    read = others + pools_read * batch * width * 4
    return Workload(
        name=name, batch=batch, width=width, recipes=recipes, tensors=tensors, geometry=geometry, bytes_read=read
    )


def check(workload: Workload, launch: RefreshLaunch) -> None:
    """Kernel and reference, both over poison, bit for bit."""
    found: dict[str, Tensor] = {}
    runs: list[Callable[[], None]] = [
        launch,
        lambda: refresh_reference(workload.recipes, workload.tensors, workload.geometry),
    ]
    for run in runs:
        for name in workload.recipes:
            workload.tensors[name].fill_(POISON)
        run()
        written = {name: workload.tensors[name].clone() for name in workload.recipes}
        for name, tensor in written.items():
            if (tensor == POISON).any():
                raise SystemExit(f"{workload.name} {workload.batch} x {workload.width}: {name} was not written whole")
            if found and not torch.equal(found[name], tensor):
                raise SystemExit(
                    f"{workload.name} {workload.batch} x {workload.width}: {name} differs from the reference"
                )
        found = written


def host_time(call: Callable[[], object]) -> float:
    """Median microseconds of one call, the device idle before it and never waited for within it."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        for _ in range(5):
            start = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def event_time(call: Callable[[], object]) -> float:
    """Median microseconds between events around one call, enqueued behind half a millisecond of sleep."""
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def replay_time(call: Callable[[], object]) -> float:
    """Median microseconds of one of LAUNCHES_IN_GRAPH calls recorded in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES_IN_GRAPH):
            call()
    graph.replay()
    return event_time(graph.replay) / LAUNCHES_IN_GRAPH


def wall_time(call: Callable[[], object]) -> float:
    """Median microseconds of a call and its work on the device."""
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a microsecond of a 1 GiB copy on the device, reads and writes counted."""
    source = torch.zeros(2**28, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / event_time(lambda: target.copy_(source))


@triton.jit
def nothing(pointer: tl.tensor) -> None:
    pass


def empty_launch(device: torch.device) -> Callable[[], object]:
    """A kernel that does nothing, launched with one program."""
    anchor = torch.zeros(1, device=device)
    nothing[(1,)](anchor)
    return lambda: nothing[(1,)](anchor)


def measure(workload: Workload, launch: RefreshLaunch, floors: dict[str, float]) -> Row:
    bytes_floor = workload.bytes_moved / floors["copy_bytes_per_us"]
    replay = replay_time(launch)
    return Row(
        workload=workload.name,
        batch=workload.batch,
        width=workload.width,
        tables=len(workload.recipes),
        programs=launch.programs,
        vector=launch.vector,
        megabytes=workload.bytes_moved / 1e6,
        host=host_time(launch),
        events=event_time(launch),
        replay=replay,
        reference=wall_time(lambda: refresh_reference(workload.recipes, workload.tensors, workload.geometry)),
        bytes_floor=bytes_floor,
        empty_events=floors["empty_events"],
        empty_replay=floors["empty_replay"],
        ratio=replay / max(bytes_floor, floors["empty_replay"]),
    )


def markdown(rows: list[Row], floors: dict[str, float]) -> str:
    columns = ["set", "batch", "width", "outputs", "programs", "MB moved", "host", "events", "replay", "bytes floor",
               "empty events", "empty replay", "replay / floor", "torch reference"]  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        times = (row.host, row.events, row.replay, row.bytes_floor, row.empty_events, row.empty_replay)
        cells = [row.workload, row.batch, row.width, row.tables, row.programs, f"{row.megabytes:.2f}"]
        cells += [f"{value:.2f}" for value in times] + [f"{row.ratio:.2f}", f"{row.reference:.0f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    bandwidth = floors["copy_bytes_per_us"] / 1e6
    return "\n".join([*lines, "", f"Times in µs. Device copy: {bandwidth:.2f} TB/s, read and write counted."])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the reference at small sizes, and stop")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--width", type=int, nargs="+", default=[64, 512], help="blocks a row of the tables")
    parser.add_argument(
        "--tile", type=int, nargs=3, metavar=("ROWS", "BLOCKS", "TOKENS"), help="what a program handles"
    )
    parser.add_argument("--out", type=Path, help="write rows, versions and card as JSON")
    return parser.parse_args()


def workloads(args: argparse.Namespace, device: torch.device) -> list[Callable[[], Workload]]:
    """Makers, so that one workload's tensors are gone before the next is made."""
    if args.check:
        return [lambda: dsa(device, 3, 5), lambda: dsa(device, 4, 8), lambda: sliding(device, 3, 6, layers=2)]
    return [
        partial(make, device, batch, width) for make in (dsa, sliding) for width in args.width for batch in args.batch
    ]


def main() -> int:
    args = arguments()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type != "cuda" and not args.check:
        sys.exit("timing needs a CUDA device; --check compares with the reference without one")
    empty = empty_launch(device)
    floors: dict[str, float] = {}
    if not args.check:
        floors = {
            "copy_bytes_per_us": copy_bandwidth(device),
            "empty_host": host_time(empty),
            "empty_events": event_time(empty),
            "empty_replay": replay_time(empty),
        }
    rows, tile = [], Tile(*args.tile) if args.tile else None
    for make in workloads(args, device):
        workload = make()
        launch = RefreshLaunch(workload.recipes, workload.tensors, workload.geometry, engine="triton", tile=tile)
        check(workload, launch)
        if not args.check:
            rows.append(measure(workload, launch, floors))
    if args.check:
        print("the kernel equals its reference")
        return 0
    card = torch.cuda.get_device_name(device)
    print(markdown(rows, floors))
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    print(
        f"\n{card}, CUDA {torch.version.cuda}, {', '.join(f'{name} {version}' for name, version in versions.items())}"
    )
    if args.out:
        report = {
            "command": sys.argv, "card": card, "cuda": torch.version.cuda, "versions": versions, "floors": floors,
            "rows": [asdict(row) for row in rows],
        }  # fmt: skip
        args.out.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
