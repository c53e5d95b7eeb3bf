"""All stale tables of a domain in one launch: a Triton kernel that executes recipes from a descriptor table.

Host side. Each output is cut into *planes*, two-dimensional tables or one-dimensional maps, and each plane is one row
of an int64 descriptor table on the device: addresses, strides and the geometry's numbers (`Plane` names its fields).
A work list gives each program its plane and its tile. Both are written when the launch is built; `rebind` rewrites
only the rows concerned. A call passes the mask, and nothing else moves.

Device side. Every kind of output decodes the manager's entries through the one function `_slot`, so a slot mapping or
an expanded table never waits for the table it is derived from.

Torch reference of the same stem: `specfsm.kernels.refresh_reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import triton  # type: ignore[import-untyped]  # no stubs
import triton.language as tl  # type: ignore[import-untyped]  # no stubs
from attrs import astuple, evolve, fields, frozen
from torch import Tensor

from specfsm.domain import Geometry, Unit
from specfsm.kernels.recipes import (
    INT32_MAX,
    ExpandRows,
    GatherTable,
    Recipe,
    SlidingTable,
    SlotMapping,
    source_table,
    validate_bindings,
)
from specfsm.kernels.refresh_reference import refresh_reference

__all__ = ["RefreshLaunch", "Tile"]

Engine = Literal["auto", "reference", "triton"]


@frozen(kw_only=True)
class Plane:
    """One row of the descriptor table. Addresses in bytes, strides in elements.

    Args:
        recipe: bit of the mask.
        tokens: 1 where the plane is a slot mapping [T], 0 where it is a table [S, B].
        out, out_stride: first element, and from one row to the next.
        width: columns of a table; tokens of a mapping.
        repeats, repeat_stride: how often each row is written, and from one copy to the next.
        base, pool_stride, row_stride: the manager's table; element (pool, row, block).
        pools, manager_rows, live_width: what lies inside it (and, for columns, inside the table decoded through).
        rows, batch: the row index and its length.
        lens: lengths that cut the table; 0 for none.
        page: tokens a block.
        magic, shift: reciprocal of the divisor of an entry.
        bound: largest slot.
        scale, offset: value = slot x scale + offset (+ token in block x token_bytes).
        pool_at, scale_at, offset_at: where a sliding plane reads its pool, scale and offset; 0 for none.
        requests, back, ends, token_bytes: a mapping's operands.
        sentinel: value where there is no place.
    """

    recipe: int
    tokens: int = 0
    out: int
    out_stride: int = 0
    width: int
    repeats: int = 1
    repeat_stride: int = 0
    base: int
    pool_stride: int = 0
    row_stride: int
    pools: int = 1
    manager_rows: int
    live_width: int
    rows: int
    batch: int
    lens: int = 0
    page: int
    magic: int
    shift: int
    bound: int
    scale: int
    offset: int = 0
    pool_at: int = 0
    scale_at: int = 0
    offset_at: int = 0
    requests: int = 0
    back: int = 0
    ends: int = 0
    token_bytes: int = 0
    sentinel: int


_FIELDS = tuple(attribute.name for attribute in fields(Plane))


def _at(name: str) -> Any:
    """Where the kernel finds a field, as a constant of Triton's kind: those enter its compile cache's key."""
    return tl.constexpr(_FIELDS.index(name))


RECIPE, TOKENS_KIND = _at("recipe"), _at("tokens")
OUT, OUT_STRIDE, WIDTH = _at("out"), _at("out_stride"), _at("width")
REPEATS, REPEAT_STRIDE = _at("repeats"), _at("repeat_stride")
BASE, POOL_STRIDE, ROW_STRIDE = _at("base"), _at("pool_stride"), _at("row_stride")
POOLS, MANAGER_ROWS, LIVE_WIDTH = _at("pools"), _at("manager_rows"), _at("live_width")
ROWS, BATCH, LENS, PAGE = _at("rows"), _at("batch"), _at("lens"), _at("page")
MAGIC, SHIFT, BOUND = _at("magic"), _at("shift"), _at("bound")
SCALE, OFFSET, SENTINEL = _at("scale"), _at("offset"), _at("sentinel")
POOL_AT, SCALE_AT, OFFSET_AT = _at("pool_at"), _at("scale_at"), _at("offset_at")
REQUESTS, BACK, ENDS, TOKEN_BYTES = _at("requests"), _at("back"), _at("ends"), _at("token_bytes")
PLANE_FIELDS = tl.constexpr(len(_FIELDS))
LAST_POSITION = tl.constexpr(INT32_MAX)


# The device side. Triton evaluates annotations, so that they name its own types only.


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _integers(address: tl.tensor) -> tl.tensor:
    """An address from the descriptor table as a pointer to int32."""
    return address.to(tl.pointer_type(tl.int32))


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _multiple(value: tl.tensor, OF: tl.constexpr) -> tl.tensor:
    """The same value, in a form that shows the compiler what it is a multiple of.

    A `tl.multiple_of` on a scalar that was loaded is not honoured (Triton 3.6), so that loads stay 4 bytes wide.
    """
    return value // OF * OF


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _scalar_at(address: tl.tensor, other: tl.tensor) -> tl.tensor:
    """The int32 at an address, or `other` where the address is 0."""
    return tl.load(_integers(address), mask=address != 0, other=other)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _slot(plane: tl.tensor, pool: tl.tensor, row: tl.tensor, block: tl.tensor, STEP: tl.constexpr) -> tl.tensor:
    """Decoded int32 slot of (pool, batch row, block), shapes that broadcast; -1 where there is none.

    STEP: blocks and bases are multiples of so many elements, which lets the loads be vectors.
    """
    in_batch = (row >= 0) & (row < tl.load(plane + BATCH))
    manager_row = tl.load(_integers(tl.load(plane + ROWS)) + row, mask=in_batch, other=-1)
    known = (manager_row >= 0) & (manager_row < tl.load(plane + MANAGER_ROWS))
    known = known & (pool >= 0) & (pool < tl.load(plane + POOLS))

    live_width = _multiple(tl.load(plane + LIVE_WIDTH), STEP)
    start = _integers(tl.load(plane + BASE)) + pool * tl.load(plane + POOL_STRIDE)
    entry_at = start + manager_row * tl.load(plane + ROW_STRIDE) + block  # int64: the strides are
    if STEP > 1:
        entry_at = tl.multiple_of(entry_at, (1, 4 * STEP))
    entry = tl.load(entry_at, mask=known & (block >= 0) & (block < live_width), other=-1)

    lens = tl.load(plane + LENS)
    length = tl.load(_integers(lens) + row, mask=in_batch & (lens != 0), other=0)
    cut = (lens != 0) & (block.to(tl.int64) * tl.load(plane + PAGE) >= length)

    # entry // divisor through its reciprocal, in 3 instructions instead of some 25: see `reciprocal`.
    twice = entry.to(tl.uint32, bitcast=True) << 1
    quotient = tl.umulhi(twice, tl.load(plane + MAGIC).to(tl.uint32)) >> tl.load(plane + SHIFT).to(tl.uint32)
    slot = tl.minimum(quotient, tl.load(plane + BOUND).to(tl.uint32)).to(tl.int32)
    return tl.where((entry < 0) | cut, -1, slot)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _fill_table(
    plane: tl.tensor,
    row0: tl.tensor,
    block0: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """One tile [NUM_ROWS, NUM_BLOCKS] of a table, written `repeats` times."""
    row = row0 + tl.arange(0, NUM_ROWS)[:, None]
    block = _multiple(block0, NUM_BLOCKS) + tl.arange(0, NUM_BLOCKS)[None, :]
    slot = _slot(plane, _scalar_at(tl.load(plane + POOL_AT), 0), row, block, STEP)

    # int64 until the store, whose dtype the launcher has shown to hold the value of every slot.
    scale = tl.load(plane + SCALE) + _scalar_at(tl.load(plane + SCALE_AT), 0)
    offset = tl.load(plane + OFFSET) + _scalar_at(tl.load(plane + OFFSET_AT), 0)
    place = slot.to(tl.int64) * scale + offset
    value = tl.where(slot < 0, tl.load(plane + SENTINEL), place).to(tl.int32)

    inside = (row < tl.load(plane + BATCH)) & (block < _multiple(tl.load(plane + WIDTH), STEP))
    out = _integers(tl.load(plane + OUT)) + row * tl.load(plane + OUT_STRIDE) + block
    repeat_stride = tl.load(plane + REPEAT_STRIDE)
    for repeat in range(tl.load(plane + REPEATS)):
        tl.store(tl.multiple_of(out + repeat * repeat_stride, (1, 4 * STEP)), value, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _map_tokens(plane: tl.tensor, token0: tl.tensor, NUM_TOKENS: tl.constexpr) -> None:
    """One tile [NUM_TOKENS] of a slot mapping."""
    token = token0 + tl.arange(0, NUM_TOKENS)
    inside = token < tl.load(plane + WIDTH)
    request = tl.load(_integers(tl.load(plane + REQUESTS)) + token, mask=inside, other=-1)
    back = tl.load(_integers(tl.load(plane + BACK)) + token, mask=inside, other=0)
    known = (request >= 0) & (request < tl.load(plane + BATCH))
    end = tl.load(_integers(tl.load(plane + ENDS)) + request, mask=known, other=0)

    # Back to int32 before dividing, which in int64 is a call: a position outside [0, 2**31) is outside every table.
    distance = end.to(tl.int64) - back
    position = tl.where((distance >= 0) & (distance <= LAST_POSITION), distance, -1).to(tl.int32)
    page = tl.load(plane + PAGE).to(tl.int32)
    block = tl.where(position < 0, -1, position // page)
    slot = _slot(plane, 0, request, block, 1)

    # int64: a pool of a few GiB has slots whose first byte lies beyond 2**31.
    start = slot.to(tl.int64) * tl.load(plane + SCALE) + tl.load(plane + OFFSET)
    place = start + (position - block * page) * tl.load(plane + TOKEN_BYTES)
    value = tl.where(slot < 0, tl.load(plane + SENTINEL), place)
    tl.store(tl.load(plane + OUT).to(tl.pointer_type(tl.int64)) + token, value, mask=inside)


@triton.jit(do_not_specialize=["mask", "mask_tensor"])  # type: ignore[untyped-decorator]  # triton has no types
def refresh_kernel(
    planes: tl.tensor,
    tiles: tl.tensor,
    mask_tensor: tl.tensor,
    mask: tl.int64,
    NUM_ROWS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Execute one tile of one plane, unless the mask leaves its recipe out.

    planes: i64 [planes, fields]. tiles: i32 [programs, 3], each a plane, its first row or token, its first column.
    mask_tensor: i64 [1], ANDed with `mask`. Programs write disjoint elements and read nothing that any of them writes.
    """
    tile = tiles + tl.program_id(0) * 3
    plane = planes + tl.load(tile) * PLANE_FIELDS
    first = tl.load(tile + 1)
    wanted = (mask & tl.load(mask_tensor)) >> tl.load(plane + RECIPE)
    if wanted & 1:
        if tl.load(plane + TOKENS_KIND):
            _map_tokens(plane, first, NUM_TOKENS)
        else:
            _fill_table(plane, first, tl.load(tile + 2), NUM_ROWS, NUM_BLOCKS, STEP)


INTERPRETED = not isinstance(refresh_kernel, triton.JITFunction)
"""Whether TRITON_INTERPRET was set when this module was imported: Triton decides it once, when it decorates."""


@frozen
class Tile:
    """What one program handles: [rows, blocks] of a table or [tokens] of a mapping. Powers of two."""

    rows: int
    blocks: int
    tokens: int


COMPILED_TILE = Tile(16, 128, 256)
INTERPRETED_TILE = Tile(64, 128, 4096)  # the interpreter's cost is the number of programs


@frozen
class Bindings:
    """What the planes are computed from."""

    recipes: dict[str, Recipe]
    tensors: dict[str, Tensor]
    geometry: Geometry

    def bit(self, name: str) -> int:
        return list(self.recipes).index(name)

    def decoding(self, recipe: GatherTable, width: int, divisor: int | None = None) -> dict[str, int]:
        """The fields of `_slot` for a table `width` blocks wide, at pool 0 and plane 0."""
        base, rows = self.tensors[recipe.base], self.tensors[recipe.rows]
        magic, shift = reciprocal(divisor or self.geometry.index_scale)
        return {
            "base": base.data_ptr(),
            "row_stride": base.stride(1),
            "manager_rows": base.shape[1] if base.numel() else 0,
            "live_width": min(width, base.shape[3]),
            "rows": rows.data_ptr(),
            "batch": rows.shape[0],
            "lens": 0 if recipe.lens is None else self.tensors[recipe.lens].data_ptr(),
            "page": self.geometry.tokens_per_block,
            "magic": magic,
            "shift": shift,
            "bound": min(self.geometry.blocks_in_primary_pool - 1, INT32_MAX),
            "sentinel": recipe.sentinel,
        }

    def planes(self, name: str) -> list[Plane]:
        recipe = self.recipes[name]
        return _PLANES[type(recipe)](self, name, recipe)


class RefreshLaunch:
    """Refresh of one domain's tables, bound once and called every step.

    Args:
        recipes: output name → recipe, at most 63. Bit i of a mask is the i-th recipe.
        tensors: name → tensor, for outputs and operands; may hold more than the recipes name.
        geometry: of the domain whose manager the operands describe.
        device: where the tensors must be; None takes it from them.
        engine: ``"triton"``, the kernel; ``"reference"``, torch; ``"auto"``, the kernel for CUDA tensors and the
            reference otherwise. ``auto`` never picks Triton's interpreter: for it say ``"triton"``, in a process
            that set ``TRITON_INTERPRET=1`` before this module was imported.
        mask_tensor: i64 [1] on the same device, ANDed with every call's mask. A captured CUDA graph bakes the call's
            mask and rereads this one at each replay. Default: all ones.
        tile: what one program handles; None takes a default.

    Every output is written whole: padded rows and trailing columns take the recipe's sentinel. Outputs alias neither
    each other nor an operand. Operands are read when the kernel runs, so they must not change under it. The tensors
    are kept alive.

    Raises:
        TypeError, ValueError: see `validate_bindings`; nothing was launched.
    """

    def __init__(
        self,
        recipes: Mapping[str, Recipe],
        tensors: Mapping[str, Tensor],
        geometry: Geometry,
        *,
        device: torch.device | str | None = None,
        engine: Engine = "auto",
        mask_tensor: Tensor | None = None,
        tile: Tile | None = None,
    ) -> None:
        self.device = validate_bindings(recipes, tensors, geometry, _device(device))
        self._bound = Bindings(dict(recipes), _named(recipes, tensors), geometry)
        self.engine = _resolve(engine, self.device)
        self.tile = tile or (INTERPRETED_TILE if INTERPRETED else COMPILED_TILE)
        self._all = (1 << len(self.recipes)) - 1
        self._outputs = [self.tensors[name] for name in self.recipes]
        self._mask_tensor = _checked_mask_tensor(mask_tensor, self.device)
        if self.engine == "triton":
            self._build()

    @property
    def recipes(self) -> dict[str, Recipe]:
        return self._bound.recipes

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The bound tensors, those of `recipes` only."""
        return self._bound.tensors

    @property
    def geometry(self) -> Geometry:
        return self._bound.geometry

    def rebind(self, name: str, tensor: Tensor) -> None:
        """Bind another tensor under `name` and rewrite the descriptors that hold its address or shape.

        An output keeps its shape: the work list is cut to it. Costs a copy to the device in stream order, so it is
        not for a stream that captures.

        Raises:
            TypeError, ValueError: as when building; the old binding stays.
        """
        if name not in self.tensors:
            raise ValueError(f"{name!r} is no tensor of this launch, which binds {', '.join(sorted(self.tensors))}")
        tensors = {**self.tensors, name: tensor}
        validate_bindings(self.recipes, tensors, self.geometry, self.device)
        if name in self.recipes and tensor.shape != self.tensors[name].shape:
            raise ValueError(
                f"{name}: the output has shape {list(self.tensors[name].shape)}, its new binding {list(tensor.shape)}: "
                "build a new RefreshLaunch for another shape"
            )
        self._bound = evolve(self._bound, tensors=tensors)
        self._outputs = [tensors[each] for each in self.recipes]
        if self.engine == "triton":
            self._rewrite(name)

    def __call__(self, mask: int | None = None) -> None:
        """Refresh the recipes whose bit is set in `mask` (None: all), in one launch on the current stream.

        Neither synchronises nor allocates. Outputs that are left out stay untouched. The written tensors' version
        counters move, as after any in-place operation of torch.
        """
        if mask is None:
            mask = self._all
        elif mask & ~self._all:
            raise ValueError(f"mask {mask:#x} has bits beyond the {len(self.recipes)} recipes of this launch")
        if self.engine == "reference":
            self._refer(mask)
        elif self._programs:
            self._launch(mask)

    def mask_of(self, *names: str) -> int:
        """The mask that selects these outputs."""
        order = list(self.recipes)
        return sum(1 << order.index(name) for name in set(names))

    def _refer(self, mask: int) -> None:
        mask &= int(self._mask_tensor)
        names = [name for bit, name in enumerate(self.recipes) if mask >> bit & 1]
        refresh_reference(self.recipes, self.tensors, self.geometry, names)

    def _launch(self, mask: int) -> None:
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self._launch(mask)
        tile = self.tile
        refresh_kernel[(self._programs,)](
            self._planes, self._tiles, self._mask_tensor, mask, tile.rows, tile.blocks, tile.tokens, self._step
        )
        written = self._outputs
        if mask != self._all:
            written = [output for bit, output in enumerate(written) if mask >> bit & 1]
        _count_write(written)

    def _build(self) -> None:
        self._rows: list[list[Plane]] = [self._bound.planes(name) for name in self.recipes]
        planes = [plane for rows in self._rows for plane in rows]
        tiles = [tile for index, plane in enumerate(planes) for tile in _tiles(index, plane, self.tile)]
        self._programs = len(tiles)
        self._step = _vector(planes)
        self._planes = torch.tensor([astuple(plane) for plane in planes], dtype=torch.int64).to(self.device)
        self._tiles = torch.tensor(tiles, dtype=torch.int32).to(self.device)

    def _rewrite(self, name: str) -> None:
        first = 0
        for index, (out, recipe) in enumerate(self.recipes.items()):
            rows = self._rows[index]
            if any(operand.name == name for operand in recipe.operands(out, self.recipes)):
                self._rows[index] = rows = self._bound.planes(out)
                written = torch.tensor([astuple(plane) for plane in rows], dtype=torch.int64)
                self._planes[first : first + len(rows)] = written.to(self.device)
            first += len(rows)
        self._step = _vector([plane for rows in self._rows for plane in rows])


def reciprocal(divisor: int) -> tuple[int, int]:
    """(magic, shift) with ``n // divisor == ((2 n x magic) >> 32) >> shift`` for every n in [0, 2**31).

    With s = ceil(log2 d) and M = ceil(2**(31 + s) / d) < 2**32, the error of n M / 2**(31 + s) stays under 1 / d
    (Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994). Doubling n, which has 31
    bits, keeps the high word of the product exact for d = 1 too.
    """
    divisor = min(divisor, 2**31)  # beyond every entry: the quotient is 0 either way
    shift = (divisor - 1).bit_length()
    return -(-(1 << (31 + shift)) // divisor), shift


def _device(device: torch.device | str | None) -> torch.device | None:
    if device is None:
        return None
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _named(recipes: Mapping[str, Recipe], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named = (operand.name for out, recipe in recipes.items() for operand in recipe.operands(out, recipes))
    return {name: tensors[name] for name in named}


def _resolve(engine: Engine, device: torch.device) -> Engine:
    if engine == "auto":
        return "triton" if device.type == "cuda" else "reference"
    if engine not in ("reference", "triton"):
        raise ValueError(f'engine must be "auto", "reference" or "triton", got {engine!r}')
    if engine == "triton" and device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            f"the Triton kernel runs on CUDA tensors; these are on {device}: use the reference, or set "
            "TRITON_INTERPRET=1 before specfsm.kernels.refresh is imported"
        )
    return engine


def _checked_mask_tensor(mask_tensor: Tensor | None, device: torch.device) -> Tensor:
    if mask_tensor is None:
        return torch.full((1,), -1, dtype=torch.int64, device=device)
    if mask_tensor.dtype != torch.int64 or mask_tensor.shape != (1,) or mask_tensor.device != device:
        raise ValueError(
            f"mask_tensor must be int64 [1] on {device}, got {mask_tensor.dtype} {list(mask_tensor.shape)} "
            f"on {mask_tensor.device}"
        )
    return mask_tensor


def _count_write(tensors: Sequence[Tensor]) -> None:
    """Move the version counters, which a Triton store does not. A tensor made in inference mode has none."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _address(tensor: Tensor, *index: int) -> int:
    element = sum(i * stride for i, stride in zip(index, tensor.stride(), strict=False))
    return tensor.data_ptr() + element * tensor.itemsize


def _gather_planes(bound: Bindings, name: str, recipe: GatherTable) -> list[Plane]:
    """A plane for each (pool, plane of the manager): [S, B] each."""
    out = bound.tensors[name] if recipe.planes else bound.tensors[name][None, :, None]
    decoding = bound.decoding(recipe, out.shape[3])
    return [
        Plane(
            recipe=bound.bit(name),
            out=_address(out, pool, 0, plane),
            out_stride=out.stride(1),
            width=out.shape[3],
            scale=bound.geometry.scale(recipe.unit),
            offset=plane if recipe.unit is Unit.PAGE else 0,
            **{**decoding, "base": _address(bound.tensors[recipe.base], pool, 0, plane)},
        )
        for pool in range(out.shape[0])
        for plane in range(out.shape[2])
    ]


def _expand_planes(bound: Bindings, name: str, recipe: ExpandRows) -> list[Plane]:
    """The source's plane, with each row written `times` times."""
    source, out = source_table(name, recipe.table, bound.recipes), bound.tensors[name]
    return [
        Plane(
            recipe=bound.bit(name),
            out=out.data_ptr(),
            out_stride=out.stride(0) * recipe.times,
            width=out.shape[1],
            repeats=recipe.times,
            repeat_stride=out.stride(0),
            scale=bound.geometry.scale(source.unit),
            **bound.decoding(source, bound.tensors[recipe.table].shape[1]),
        )
    ]


def _sliding_planes(bound: Bindings, name: str, recipe: SlidingTable) -> list[Plane]:
    """A plane for each (layer, type), which reads its pool, scale and offset on the device. Nothing is divided."""
    out, base = bound.tensors[name], bound.tensors[recipe.base]
    gather = GatherTable(base=recipe.base, rows=recipe.rows, unit=Unit.SLOT, sentinel=recipe.sentinel)
    decoding = bound.decoding(gather, out.shape[3], divisor=1)
    return [
        Plane(
            recipe=bound.bit(name),
            out=_address(out, layer, kind),
            out_stride=out.stride(2),
            width=out.shape[3],
            pool_stride=base.stride(0),
            pools=base.shape[0],
            scale=0,
            pool_at=_address(bound.tensors[recipe.pools], layer, kind),
            scale_at=_address(bound.tensors[recipe.scales], layer, kind),
            offset_at=_address(bound.tensors[recipe.offsets], layer),
            **decoding,
        )
        for layer in range(out.shape[0])
        for kind in range(out.shape[1])
    ]


def _mapping_planes(bound: Bindings, name: str, recipe: SlotMapping) -> list[Plane]:
    """[T], decoded through the table's recipe."""
    source = source_table(name, recipe.table, bound.recipes)
    page, data = bound.geometry.tokens_per_block, recipe.part == "data"
    decoding = bound.decoding(source, bound.tensors[recipe.table].shape[1])
    return [
        Plane(
            recipe=bound.bit(name),
            tokens=1,
            out=bound.tensors[name].data_ptr(),
            width=bound.tensors[name].shape[0],
            scale=recipe.block_bytes(bound.geometry),
            offset=0 if data else page * recipe.data_bytes,
            requests=bound.tensors[recipe.requests].data_ptr(),
            back=bound.tensors[recipe.back].data_ptr(),
            ends=bound.tensors[recipe.lens].data_ptr(),
            token_bytes=recipe.data_bytes if data else recipe.scale_bytes,
            **{**decoding, "sentinel": recipe.sentinel},
        )
    ]


_PLANES: dict[type[Any], Callable[[Bindings, str, Any], list[Plane]]] = {
    GatherTable: _gather_planes,
    ExpandRows: _expand_planes,
    SlidingTable: _sliding_planes,
    SlotMapping: _mapping_planes,
}


def _tiles(index: int, plane: Plane, tile: Tile) -> list[tuple[int, int, int]]:
    """The work list of one plane: (plane, first row or token, first column)."""
    if plane.tokens:
        return [(index, token, 0) for token in range(0, plane.width, tile.tokens)]
    blocks = range(0, plane.width, tile.blocks)
    return [(index, row, block) for row in range(0, plane.batch, tile.rows) for block in blocks]


def _vector(planes: Sequence[Plane]) -> int:
    """4 where every table of the launch may be read and written four elements at a time, else 1."""
    elements = ("out_stride", "width", "repeat_stride", "pool_stride", "row_stride", "live_width")
    for plane in planes:
        if plane.tokens:
            continue
        if plane.out % 16 or plane.base % 16 or any(getattr(plane, name) % 4 for name in elements):
            return 1
    return 4
