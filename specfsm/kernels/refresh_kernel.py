"""Device side of `specfsm.kernels.refresh`: one kernel for every kind of output.

Every kind decodes the manager's entries through the one function `_slot`, so a slot mapping or an expanded table never
waits for the table it is derived from. Imported when a launch first needs it: only here is Triton required, and only
here does Triton decide between compiler and interpreter.

Annotations name Triton's own types only, because Triton evaluates them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from attrs import fields

from specfsm.kernels.refresh import Plane

__all__ = ["INTERPRETED", "refresh_kernel"]

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
    last = tl.where(length > 0, (length - 1) // tl.load(plane + PAGE).to(tl.int32), -1)  # once a row
    cut = (lens != 0) & (block > last)

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

    # int32 throughout: the launcher has shown that the value of every slot fits, and products wrap to the same bits.
    scale = (tl.load(plane + SCALE) + _scalar_at(tl.load(plane + SCALE_AT), 0)).to(tl.int32)
    offset = (tl.load(plane + OFFSET) + _scalar_at(tl.load(plane + OFFSET_AT), 0)).to(tl.int32)
    value = tl.where(slot < 0, tl.load(plane + SENTINEL).to(tl.int32), slot * scale + offset)

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

    # Back to int32 before dividing, which in int64 is a call. From 2**31 on the distance wraps to a negative position.
    distance = end.to(tl.int64) - back
    position = tl.where(distance >= 0, distance, -1).to(tl.int32)
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
