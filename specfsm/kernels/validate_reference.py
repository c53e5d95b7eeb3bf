"""Torch reference of `specfsm.kernels.validate`: what each table must hold, computed another way than it was written.

Nothing here is shared with the refresh or its reference: entries are looked up in a copy of the manager's table that is
padded with a row and a column of nothing, and divided as floating-point numbers, which is exact for int32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from specfsm.domain import NOBODY, Geometry, Unit
from specfsm.kernels.recipes import INT32_MAX, ExpandRows, GatherTable, Recipe, SlidingTable, SlotMapping, source_table

__all__ = ["BOUNDS", "CONTENTS", "INDEX_BITS", "NOTHING", "OWNER", "PROGRAM_BITS", "SENTINEL", "validate_reference"]

BOUNDS, SENTINEL, OWNER, CONTENTS = 1, 2, 3, 4
NOTHING = 2**63 - 1
"""The key of a record without a violation."""
INDEX_BITS, PROGRAM_BITS = 37, 20
"""A key is ``recipe << 57 | element << 20 | program``: the lowest one is the first element of the first recipe."""


@frozen
class _Wanted:
    """What an output must hold; everything broadcasts to its shape.

    Args:
        slot: float64; -1 where there is no place.
        scale, offset: value = slot x scale + offset + within.
        within: what a token adds inside its block.
        row: manager's row; the one behind the last where there is none.
        sentinel: value where there is no place.
    """

    slot: Tensor
    scale: Tensor
    offset: Tensor
    within: Tensor
    row: Tensor
    sentinel: int


def validate_reference(
    recipes: Mapping[str, Recipe],
    tensors: Mapping[str, Tensor],
    geometry: Geometry,
    names: Iterable[str],
    requests: Tensor,
    owners: Mapping[str, Tensor],
) -> Tensor:
    """The first violation in the outputs called `names`, as a record i64 [7], see `specfsm.kernels.validate`.

    Args:
        requests: i64 [R or more], the request of each row of the manager's table; `NOBODY` where none is known.
        owners: output → i64 [slots], the request that holds each slot of its pool. Others' owners are not checked.
    """
    wanted_names = set(names)
    for bit, name in enumerate(recipes):
        if name in wanted_names:
            wanted = _WANTED[type(recipes[name])](name, recipes, tensors, geometry)
            record = _first(tensors[name], wanted, geometry, requests, owners.get(name))
            if record is not None:
                key = bit << INDEX_BITS + PROGRAM_BITS | record[0] << PROGRAM_BITS
                return torch.tensor([key, 0, *record[1:]], device=tensors[name].device)
    return torch.tensor([NOTHING, *[0] * 6])


def _first(
    out: Tensor, wanted: _Wanted, geometry: Geometry, requests: Tensor, owners: Tensor | None
) -> tuple[int, ...] | None:
    """(element, kind, found, expected, owner, request) of the first violation of one output."""
    found, placed = out.long(), (wanted.slot >= 0).expand(out.shape)
    value = wanted.slot.long() * wanted.scale + wanted.offset + wanted.within
    expected = torch.where(placed, value, wanted.sentinel)
    request = _looked_up(requests, wanted.row).expand(out.shape)
    largest = (geometry.blocks_in_primary_pool - 1) * wanted.scale + torch.maximum(wanted.scale - 1, wanted.offset)
    outside = (found < 0) | (found > largest)
    owner, foreign = torch.full_like(found, NOBODY), torch.zeros_like(placed)
    if owners is not None:
        slot = (found - wanted.offset).clamp(min=0) // wanted.scale.clamp(min=1)
        owner = _looked_up(owners, slot)
        foreign = placed & ~outside & (request != NOBODY) & (owner != request)
    kind = torch.where(placed & (found != expected), CONTENTS, 0)
    kind = torch.where(foreign, OWNER, kind)
    kind = torch.where(~placed & (found != wanted.sentinel), SENTINEL, kind)
    kind = torch.where(outside & (found != wanted.sentinel), BOUNDS, kind)
    wrong = kind.flatten().nonzero()
    if not len(wrong):
        return None
    at = int(wrong[0])
    return (at, *(int(each.flatten()[at]) for each in (kind, found, expected, owner, request)))


def _looked_up(vector: Tensor, index: Tensor) -> Tensor:
    """vector[index]; `NOBODY` behind its end."""
    return functional.pad(vector, (0, 1), value=NOBODY)[index.clamp(max=len(vector))]


def _padded(base: Tensor) -> Tensor:
    """[P + 1, R + 1, Q + 1, Bb + 1], float64; what was added holds no entry."""
    return functional.pad(base.double(), (0, 1) * 4, value=-1.0)


def _lines(index: Tensor, count: int) -> Tensor:
    """The same indices; `count`, which is the padding, wherever one lies outside."""
    index = index.long()
    return torch.where((index >= 0) & (index < count), index, count)


def _slots(recipe: GatherTable, tensors: Mapping[str, Tensor], geometry: Geometry, width: int) -> Tensor:
    """[P + 1, S, Q + 1, width], float64; -1 where there is no place."""
    base, rows = tensors[recipe.base], tensors[recipe.rows]
    columns = torch.arange(width, device=base.device)
    entries = _padded(base).index_select(1, _lines(rows, base.shape[1]))
    entries = entries.index_select(3, _lines(columns, base.shape[3]))
    slots = (entries / geometry.index_scale).floor().clamp(max=geometry.blocks_in_primary_pool - 1)
    placed = entries >= 0
    if recipe.lens is not None:
        pages = (tensors[recipe.lens].double() / geometry.tokens_per_block).ceil()
        placed = placed & (columns < pages[:, None])[:, None, :]
    return slots.where(placed, -1.0)


def _int(number: int, like: Tensor) -> Tensor:
    return torch.tensor(number, device=like.device)


def _gather_table(
    name: str, recipes: Mapping[str, Recipe], tensors: Mapping[str, Tensor], geometry: Geometry
) -> _Wanted:
    recipe, out = recipes[name], tensors[name]
    assert isinstance(recipe, GatherTable)
    slots = _slots(recipe, tensors, geometry, out.shape[-1])
    row = _lines(tensors[recipe.rows], tensors[recipe.base].shape[1])
    offset = _int(0, out)
    if recipe.planes:
        slots, row = slots[: out.shape[0], :, : out.shape[2]], row[:, None, None]
        if recipe.unit is Unit.PAGE:
            offset = torch.arange(out.shape[2], device=out.device)[:, None]
    else:
        slots, row = slots[0, :, 0], row[:, None]
    return _Wanted(slots, _int(geometry.scale(recipe.unit), out), offset, _int(0, out), row, recipe.sentinel)


def _expand_rows(
    name: str, recipes: Mapping[str, Recipe], tensors: Mapping[str, Tensor], geometry: Geometry
) -> _Wanted:
    recipe, out = recipes[name], tensors[name]
    assert isinstance(recipe, ExpandRows)
    source = source_table(name, recipe.table, recipes)
    times = recipe.repeats(out, tensors[source.rows])
    own = _slots(source, tensors, geometry, tensors[recipe.table].shape[-1])[0, :, 0]
    columns = _lines(torch.arange(out.shape[-1], device=out.device), own.shape[-1])
    slots = functional.pad(own, (0, 1), value=-1.0).index_select(1, columns).repeat_interleave(times, 0)
    row = _lines(tensors[source.rows], tensors[source.base].shape[1]).repeat_interleave(times, 0)[:, None]
    zero = _int(0, out)
    return _Wanted(slots, _int(geometry.scale(source.unit), out), zero, zero, row, source.sentinel)


def _slot_mapping(
    name: str, recipes: Mapping[str, Recipe], tensors: Mapping[str, Tensor], geometry: Geometry
) -> _Wanted:
    recipe, out = recipes[name], tensors[name]
    assert isinstance(recipe, SlotMapping)
    source, page = source_table(name, recipe.table, recipes), geometry.tokens_per_block
    own = _slots(source, tensors, geometry, tensors[recipe.table].shape[-1])[0, :, 0]
    request = _lines(tensors[recipe.requests], own.shape[0])
    ends = functional.pad(tensors[recipe.lens].double(), (0, 1))[request]
    position = ends - tensors[recipe.back].double()
    inside = (position >= 0) & (position <= INT32_MAX)
    block = (position / page).floor()
    token = (position - block * page).where(inside, 0.0).long()
    column = _lines(block.where(inside, -1.0), own.shape[1])
    rows = functional.pad(
        _lines(tensors[source.rows], tensors[source.base].shape[1]), (0, 1), value=tensors[source.base].shape[1]
    )
    slots = functional.pad(own, (0, 1, 0, 1), value=-1.0)[request, column]
    data = recipe.part == "data"
    return _Wanted(
        slots,
        _int(page * (recipe.data_bytes + recipe.scale_bytes), out),
        _int(0 if data else page * recipe.data_bytes, out),
        token * (recipe.data_bytes if data else recipe.scale_bytes),
        rows[request],
        recipe.sentinel,
    )


def _sliding_table(
    name: str, recipes: Mapping[str, Recipe], tensors: Mapping[str, Tensor], geometry: Geometry
) -> _Wanted:
    recipe, out = recipes[name], tensors[name]
    assert isinstance(recipe, SlidingTable)
    base, pools = tensors[recipe.base], tensors[recipe.pools]
    row = _lines(tensors[recipe.rows], base.shape[1])
    columns = _lines(torch.arange(out.shape[-1], device=out.device), base.shape[3])
    of_pool = _padded(base)[:, :, 0].index_select(0, _lines(pools, base.shape[0]).flatten())
    entries = of_pool.index_select(1, row).index_select(2, columns).view(out.shape)
    slots = entries.clamp(max=geometry.blocks_in_primary_pool - 1).where(entries >= 0, -1.0)
    scale, offset = tensors[recipe.scales].long()[:, :, None, None], tensors[recipe.offsets].long()[:, None, None, None]
    return _Wanted(slots, scale, offset, _int(0, out), row[:, None], recipe.sentinel)


_WANTED: dict[type[Any], Callable[[str, Mapping[str, Recipe], Mapping[str, Tensor], Geometry], _Wanted]] = {
    GatherTable: _gather_table,
    SlotMapping: _slot_mapping,
    SlidingTable: _sliding_table,
    ExpandRows: _expand_rows,
}
