"""Cases for the refresh kernel: a manager's table with every sort of entry, and each kind of recipe over it.

Without a GPU these tests run the kernel in Triton's interpreter, which `tests/conftest.py` chooses. Outputs are windows
into larger buffers full of `POISON`, so that an element left unwritten shows, and so does a write beyond the window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import define, field, frozen
from torch import Tensor

from specfsm.domain import Geometry, RowOrder, Unit
from specfsm.kernels import ExpandRows, GatherTable, Recipe, SlidingTable, SlotMapping

POISON = -77777
SECONDARY = -(2**31)


@frozen(kw_only=True)
class Shape:
    """Sizes of one case; the defaults are small and odd."""

    batch: int = 5
    tokens: int = 11
    width: int = 7
    strided: bool = False
    padding: str = "some"  # none, some, all
    seed: int = 0


@define
class Case:
    """Recipes, their tensors, and the buffer behind each output."""

    recipes: dict[str, Recipe]
    tensors: dict[str, Tensor]
    geometry: Geometry
    buffers: dict[str, Tensor] = field(factory=dict)

    def poison(self) -> None:
        for buffer in self.buffers.values():
            buffer.fill_(POISON)

    def snapshot(self) -> dict[str, Tensor]:
        """The whole buffers, poison around the windows included."""
        return {name: buffer.cpu().clone() for name, buffer in self.buffers.items()}


def recipes_of(geometry: Geometry) -> dict[str, Recipe]:
    """One of each kind and option."""
    mapping: dict[str, Any] = {"requests": "requests", "back": "back", "lens": "lens"}
    return {
        "slots": GatherTable(base="base", rows="rows", unit=Unit.SLOT),
        "cut": GatherTable(base="base", rows="rows", unit=Unit.SLOT, lens="lens", sentinel=-1),
        "tokens": GatherTable(base="base", rows="rows", unit=Unit.TOKEN, sentinel=-9),
        "pages": GatherTable(base="base", rows="rows", unit=Unit.PAGE, planes=True),
        "cut_pages": GatherTable(base="base", rows="rows", unit=Unit.PAGE, lens="lens", sentinel=3),
        "expanded": ExpandRows(table="cut"),
        "fp8": SlotMapping(table="slots", **mapping, data_bytes=128, scale_bytes=4, part="data"),
        "fp8_scale": SlotMapping(table="slots", **mapping, data_bytes=128, scale_bytes=4, part="scale"),
        "fp4": SlotMapping(table="cut", **mapping, data_bytes=64, scale_bytes=4, part="data", sentinel=-5),
        "sliding": SlidingTable(base="pages_base", rows="rows", pools="pools", scales="scales", offsets="offsets"),
    }


def shapes_of(geometry: Geometry, shape: Shape) -> dict[str, tuple[int, ...]]:
    batch, width = shape.batch, shape.width
    return {
        "slots": (batch, width),
        "cut": (batch, width),
        "tokens": (batch, width + 2),
        "pages": (geometry.num_pools, batch, geometry.kv_factor, width),
        "cut_pages": (batch, max(width - 1, 0)),
        "expanded": (batch * 3, width + 1),
        "fp8": (shape.tokens,),
        "fp8_scale": (shape.tokens,),
        "fp4": (shape.tokens,),
        "sliding": (3, 2, batch, width),
    }


def _random(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int64)


def entries(generator: torch.Generator, geometry: Geometry, scale: int, rows: int) -> Tensor:
    """i32 [P, R, Q, Bb]: places of the pool and a little beyond it, a third of them invalid or secondary."""
    shape = (geometry.num_pools, rows, geometry.kv_factor, geometry.max_blocks_per_seq)
    slots = _random(generator, 0, geometry.blocks_in_primary_pool + 2, *shape)
    entry = slots * scale + _random(generator, 0, scale, *shape)
    kind = _random(generator, 0, 6, *shape)
    return torch.where(kind == 0, -1, torch.where(kind == 1, entry + SECONDARY, entry)).to(torch.int32)


def rows_of(generator: torch.Generator, geometry: Geometry, shape: Shape, manager_rows: int) -> Tensor:
    """i32 [S]: the order of the manager, with padded rows."""
    if geometry.row_order is RowOrder.BATCH:
        rows = torch.arange(shape.batch)
    else:
        rows = torch.randperm(manager_rows, generator=generator)[: shape.batch]
    if shape.padding == "all":
        rows = torch.full((shape.batch,), -1)
    elif shape.padding == "some" and shape.batch:
        rows[shape.batch // 2] = -1
        rows[-1] = manager_rows if shape.batch > 3 else rows[-1]
    return rows.to(torch.int32)


def operands(geometry: Geometry, shape: Shape) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(shape.seed)
    manager_rows = shape.batch + 3
    longest = geometry.max_tokens_per_seq + 3
    requests = _random(generator, 0, max(shape.batch, 1), shape.tokens)
    requests[_random(generator, 0, 5, shape.tokens) == 0] = -1
    if shape.tokens > 2 or shape.padding == "all":
        requests[:1] = shape.batch
    if shape.padding == "all":
        requests.fill_(-1)
    pools = _random(generator, -1, geometry.num_pools, 3, 2)
    pools[0, 0] = -1
    return {
        "base": entries(generator, geometry, geometry.index_scale, manager_rows),
        "pages_base": entries(generator, geometry, 1, manager_rows),
        "rows": rows_of(generator, geometry, shape, manager_rows),
        "lens": _random(generator, 0, longest, shape.batch).to(torch.int32),
        "requests": requests.to(torch.int32),
        "back": _random(generator, -1, geometry.tokens_per_block * 2, shape.tokens).to(torch.int32),
        "pools": pools.to(torch.int32),
        "scales": _random(generator, 1, 9, 3, 2).to(torch.int32),
        "offsets": _random(generator, 0, 5, 3).to(torch.int32),
    }


def window(buffer_like: Tensor, strided: bool) -> tuple[Tensor, Tensor]:
    """A view with these contents, and the buffer around it. Strided: every outer axis has gaps; nothing is aligned."""
    gap = 3 if strided else 0
    sizes = [size + gap for size in buffer_like.shape[:-1]] + [buffer_like.shape[-1] + (5 if strided else 0)]
    buffer = torch.full(sizes, POISON, dtype=buffer_like.dtype)
    view = buffer[tuple(slice(gap // 2, gap // 2 + size) for size in buffer_like.shape)]
    view.copy_(buffer_like)
    return view, buffer


def placed(view: Tensor, buffer: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same view of the buffer's copy on a device."""
    moved = buffer.to(device)
    return moved.as_strided(view.shape, view.stride(), view.storage_offset()), moved


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def build(device: torch.device) -> Callable[..., Case]:
    """build(geometry, **shape) → a case with every kind of recipe."""

    def case(geometry: Geometry, **sizes: Any) -> Case:
        shape = Shape(**sizes)
        recipes = recipes_of(geometry)
        built = Case(recipes, {}, geometry)
        for name, tensor in operands(geometry, shape).items():
            built.tensors[name], _ = placed(*window(tensor, shape.strided), device)
        for name, size in shapes_of(geometry, shape).items():
            dtype = torch.int64 if isinstance(recipes[name], SlotMapping) else torch.int32
            output = window(torch.full(size, POISON, dtype=dtype), shape.strided)
            built.tensors[name], built.buffers[name] = placed(*output, device)
        return built

    return case
