"""All stale tables of a domain in one launch: the launcher of a Triton kernel that executes recipes as data.

Each output is cut into *planes*, two-dimensional tables or one-dimensional maps, and each plane is one row
of an int64 descriptor table on the device: addresses, strides and the geometry's numbers (`Plane` names its fields).
A work list gives each program its plane and its tile. Both are written when the launch is built; `rebind` rewrites
only the rows concerned. A call passes the mask, and nothing else moves.

The kernel is `specfsm.kernels.refresh_kernel`, its torch reference `specfsm.kernels.refresh_reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from attrs import astuple, evolve, frozen
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

__all__ = ["Bindings", "Plane", "RefreshLaunch", "Tile"]

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


@frozen
class Tile:
    """What one program handles: [rows, blocks] of a table or [tokens] of a mapping. Powers of two."""

    rows: int
    blocks: int
    tokens: int


COMPILED_TILE = Tile(8, 128, 256)
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
            that set ``TRITON_INTERPRET=1`` before Triton was first imported.
        mask_tensor: i64 [1] on the same device, ANDed with every call's mask. A captured CUDA graph bakes the call's
            mask and rereads this one at each replay. Default: all ones.
        tile: what one program handles; None takes a default.

    Every output is written whole: padded rows and trailing columns take the recipe's sentinel. Outputs alias neither
    each other nor an operand. Operands are read when the kernel runs, so they must not change under it. The tensors
    are kept alive.

    Attributes:
        engine: ``"triton"`` or ``"reference"``.
        programs: programs of the launch; 0 with the reference, or where every output is empty.
        vector: elements that a load or store of a table moves: 4 where every table's address, strides and width allow
            it, else 1.

    Neither moves for the life of the launch, and the kernel is compiled when it is built: any call can be captured in
    a CUDA graph, and a captured one follows a later `rebind`, because the addresses are read from device memory.

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
        self._all = (1 << len(self.recipes)) - 1
        self._outputs = [self.tensors[name] for name in self.recipes]
        self._mask_tensor = _checked_mask_tensor(mask_tensor, self.device)
        self.programs, self.vector = 0, 1
        if self.engine == "triton":
            self._build(tile or _default_tile())

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

    @property
    def bound(self) -> Bindings:
        """What the planes are computed from."""
        return self._bound

    @property
    def planes(self) -> list[list[Plane]]:
        """The planes of each recipe, in order; for the kernel only."""
        return self._rows

    @property
    def descriptors(self) -> tuple[Tensor, Tensor]:
        """The descriptor table and the work list on the device; for the kernel only. A rebinding is written into it."""
        return self._arguments[0], self._arguments[1]

    @property
    def tile_sizes(self) -> tuple[int, int, int]:
        """Rows, blocks and tokens of a tile."""
        return self._sizes[:3]

    def rebind(self, name: str, tensor: Tensor) -> None:
        """Bind another tensor under `name` and rewrite the descriptors that hold its address or shape.

        Costs a copy to the device in stream order, so it is not for a stream that captures.

        Raises:
            TypeError, ValueError: as when building; or an output changes its shape, or a launch that moves four
                elements at a time is given a table that does not allow it. The old binding stays.
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
        bound = evolve(self._bound, tensors=tensors)
        if self.engine == "triton":
            self._rewrite(bound, name)
        self._bound = bound
        self._outputs = [tensors[each] for each in self.recipes]

    def __call__(self, mask: int | None = None) -> None:
        """Refresh the recipes whose bit is set in `mask` (None: all), in one launch on the current stream.

        The kernel's launch neither synchronises nor allocates. Outputs that are left out stay untouched. The written
        tensors' version counters move, as after any in-place operation of torch.
        """
        if mask is None:
            mask = self._all
        elif mask & ~self._all:
            raise ValueError(f"mask {mask:#x} has bits beyond the {len(self.recipes)} recipes of this launch")
        if self.engine == "reference":
            self._refer(mask)
        elif mask and self.programs:
            self._launch(mask)
            self._count_writes(mask)

    def mask_of(self, *names: str) -> int:
        """The mask that selects these outputs."""
        order = list(self.recipes)
        return sum(1 << order.index(name) for name in set(names))

    def _refer(self, mask: int) -> None:
        if self._mask_tensor is not None:
            mask &= int(self._mask_tensor)
        names = [name for bit, name in enumerate(self.recipes) if mask >> bit & 1]
        refresh_reference(self.recipes, self.tensors, self.geometry, names)

    def _launch(self, mask: int) -> None:
        self.run(self._kernel, *self._arguments, mask, *self._sizes)

    def run(self, kernel: Any, *arguments: Any) -> None:
        """Launch `kernel` once, with a program for each tile of the work list, on the device of the tensors."""
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):  # Triton launches on the current device, whatever its arguments are on
                kernel[(self.programs,)](*arguments)
        else:
            kernel[(self.programs,)](*arguments)

    def _count_writes(self, mask: int) -> None:
        """Move the version counters, which a Triton store does not. A tensor made in inference mode has none."""
        torch.autograd.graph.increment_version(
            [output for bit, output in enumerate(self._outputs) if mask >> bit & 1 and not output.is_inference()]
        )

    def _build(self, tile: Tile) -> None:
        from specfsm.kernels.refresh_kernel import refresh_kernel

        self._kernel = refresh_kernel
        self._rows = [self._bound.planes(name) for name in self.recipes]
        planes = [plane for rows in self._rows for plane in rows]
        work = [item for index, plane in enumerate(planes) for item in _tiles(index, plane, tile)]
        self.programs, self.vector = len(work), _vector(planes)
        self._planes = _descriptors(planes, self.device)
        tiles = torch.tensor(work, dtype=torch.int32).to(self.device)
        mask_tensor = self._mask_tensor
        if mask_tensor is None:
            mask_tensor = torch.full((1,), -1, dtype=torch.int64, device=self.device)
        self._arguments = (self._planes, tiles, mask_tensor)
        self._sizes = (tile.rows, tile.blocks, tile.tokens, self.vector)
        if self.device.type == "cuda" and self.programs:
            self._launch(0)  # compiles and loads the kernel, which a capturing stream forbids; writes nothing

    def _rewrite(self, bound: Bindings, name: str) -> None:
        rows = list(self._rows)
        for index, (out, recipe) in enumerate(self.recipes.items()):
            if any(operand.name == name for operand in recipe.operands(out, self.recipes)):
                rows[index] = bound.planes(out)
        if self.vector > _vector([plane for planes in rows for plane in planes]):
            raise ValueError(
                f"{name}: this launch moves {self.vector} elements at a time, and graphs may have captured it so, but "
                "the new binding's address, strides or width are no multiples of that: build a new RefreshLaunch"
            )
        first = 0
        for planes, old in zip(rows, self._rows, strict=True):
            if planes is not old:
                self._planes[first : first + len(planes)] = _descriptors(planes, self.device)
            first += len(planes)
        self._rows = rows


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
    if engine == "triton" and device.type != "cuda" and not _interpreted():
        raise ValueError(
            f"the Triton kernel runs on CUDA tensors; these are on {device}: use the reference, or set "
            "TRITON_INTERPRET=1 before Triton is first imported"
        )
    return engine


def _interpreted() -> bool:
    from specfsm.kernels import refresh_kernel  # imports Triton, which the reference does without

    return refresh_kernel.INTERPRETED


def _default_tile() -> Tile:
    return INTERPRETED_TILE if _interpreted() else COMPILED_TILE


def _checked_mask_tensor(mask_tensor: Tensor | None, device: torch.device) -> Tensor | None:
    if mask_tensor is None:
        return None
    if mask_tensor.dtype != torch.int64 or mask_tensor.shape != (1,) or mask_tensor.device != device:
        raise ValueError(
            f"mask_tensor must be int64 [1] on {device}, got {mask_tensor.dtype} {list(mask_tensor.shape)} "
            f"on {mask_tensor.device}"
        )
    return mask_tensor


def _descriptors(planes: Sequence[Plane], device: torch.device) -> Tensor:
    """i64 [planes, fields]."""
    return torch.tensor([astuple(plane) for plane in planes], dtype=torch.int64).to(device)


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
    repeats = recipe.repeats(out, bound.tensors[source.rows])
    return [
        Plane(
            recipe=bound.bit(name),
            out=out.data_ptr(),
            out_stride=out.stride(0) * repeats,
            width=out.shape[1],
            repeats=repeats,
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
