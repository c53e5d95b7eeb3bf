"""Torch reference of `specfsm.kernels.refresh`: the recipes in plain indexing, one at a time.

Written for reading, not for speed: all arithmetic is int64, every index is clamped before use and masked afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from specfsm.domain import Geometry, Unit
from specfsm.kernels.recipes import INT32_MAX, ExpandRows, GatherTable, Recipe, SlidingTable, SlotMapping, source_table

__all__ = ["refresh_reference"]


def refresh_reference(
    recipes: Mapping[str, Recipe],
    tensors: Mapping[str, Tensor],
    geometry: Geometry,
    names: Iterable[str] | None = None,
) -> None:
    """Write the outputs called `names` (None: all), in place, on whatever device the tensors are.

    Bindings are taken as `specfsm.kernels.recipes.validate_bindings` accepts them; `RefreshLaunch` has checked them.
    """
    for name in recipes if names is None else names:
        values = _VALUES[type(recipes[name])]
        tensors[name].copy_(values(name, recipes, tensors, geometry))


def _gather_table(
    name: str, recipes: Mapping[str, Recipe], tensors: Mapping[str, Tensor], geometry: Geometry
) -> Tensor:
    """[S, B], or [P, S, Q, B] with planes."""
    recipe, out = recipes[name], tensors[name]
    assert isinstance(recipe, GatherTable)
    pools, planes = (out.shape[0], out.shape[2]) if recipe.planes else (1, 1)
    pool = torch.arange(pools, device=out.device)[:, None, None, None]
    row = torch.arange(tensors[recipe.rows].shape[0], device=out.device)[:, None, None]
    plane = torch.arange(planes, device=out.device)[:, None]
    block = torch.arange(out.shape[-1], device=out.device)
    slot = _slots(recipe, tensors, geometry, row, block, pool=pool, plane=plane)
    offset = plane if recipe.unit is Unit.PAGE else 0
    value = torch.where(slot < 0, recipe.sentinel, slot * geometry.scale(recipe.unit) + offset)
    return value if recipe.planes else value[0, :, 0]


def _expand_rows(name: str, recipes: Mapping[str, Recipe], tensors: Mapping[str, Tensor], geometry: Geometry) -> Tensor:
    """[S x times, B]."""
    recipe, out = recipes[name], tensors[name]
    assert isinstance(recipe, ExpandRows)
    source = source_table(name, recipe.table, recipes)
    row = torch.arange(out.shape[0], device=out.device)[:, None] // recipe.repeats(out, tensors[source.rows])
    block = torch.arange(out.shape[1], device=out.device)
    slot = _slots(source, tensors, geometry, row, block, width=tensors[recipe.table].shape[-1])
    return torch.where(slot < 0, source.sentinel, slot * geometry.scale(source.unit))


def _slot_mapping(
    name: str, recipes: Mapping[str, Recipe], tensors: Mapping[str, Tensor], geometry: Geometry
) -> Tensor:
    """[T]."""
    recipe = recipes[name]
    assert isinstance(recipe, SlotMapping)
    source = source_table(name, recipe.table, recipes)
    request = tensors[recipe.requests].long()
    position = _at(tensors[recipe.lens], request, 0) - tensors[recipe.back].long()
    position = torch.where(position > INT32_MAX, -1, position)
    block, offset = position // geometry.tokens_per_block, position % geometry.tokens_per_block
    slot = _slots(source, tensors, geometry, request, block, width=tensors[recipe.table].shape[-1])
    start = slot * recipe.block_bytes(geometry)
    if recipe.part == "data":
        value = start + offset * recipe.data_bytes
    else:
        value = start + geometry.tokens_per_block * recipe.data_bytes + offset * recipe.scale_bytes
    return torch.where(slot < 0, recipe.sentinel, value)


def _sliding_table(
    name: str, recipes: Mapping[str, Recipe], tensors: Mapping[str, Tensor], geometry: Geometry
) -> Tensor:
    """[L, Y, S, B]."""
    recipe, out = recipes[name], tensors[name]
    assert isinstance(recipe, SlidingTable)
    row = tensors[recipe.rows].long()[:, None]
    block = torch.arange(out.shape[-1], device=out.device)
    zero = torch.zeros((), dtype=torch.int64, device=out.device)
    pool, scale = (tensors[each].long()[:, :, None, None] for each in (recipe.pools, recipe.scales))
    entry = _entries(tensors[recipe.base], pool, row, zero, block)
    place = entry.clamp(max=geometry.blocks_in_primary_pool - 1)
    value = place * scale + tensors[recipe.offsets].long()[:, None, None, None]
    return torch.where(entry < 0, recipe.sentinel, value)


def _slots(
    recipe: GatherTable,
    tensors: Mapping[str, Tensor],
    geometry: Geometry,
    row: Tensor,
    block: Tensor,
    *,
    width: int | None = None,
    pool: Tensor | None = None,
    plane: Tensor | None = None,
) -> Tensor:
    """Decoded slot of (batch row, block) of a table that is `width` blocks wide; -1 where there is none."""
    zero = torch.zeros((), dtype=torch.int64, device=row.device)
    manager_row = _at(tensors[recipe.rows], row, -1)
    entry = _entries(
        tensors[recipe.base], zero if pool is None else pool, manager_row, zero if plane is None else plane, block
    )
    valid = entry >= 0
    if width is not None:
        valid = valid & (block < width)
    if recipe.lens is not None:
        valid = valid & (block * geometry.tokens_per_block < _at(tensors[recipe.lens], row, 0))
    slot = (entry // geometry.index_scale).clamp(max=geometry.blocks_in_primary_pool - 1)
    return torch.where(valid, slot, -1)


def _entries(base: Tensor, pool: Tensor, row: Tensor, plane: Tensor, block: Tensor) -> Tensor:
    """Entries of base [P, R, Q, Bb] as int64; -1 wherever an index lies outside."""
    indices = torch.broadcast_tensors(pool, row, plane, block)  # type: ignore[no-untyped-call]  # torch has no types here
    if not base.numel():
        return torch.full_like(indices[0], -1)
    pairs = list(zip(indices, base.shape, strict=True))
    inside = torch.stack([(index >= 0) & (index < size) for index, size in pairs]).all(0)
    found = base[tuple(index.clamp(0, size - 1) for index, size in pairs)].long()
    return torch.where(inside, found, -1)


def _at(vector: Tensor, index: Tensor, other: int) -> Tensor:
    """vector[index] as int64; `other` wherever the index lies outside."""
    if not vector.numel():
        return torch.full_like(index, other)
    inside = (index >= 0) & (index < vector.shape[0])
    return torch.where(inside, vector[index.clamp(0, vector.shape[0] - 1)].long(), other)


_VALUES: dict[type[Any], Callable[[str, Mapping[str, Recipe], Mapping[str, Tensor], Geometry], Tensor]] = {
    GatherTable: _gather_table,
    SlotMapping: _slot_mapping,
    SlidingTable: _sliding_table,
    ExpandRows: _expand_rows,
}
