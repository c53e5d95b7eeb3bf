"""The reference against a few lines of Python that share nothing with it: nested loops over the manager's lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specfsm.domain import Geometry, RowOrder
from specfsm.kernels import refresh_reference

GEOMETRIES = {
    "wide": Geometry(tokens_per_block=8, blocks_in_primary_pool=50, max_blocks_per_seq=9, num_layers=3, index_scale=6),
    "draft": Geometry(
        tokens_per_block=4,
        blocks_in_primary_pool=7,
        max_blocks_per_seq=5,
        num_layers=1,
        kv_factor=1,
        row_order=RowOrder.SLOT,
    ),
    "pools": Geometry(
        tokens_per_block=3,
        blocks_in_primary_pool=20,
        max_blocks_per_seq=7,
        num_layers=2,
        index_scale=4,
        num_pools=3,
        row_order=RowOrder.SLOT,
    ),
}
POISON = -77777
OPERANDS = ("base", "pages_base", "rows", "lens", "requests", "back", "pools", "scales", "offsets")


class Manager:
    """The case's operands as Python lists."""

    def __init__(self, case: Any) -> None:
        self.geometry: Geometry = case.geometry
        lists: dict[str, Any] = {name: case.tensors[name].tolist() for name in OPERANDS}
        self.base, self.pages_base, self.rows, self.lens = (lists[name] for name in OPERANDS[:4])
        self.requests, self.back, self.pools, self.scales, self.offsets = (lists[name] for name in OPERANDS[4:])

    def entry(self, base: Any, pool: int, row: int, plane: int, block: int) -> int:
        manager_row = self.rows[row] if 0 <= row < len(self.rows) else -1
        if not 0 <= manager_row < len(base[0]) or block >= len(base[0][0][0]) or pool < 0:
            return -1
        return int(base[pool][manager_row][plane][block])

    def slot(self, row: int, block: int, *, cut: bool = False, pool: int = 0, plane: int = 0) -> int | None:
        entry = self.entry(self.base, pool, row, plane, block)
        if entry < 0 or (cut and block >= -(-self.lens[row] // self.geometry.tokens_per_block)):
            return None
        return min(entry // self.geometry.index_scale, self.geometry.blocks_in_primary_pool - 1)

    def sliding(self, layer: int, kind: int, row: int, block: int) -> int:
        entry = self.entry(self.pages_base, self.pools[layer][kind], row, 0, block)
        if entry < 0:
            return -1
        return min(entry, self.geometry.blocks_in_primary_pool - 1) * int(self.scales[layer][kind]) + int(
            self.offsets[layer]
        )

    def token(self, token: int, width: int, data: int, scale: int, part: str, *, cut: bool) -> int | None:
        request, page = self.requests[token], self.geometry.tokens_per_block
        if not 0 <= request < len(self.lens):
            return None
        block, row = divmod(int(self.lens[request]) - int(self.back[token]), page)
        if not 0 <= block < width or (slot := self.slot(request, block, cut=cut)) is None:
            return None
        pool_of_blocks = slot * (page * data + page * scale)
        return pool_of_blocks + (row * data if part == "data" else page * data + row * scale)


def other(value: int | None, sentinel: int, scale: int = 1, offset: int = 0) -> int:
    return sentinel if value is None else value * scale + offset


def expected(case: Any) -> dict[str, Any]:
    """Every output as nested lists."""
    m, page, pages = Manager(case), case.geometry.tokens_per_block, case.geometry.num_layers * case.geometry.kv_factor
    shapes = {name: case.tensors[name].shape for name in case.recipes}

    def table(name: str, value: Any) -> Any:
        return [[value(row, block) for block in range(shapes[name][-1])] for row in range(shapes[name][-2])]

    def tokens(name: str, sentinel: int, data: int, scale: int, part: str, *, cut: bool) -> Any:
        width = shapes["cut" if cut else "slots"][1]
        return [other(m.token(token, width, data, scale, part, cut=cut), sentinel) for token in range(shapes[name][0])]

    source_width = shapes["cut"][1]
    return {
        "slots": table("slots", lambda r, b: other(m.slot(r, b), 0)),
        "cut": table("cut", lambda r, b: other(m.slot(r, b, cut=True), -1)),
        "tokens": table("tokens", lambda r, b: other(m.slot(r, b), -9, page)),
        "cut_pages": table("cut_pages", lambda r, b: other(m.slot(r, b, cut=True), 3, pages)),
        "expanded": table(
            "expanded", lambda r, b: other(m.slot(r // 3, b, cut=True) if b < source_width else None, -1)
        ),
        "pages": [
            [
                [
                    [other(m.slot(r, b, pool=p, plane=q), 0, pages, q) for b in range(shapes["pages"][3])]
                    for q in range(shapes["pages"][2])
                ]
                for r in range(shapes["pages"][1])
            ]
            for p in range(shapes["pages"][0])
        ],
        "fp8": tokens("fp8", -1, 128, 4, "data", cut=False),
        "fp8_scale": tokens("fp8_scale", -1, 128, 4, "scale", cut=False),
        "fp4": tokens("fp4", -5, 64, 4, "data", cut=True),
        "sliding": [
            [table("sliding", lambda r, b, la=layer, ki=kind: m.sliding(la, ki, r, b)) for kind in range(2)]
            for layer in range(3)
        ],
    }


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize(
    "sizes",
    [{}, {"seed": 1, "width": 12}, {"batch": 1, "tokens": 1, "width": 1}, {"strided": True, "padding": "none"},
     {"padding": "all"}, {"batch": 4, "tokens": 40, "width": 4, "seed": 2}],
    ids=str,
)  # fmt: skip
def test_equals_nested_loops(build: Any, geometry: Geometry, sizes: dict[str, Any]) -> None:
    """Every element of every output, padded rows and trailing columns included."""
    case = build(geometry, **sizes)
    refresh_reference(case.recipes, case.tensors, case.geometry)
    for name, value in expected(case).items():
        assert case.tensors[name].tolist() == value, name


def test_cases_have_every_sort_of_entry(build: Any) -> None:
    """What the comparison above claims to cover does occur in it."""
    case = build(GEOMETRIES["pools"], batch=4, tokens=40, seed=2)
    base, bound = case.tensors["base"], case.geometry.blocks_in_primary_pool
    assert (base == -1).any()
    assert (base < -1).any()
    assert (base // case.geometry.index_scale >= bound).any()
    refresh_reference(case.recipes, case.tensors, case.geometry)
    for name, recipe in case.recipes.items():
        sentinel = case.recipes[recipe.table].sentinel if name == "expanded" else recipe.sentinel
        invalid = case.tensors[name] == sentinel
        assert invalid.any(), name
        assert not invalid.all(), name


def test_writes_only_what_is_named(build: Any) -> None:
    case = build(GEOMETRIES["wide"])
    refresh_reference(case.recipes, case.tensors, case.geometry, ["cut"])
    written = [name for name, buffer in case.buffers.items() if (buffer != POISON).any()]
    assert written == ["cut"]


def test_positions_beyond_int32_are_outside(build: Any) -> None:
    """lens - back passes 2**31 only when `back` is garbage; the slot mapping then says so."""
    case = build(GEOMETRIES["wide"], padding="none")
    case.tensors["lens"].fill_(2**31 - 1)
    case.tensors["back"].fill_(-(2**31))
    refresh_reference(case.recipes, case.tensors, case.geometry, ["fp8"])
    assert torch.equal(case.tensors["fp8"], torch.full_like(case.tensors["fp8"], -1))
