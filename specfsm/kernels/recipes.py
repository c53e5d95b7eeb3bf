"""Recipes: what a derived table is, as data. `RefreshLaunch` executes them; nothing here computes.

A recipe names its operands by resource name and holds no number of any cache: divisor, bound, scale, offset and page
size come from the `Geometry` of the domain it is executed for, so that one recipe serves target and draft.

Axes: P pools, R rows of the manager's table, Q planes (K and V), Bb blocks a row of the manager's table, S rows of the
batch, B blocks a row of the output, T tokens of the batch, L layers, Y types. Dtypes: i32 and i64 are torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any, Literal

import torch
from attrs import field, frozen
from attrs.validators import ge, gt, in_, optional
from torch import Tensor

from specfsm.domain import Geometry, Unit

__all__ = [
    "MAX_RECIPES",
    "ExpandRows",
    "GatherTable",
    "Operand",
    "Recipe",
    "SlidingTable",
    "SlotMapping",
    "largest_slot",
    "source_table",
    "validate_bindings",
]

MAX_RECIPES = 63
"""Recipes of one launch: its mask is a signed 64-bit integer with a bit each."""

INT32_MAX = 2**31 - 1
PLACES = (Unit.SLOT, Unit.PAGE, Unit.TOKEN)
"""The units a decoded entry can be counted in: places in a pool. A block id is a name, not a place."""


def _is_name(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{attribute.name} must be a resource name, got {value!r}")


def _name() -> Any:
    return field(validator=_is_name)


def _sentinel(default: int, bits: int = 32) -> Any:
    def fits(_: object, __: object, value: int) -> None:
        if not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            raise ValueError(f"the sentinel of an int{bits} output must fit it, got {value}")

    return field(default=default, validator=fits)


@frozen
class Operand:
    """One tensor of a recipe: who asks for it, under what name, and what it must look like.

    Args:
        role: field of the recipe, or ``out``.
        name: resource name.
        dtype: element type.
        axes: named axes; ``("S", 4)`` is an axis four times as long as S, ``("S", 0)`` any multiple of it.
    """

    role: str
    name: str
    dtype: torch.dtype
    axes: tuple[str | tuple[str, int], ...]

    def __str__(self) -> str:
        axes = ", ".join(axis if isinstance(axis, str) else f"{axis[0]} x {axis[1] or 'n'}" for axis in self.axes)
        return f"{self.role} {str(self.dtype).removeprefix('torch.')} [{axes}]"


class Recipe:
    """What one output is derived from, and how. See the subclasses."""

    __slots__ = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Resource names that the recipe names, other recipes' outputs included: the edges of the dependency graph."""
        raise NotImplementedError

    @property
    def expects(self) -> Mapping[str, Unit]:
        """Operand → what its entries must count, for whoever composes recipes; a raw block id fits none."""
        return {}

    @property
    def holds(self) -> Unit | None:
        """What the output's entries count; None: the same as the operand of `pool_of`."""
        return None

    @property
    def pool_of(self) -> str | None:
        """The operand in whose pool the output's entries point; None where the pool is the output's own to declare,
        since pages of several pools go together."""
        return None

    def operands(self, out: str, recipes: Mapping[str, Recipe]) -> tuple[Operand, ...]:
        """The tensors whose memory the launch touches for this recipe; the output, named `out`, stands last."""
        raise NotImplementedError

    def check(self, out: str, tensors: Mapping[str, Tensor], geometry: Geometry) -> None:
        """Refuse what shapes and dtypes do not show, such as a value that would not fit the output."""


@frozen(kw_only=True)
class GatherTable(Recipe):
    """Block table: the batch's rows of the manager's table, decoded into places of the pool.

    An entry e of the manager is invalid where e < 0: -1, or bit 31 set because the block lies in the secondary pool.
    Otherwise its slot is ``e // index_scale``, clamped to ``[0, blocks_in_primary_pool - 1]``, and its value is
    ``slot x scale(unit) + offset``, with the plane's index as the offset of unit PAGE (K 0, V 1) and 0 otherwise.

    Args:
        base: i32 [P, R, Q, Bb], device copy of the manager's ``host_block_offsets``.
        rows: i32 [S], row of the manager's table that holds each row of the batch; -1 (anything outside [0, R)) is a
            padded row, whose whole output takes the sentinel.
        unit: what the values count: SLOT, PAGE or TOKEN.
        lens: i32 [S] or None; columns at or beyond ``ceil(len / tokens_per_block)`` take the sentinel.
        planes: False: out is i32 [S, B], of pool 0 and plane 0. True: out is i32 [P, S, Q, B].
        sentinel: value where there is no place: invalid entry, padded row, column beyond `lens` or beyond Bb.

    B may be smaller or larger than Bb. Source: ``kv_cache_block_offsets``, ``indexer_k_cache_block_offsets`` and
    ``block_table`` of TensorRT-LLM's attention metadata.
    """

    base: str = _name()
    rows: str = _name()
    unit: Unit = field(validator=in_(PLACES))
    lens: str | None = field(default=None, validator=optional(_is_name))
    planes: bool = False
    sentinel: int = _sentinel(0)

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.base, self.rows) if self.lens is None else (self.base, self.rows, self.lens)

    @property
    def expects(self) -> Mapping[str, Unit]:
        return {self.base: Unit.ENTRY, self.rows: Unit.ROW}

    @property
    def holds(self) -> Unit:
        return self.unit

    def inputs(self) -> tuple[Operand, ...]:
        """What decoding an entry reads; also read by every recipe that decodes through this one."""
        lens = () if self.lens is None else (Operand("lens", self.lens, torch.int32, ("S",)),)
        base = Operand("base", self.base, torch.int32, ("P", "R", "Q", "Bb"))
        return (base, Operand("rows", self.rows, torch.int32, ("S",)), *lens)

    def operands(self, out: str, recipes: Mapping[str, Recipe]) -> tuple[Operand, ...]:
        axes = ("P", "S", "Q", "B") if self.planes else ("S", "B")
        return (*self.inputs(), Operand("out", out, torch.int32, axes))

    def check(self, out: str, tensors: Mapping[str, Tensor], geometry: Geometry) -> None:
        planes = tensors[self.base].shape[2] if self.planes and self.unit is Unit.PAGE else 1
        if planes > geometry.pages_per_slot:
            raise ValueError(
                f"{out}: base {self.base!r} has Q={planes} planes, but a slot has {geometry.pages_per_slot} pages "
                "(num_layers x kv_factor): bind the table of this domain's manager, or correct the geometry"
            )
        _fits(out, largest_slot(geometry) * geometry.scale(self.unit) + planes - 1, 32)


@frozen(kw_only=True)
class SlotMapping(Recipe):
    """Where each token's row lies in a pool of (data, scale) blocks, in bytes: i64 [T].

    Inside a block all data rows come first, then all scale rows. Token t stands at position
    ``p = lens[requests[t]] - back[t]`` of its request, and with ``off = p % tokens_per_block``::

        stride = tokens_per_block x (data_bytes + scale_bytes)
        data   = slot x stride + off x data_bytes
        scale  = slot x stride + tokens_per_block x data_bytes + off x scale_bytes

    `back` counts from the request's end so that what follows the layout alone stays put while lengths advance on the
    device. The slot is decoded again from the table's own operands, never read from the table: the table may be stale,
    masked out, or being written by the same launch.

    Args:
        table: a `GatherTable` of the same launch, of unit SLOT and without planes; its `lens` and its width apply.
        requests: i32 [T], row of the batch that each token belongs to; -1 (anything outside [0, S)) is padding.
        back: i32 [T], tokens before the request's end: 1 is its last token.
        lens: i32 [S], tokens of each request.
        data_bytes, scale_bytes: bytes of one token's data and scale rows: 128 and 4 for FP8, 64 and 4 for FP4.
        part: which of the two rows.
        sentinel: value of padding tokens, positions outside the table (or the int32 range), and invalid entries.

    Source: ``slot_mapping_fp8`` and ``slot_mapping_scale`` of TensorRT-LLM's DSA metadata.
    """

    table: str = _name()
    requests: str = _name()
    back: str = _name()
    lens: str = _name()
    data_bytes: int = field(validator=gt(0))
    scale_bytes: int = field(validator=ge(0))
    part: Literal["data", "scale"] = field(validator=in_(("data", "scale")))
    sentinel: int = _sentinel(-1, bits=64)

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.table, self.requests, self.back, self.lens)

    @property
    def expects(self) -> Mapping[str, Unit]:
        return {self.table: Unit.SLOT, self.requests: Unit.REQUEST}

    @property
    def holds(self) -> Unit:
        return Unit.BYTE

    @property
    def pool_of(self) -> str:
        return self.table

    def operands(self, out: str, recipes: Mapping[str, Recipe]) -> tuple[Operand, ...]:
        table = source_table(out, self.table, recipes)
        if table.unit is not Unit.SLOT:
            raise ValueError(
                f"{out}: table {self.table!r} counts in {table.unit.value}s; a slot mapping needs unit SLOT"
            )
        return (
            *table.inputs(),
            Operand("requests", self.requests, torch.int32, ("T",)),
            Operand("back", self.back, torch.int32, ("T",)),
            Operand("lens", self.lens, torch.int32, ("S",)),
            Operand("out", out, torch.int64, ("T",)),
        )

    def block_bytes(self, geometry: Geometry) -> int:
        """Bytes from one block to the next."""
        return geometry.tokens_per_block * (self.data_bytes + self.scale_bytes)

    def check(self, out: str, tensors: Mapping[str, Tensor], geometry: Geometry) -> None:
        _fits(out, (largest_slot(geometry) + 1) * self.block_bytes(geometry) - 1, 64)


@frozen(kw_only=True)
class SlidingTable(Recipe):
    """Sliding-window tables of all layers: i32 [L, Y, S, B].

    ``out[l, y, s, b] = base[pools[l, y], rows[s], 0, b] x scales[l, y] + offsets[l]``, and the sentinel where that
    entry or that pool is invalid, the row is padded, or b lies beyond Bb. Entries are base page ids: they are clamped
    to ``[0, blocks_in_primary_pool - 1]`` but not divided.

    Args:
        base: i32 [P, R, Q, Bb], device copy of the manager's base table; plane 0 is read.
        rows: i32 [S], as in `GatherTable`.
        pools: i32 [L, Y], pool of each layer and type; -1 where there is none.
        scales: i32 [L, Y], pages of that pool from one base page to the next.
        offsets: i32 [L], the layer's page within them.
        sentinel: value where there is no place.

    `pools`, `scales` and `offsets` are configuration: their contents are checked when they are bound, and read by
    every launch. Source: ``sliding_block_tables`` of TensorRT-LLM's DeepSeek-V4 metadata.
    """

    base: str = _name()
    rows: str = _name()
    pools: str = _name()
    scales: str = _name()
    offsets: str = _name()
    sentinel: int = _sentinel(-1)

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.base, self.rows, self.pools, self.scales, self.offsets)

    @property
    def expects(self) -> Mapping[str, Unit]:
        return {self.base: Unit.ENTRY, self.rows: Unit.ROW}

    @property
    def holds(self) -> Unit:
        return Unit.PAGE

    @property
    def pool_of(self) -> str:
        return self.base

    def operands(self, out: str, recipes: Mapping[str, Recipe]) -> tuple[Operand, ...]:
        return (
            Operand("base", self.base, torch.int32, ("P", "R", "Q", "Bb")),
            Operand("rows", self.rows, torch.int32, ("S",)),
            Operand("pools", self.pools, torch.int32, ("L", "Y")),
            Operand("scales", self.scales, torch.int32, ("L", "Y")),
            Operand("offsets", self.offsets, torch.int32, ("L",)),
            Operand("out", out, torch.int32, ("L", "Y", "S", "B")),
        )

    def check(self, out: str, tensors: Mapping[str, Tensor], geometry: Geometry) -> None:
        pools, scales, offsets = (tensors[name].cpu().long() for name in (self.pools, self.scales, self.offsets))
        scales, offsets = scales[pools >= 0], offsets[:, None].expand_as(pools)[pools >= 0]
        if not scales.numel():
            return
        limit = tensors[self.base].shape[0]
        if int(pools.max()) >= limit:
            raise ValueError(
                f"{out}: pools {self.pools!r} names pool {int(pools.max())}, but base {self.base!r} has P={limit} "
                "pools: bind the pools of this domain's manager, with -1 where a layer has none"
            )
        if int(scales.min()) < 0 or int(offsets.min()) < 0:
            raise ValueError(
                f"{out}: scales {self.scales!r} and offsets {self.offsets!r} must not be negative, "
                f"got a minimum of {int(scales.min())} and {int(offsets.min())}"
            )
        bound = min(geometry.blocks_in_primary_pool - 1, INT32_MAX)
        _fits(out, max(bound * s + o for s, o in zip(scales.tolist(), offsets.tolist(), strict=True)), 32)


@frozen(kw_only=True)
class ExpandRows(Recipe):
    """A block table with each row repeated: i32 [S x times, B], where row r is the source's row ``r // times``.

    Like `SlotMapping` it decodes again through the source, and takes the source's sentinel. Columns beyond the
    source's own width take the sentinel too.

    Args:
        table: a `GatherTable` of the same launch, without planes.
        times: rows for each row of the source: tokens a request in the target's step. None: as many as the output has.

    Source: ``block_table_expanded`` of TensorRT-LLM's DSA metadata.
    """

    table: str = _name()
    times: int | None = field(default=None, validator=optional(gt(0)))

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.table,)

    @property
    def pool_of(self) -> str:
        return self.table

    def operands(self, out: str, recipes: Mapping[str, Recipe]) -> tuple[Operand, ...]:
        table = source_table(out, self.table, recipes)
        return (*table.inputs(), Operand("out", out, torch.int32, (("S", self.times or 0), "B")))

    def repeats(self, out: Tensor, rows: Tensor) -> int:
        """Rows of `out` for each of the source's `rows`."""
        return self.times or out.shape[0] // max(1, rows.shape[0]) or 1


def largest_slot(geometry: Geometry) -> int:
    """The largest slot that an entry decodes to: the pool's last, or what an int32 entry can name."""
    return min(geometry.blocks_in_primary_pool - 1, INT32_MAX // geometry.index_scale)


def source_table(out: str, name: str, recipes: Mapping[str, Recipe]) -> GatherTable:
    """The recipe that `out` decodes through, which must be a plane-less `GatherTable` of the same launch."""
    recipe = recipes.get(name)
    if not isinstance(recipe, GatherTable):
        found = "no recipe of that name" if recipe is None else f"a {type(recipe).__name__}"
        raise ValueError(
            f"{out}: table {name!r} must be a GatherTable of the same launch, whose operands are decoded again; "
            f"found {found}"
        )
    if recipe.planes:
        raise ValueError(f"{out}: table {name!r} has planes; decode through a GatherTable with planes=False")
    return recipe


def validate_bindings(
    recipes: Mapping[str, Recipe], tensors: Mapping[str, Tensor], geometry: Geometry, device: torch.device | None = None
) -> torch.device:
    """Check everything a launch relies on; answer the device that all tensors are on.

    Reads the contents of nothing but a `SlidingTable`'s `pools`, `scales` and `offsets`.

    Raises:
        TypeError: something is no recipe or no tensor, or has another dtype.
        ValueError: a name, a shape, a device, a stride, an overlap or a value's range is wrong.
    """
    if not 0 < len(recipes) <= MAX_RECIPES:
        raise ValueError(f"a launch takes 1 to {MAX_RECIPES} recipes (its mask has a bit each), got {len(recipes)}")
    if geometry.tokens_per_block > INT32_MAX:
        raise ValueError(f"tokens_per_block is {geometry.tokens_per_block}, but positions are int32")
    for out, recipe in recipes.items():
        if not isinstance(recipe, Recipe):
            raise TypeError(f"{out}: expected a recipe, got {type(recipe).__name__}")
        operands = recipe.operands(out, recipes)
        for operand in operands:
            device = _check_tensor(out, operand, tensors, device)
        _check_axes(out, operands, tensors)
        recipe.check(out, tensors, geometry)
    _check_overlaps(recipes, tensors)
    assert device is not None  # every recipe has an output
    return device


def _fits(out: str, largest: int, bits: int) -> None:
    if largest >= 2 ** (bits - 1):
        raise ValueError(
            f"{out}: values can reach {largest}, which its int{bits} output cannot hold: "
            "the geometry's pool is too large for this unit; count in a coarser one"
        )


def _check_tensor(
    out: str, operand: Operand, tensors: Mapping[str, Tensor], device: torch.device | None
) -> torch.device:
    tensor = tensors.get(operand.name)
    where = f"{out}: {operand.role} {operand.name!r}"
    if tensor is None:
        raise ValueError(f"{where} is not bound: pass it in tensors ({operand})")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{where} must be a tensor ({operand}), got {type(tensor).__name__}")
    if tensor.dtype != operand.dtype:
        raise TypeError(
            f"{where} is {tensor.dtype}, expected {operand.dtype} ({operand}): convert it once, when binding"
        )
    if tensor.ndim != len(operand.axes):
        raise ValueError(f"{where} has shape {list(tensor.shape)}, expected the axes of {operand}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{where} is on {tensor.device}, but this launch is on {device}: bind its copy there")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{where} has strides {list(tensor.stride())}: the last axis of {operand} must be contiguous (stride 1); "
            "outer strides are free"
        )
    return tensor.device


def _check_axes(out: str, operands: Sequence[Operand], tensors: Mapping[str, Tensor]) -> None:
    """Every named axis has one size in all operands of a recipe."""
    sizes: dict[str, tuple[int, Operand]] = {}
    for operand in operands:
        for index, axis in enumerate(operand.axes):
            axis_name, times = (axis, 1) if isinstance(axis, str) else axis
            size = tensors[operand.name].shape[index]
            times = times or max(1, size // max(1, sizes[axis_name][0]))  # an operand of that axis stands before
            expected, first = sizes.setdefault(axis_name, (size // times, operand))
            if size != expected * times:
                raise ValueError(
                    f"{out}: {operand.role} {operand.name!r} has shape {list(tensors[operand.name].shape)}, but axis "
                    f"{index} of {operand} must be {expected * times}, because {axis_name}={expected} in "
                    f"{first.role} {first.name!r} ({first}): bind tensors of one batch and one manager"
                )


def _check_overlaps(recipes: Mapping[str, Recipe], tensors: Mapping[str, Tensor]) -> None:
    """No output shares memory with itself, another output or an operand: programs write in no order."""
    for out in recipes:
        if _folds(tensors[out]):
            raise ValueError(
                f"{out}: the output overlaps itself (strides {list(tensors[out].stride())}): bind a plain one"
            )
    for one, other in combinations(recipes, 2):
        if _overlap(tensors[one], tensors[other]):
            raise ValueError(f"{one}: the output shares memory with the output {other!r}: give each its own buffer")
    inputs = {operand.name for out, recipe in recipes.items() for operand in recipe.operands(out, recipes)[:-1]}
    for out, name in product(recipes, sorted(inputs)):
        if _overlap(tensors[out], tensors[name]):
            raise ValueError(
                f"{out}: the output shares memory with the operand {name!r}, which the same launch reads: "
                "give it its own buffer, or refresh the two in separate launches"
            )


def _runs(tensor: Tensor) -> tuple[Tensor, int]:
    """Sorted start address of every innermost run of a tensor, and the bytes of a run."""
    starts = torch.tensor([tensor.data_ptr()])
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        starts = (starts[:, None] + torch.arange(size) * (stride * tensor.itemsize)).flatten()
    return starts.sort().values, tensor.shape[-1] * tensor.itemsize


def _folds(tensor: Tensor) -> bool:
    if tensor.is_contiguous() or not tensor.numel():
        return False
    starts, length = _runs(tensor)
    return bool((starts.diff() < length).any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share a byte: by extent first, then run by run, since views of one buffer interleave."""
    if not one.numel() or not other.numel():
        return False
    (low, high), (other_low, other_high) = _extent(one), _extent(other)
    if high <= other_low or other_high <= low:
        return False
    (starts, length), (others, other_length) = _runs(one), _runs(other)
    after = torch.searchsorted(starts, others, right=True)
    reached = (after > 0) & (starts[(after - 1).clamp(min=0)] + length > others)
    reaches = (after < len(starts)) & (starts[after.clamp(max=len(starts) - 1)] < others + other_length)
    return bool((reached | reaches).any())
