"""Device side of `specfsm.kernels.validate`: one kernel for every kind of output, over the tiles of the refresh.

What an element must be is recomputed in int64 with plain divisions, where `specfsm.kernels.refresh_kernel` multiplies
32-bit reciprocals: it shares the places of a plane's fields with it, and no function. Imported when a launch first
needs it.

Annotations name Triton's own types only, because Triton evaluates them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from attrs import fields

from specfsm.domain import NOBODY as NOBODY_ID
from specfsm.domain import SHARED as SHARED_ID
from specfsm.kernels import validate_reference as reference
from specfsm.kernels.refresh_kernel import (
    BACK,
    BASE,
    BATCH,
    BOUND,
    ENDS,
    LENS,
    LIVE_WIDTH,
    MANAGER_ROWS,
    OFFSET,
    OFFSET_AT,
    OUT,
    OUT_STRIDE,
    PAGE,
    PLANE_FIELDS,
    POOL_AT,
    POOL_STRIDE,
    POOLS,
    RECIPE,
    REPEAT_STRIDE,
    REPEATS,
    REQUESTS,
    ROW_STRIDE,
    ROWS,
    SCALE,
    SCALE_AT,
    SENTINEL,
    TOKEN_BYTES,
    TOKENS_KIND,
    WIDTH,
)
from specfsm.kernels.validate import Check

__all__ = ["validate_kernel"]

_CHECKS = tuple(attribute.name for attribute in fields(Check))

DIVISOR, FIRST, ROW = (tl.constexpr(_CHECKS.index(name)) for name in ("divisor", "first", "row"))
REPEAT, OWNERS = (tl.constexpr(_CHECKS.index(name)) for name in ("repeat", "owners"))
CHECK_FIELDS = tl.constexpr(len(_CHECKS))

NOTHING, NOBODY, SHARED = tl.constexpr(reference.NOTHING), tl.constexpr(NOBODY_ID), tl.constexpr(SHARED_ID)
OUT_OF_BOUNDS, NOT_SENTINEL = tl.constexpr(reference.BOUNDS), tl.constexpr(reference.SENTINEL)
FOREIGN, DIFFERENT = tl.constexpr(reference.OWNER), tl.constexpr(reference.CONTENTS)
RECIPE_SHIFT = tl.constexpr(reference.INDEX_BITS + reference.PROGRAM_BITS)
PROGRAM_BITS = tl.constexpr(reference.PROGRAM_BITS)
PROGRAM = tl.constexpr(2**reference.PROGRAM_BITS - 1)
DETAILS = tl.constexpr(5)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _number_at(address: tl.tensor, other: tl.constexpr) -> tl.tensor:
    """The int32 at an address as int64, or `other` where the address is 0."""
    return tl.load(address.to(tl.pointer_type(tl.int32)), mask=address != 0, other=other).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _numbers(address: tl.tensor, index: tl.tensor, inside: tl.tensor, other: tl.constexpr) -> tl.tensor:
    """int32s of a vector as int64, or `other` where the index does not lie inside."""
    return tl.load(address.to(tl.pointer_type(tl.int32)) + index, mask=inside, other=other).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _manager_row(plane: tl.tensor, row: tl.tensor) -> tl.tensor:
    """The manager's row of a batch row; -1 where there is none."""
    inside = (row >= 0) & (row < tl.load(plane + BATCH))
    found = _numbers(tl.load(plane + ROWS), row, inside, -1)
    return tl.where((found >= 0) & (found < tl.load(plane + MANAGER_ROWS)), found, -1)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _place(
    plane: tl.tensor, check: tl.tensor, pool: tl.tensor, row: tl.tensor, own: tl.tensor, block: tl.tensor
) -> tl.tensor:
    """int64 slot of (pool, batch row, block), where `own` is the manager's row; -1 where there is none."""
    inside = (own >= 0) & (pool >= 0) & (pool < tl.load(plane + POOLS))
    inside = inside & (block >= 0) & (block < tl.load(plane + LIVE_WIDTH))
    start = tl.load(plane + BASE).to(tl.pointer_type(tl.int32)) + pool * tl.load(plane + POOL_STRIDE)
    entry = tl.load(start + own * tl.load(plane + ROW_STRIDE) + block, mask=inside, other=-1).to(tl.int64)

    lens = tl.load(plane + LENS)
    length = _numbers(lens, row, (own >= 0) & (lens != 0), 0)
    cut = (lens != 0) & (block * tl.load(plane + PAGE) >= length)
    slot = tl.minimum(entry // tl.load(check + DIVISOR), tl.load(plane + BOUND))
    return tl.where((entry < 0) | cut, -1, slot)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _failed(
    plane: tl.tensor,
    check: tl.tensor,
    found: tl.tensor,
    expected: tl.tensor,
    slot: tl.tensor,
    scale: tl.tensor,
    offset: tl.tensor,
    request: tl.tensor,
) -> Any:
    """(kind, owner of the page that was found), by the kinds of `specfsm.kernels.validate_reference`."""
    sentinel = tl.load(plane + SENTINEL)
    largest = tl.load(plane + BOUND) * scale + tl.maximum(scale - 1, offset)
    outside = (found < 0) | (found > largest)
    placed = slot >= 0

    owners = tl.load(check + OWNERS)
    page = tl.maximum(found - offset, 0) // tl.maximum(scale, 1)
    known = (owners != 0) & (page <= tl.load(plane + BOUND))
    owner = tl.load(owners.to(tl.pointer_type(tl.int64)) + page, mask=known, other=NOBODY)
    foreign = (owners != 0) & placed & (outside == 0) & (request != NOBODY) & (owner != request) & (owner != SHARED)

    kind = tl.where(placed & (found != expected), DIFFERENT, 0)
    kind = tl.where(foreign, FOREIGN, kind)
    kind = tl.where((placed == 0) & (found != sentinel), NOT_SENTINEL, kind)
    return tl.where(outside & (found != sentinel), OUT_OF_BOUNDS, kind), owner


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _at_key(keys: tl.tensor, key: tl.tensor, values: tl.tensor) -> tl.tensor:
    """The value that stands where `key` does. Keys are distinct."""
    return tl.sum(tl.where(keys == key, values.to(tl.int64), 0))


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _note(
    details: tl.tensor,
    best: tl.tensor,
    keys: tl.tensor,
    kind: tl.tensor,
    found: tl.tensor,
    expected: tl.tensor,
    owner: tl.tensor,
    request: tl.tensor,
) -> tl.tensor:
    """Note the first of these elements, if it stands before `best`; the lower of the two keys."""
    key = tl.min(keys)
    if key < best:
        zero = tl.zeros_like(keys)
        tl.atomic_xchg(details, _at_key(keys, key, kind + zero))
        tl.atomic_xchg(details + 1, _at_key(keys, key, found + zero))
        tl.atomic_xchg(details + 2, _at_key(keys, key, expected + zero))
        tl.atomic_xchg(details + 3, _at_key(keys, key, owner + zero))
        tl.atomic_xchg(details + 4, _at_key(keys, key, request + zero))
    return tl.minimum(key, best)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _check_table(
    plane: tl.tensor,
    check: tl.tensor,
    row0: tl.tensor,
    block0: tl.tensor,
    requests: tl.tensor,
    num_requests: tl.tensor,
    details: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
) -> tl.tensor:
    """One tile [NUM_ROWS, NUM_BLOCKS] of a table, in each of its copies; the key of its first violation."""
    row = row0 + tl.arange(0, NUM_ROWS)[:, None]
    block = block0 + tl.arange(0, NUM_BLOCKS)[None, :]
    own = _manager_row(plane, row)
    request = tl.load(requests + own, mask=(own >= 0) & (own < num_requests), other=NOBODY)
    slot = _place(plane, check, _number_at(tl.load(plane + POOL_AT), 0), row, own, block)
    scale = tl.load(plane + SCALE) + _number_at(tl.load(plane + SCALE_AT), 0)
    offset = tl.load(plane + OFFSET) + _number_at(tl.load(plane + OFFSET_AT), 0)
    expected = tl.where(slot < 0, tl.load(plane + SENTINEL), slot * scale + offset)

    inside = (row < tl.load(plane + BATCH)) & (block < tl.load(plane + WIDTH))
    out = tl.load(plane + OUT).to(tl.pointer_type(tl.int32)) + row * tl.load(plane + OUT_STRIDE) + block
    first = tl.load(check + FIRST) + row * tl.load(check + ROW) + block
    best = tl.load(plane + OUT) * 0 + NOTHING
    for repeat in range(tl.load(plane + REPEATS)):
        found = tl.load(out + repeat * tl.load(plane + REPEAT_STRIDE), mask=inside, other=0).to(tl.int64)
        kind, owner = _failed(plane, check, found, expected, slot, scale, offset, request)
        element = (first + repeat * tl.load(check + REPEAT)) << PROGRAM_BITS
        keys = tl.where(inside & (kind != 0), element, NOTHING)
        best = _note(details, best, keys, kind, found, expected, owner, request)
    return best


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _check_tokens(
    plane: tl.tensor,
    check: tl.tensor,
    token0: tl.tensor,
    requests: tl.tensor,
    num_requests: tl.tensor,
    details: tl.tensor,
    NUM_TOKENS: tl.constexpr,
) -> tl.tensor:
    """One tile [NUM_TOKENS] of a slot mapping; the key of its first violation."""
    token = token0 + tl.arange(0, NUM_TOKENS)
    inside = token < tl.load(plane + WIDTH)
    row = _numbers(tl.load(plane + REQUESTS), token, inside, -1)
    known = (row >= 0) & (row < tl.load(plane + BATCH))
    own = _manager_row(plane, row)
    request = tl.load(requests + own, mask=(own >= 0) & (own < num_requests), other=NOBODY)
    back = _numbers(tl.load(plane + BACK), token, inside, 0)
    position = _numbers(tl.load(plane + ENDS), row, known, 0) - back
    valid = (position >= 0) & (position < 2147483648)
    page = tl.load(plane + PAGE)
    block = tl.where(valid, position // page, -1)
    slot = _place(plane, check, row * 0, row, own, block)

    scale, offset = tl.load(plane + SCALE), tl.load(plane + OFFSET)
    value = slot * scale + offset + (position % page) * tl.load(plane + TOKEN_BYTES)
    expected = tl.where(slot < 0, tl.load(plane + SENTINEL), value)
    found = tl.load(tl.load(plane + OUT).to(tl.pointer_type(tl.int64)) + token, mask=inside, other=0)
    kind, owner = _failed(plane, check, found, expected, slot, scale, offset, request)
    keys = tl.where(inside & (kind != 0), token.to(tl.int64) << PROGRAM_BITS, NOTHING)
    return _note(details, tl.load(plane + OUT) * 0 + NOTHING, keys, kind, found, expected, owner, request)


@triton.jit(do_not_specialize=["mask", "num_requests", "programs"])  # type: ignore[untyped-decorator]  # triton has no types
def validate_kernel(
    planes: tl.tensor,
    tiles: tl.tensor,
    checks: tl.tensor,
    requests: tl.tensor,
    record: tl.tensor,
    details: tl.tensor,
    mask: tl.int64,
    num_requests: tl.int32,
    programs: tl.int32,
    NUM_ROWS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
) -> None:
    """Validate one tile of one plane, unless the mask leaves its recipe out; the last program completes the record.

    planes, tiles: as `refresh_kernel` has them. checks: i64 [planes, fields]. requests: i64 [num_requests], by row of
    the manager. record: i64 [7], key and ticket first. details: i64 [programs, 5], scratch. The lowest key wins, and
    with it the details of the program whose number it holds: which program comes first decides nothing.
    """
    program = tl.program_id(0)
    tile = tiles + program * 3
    index = tl.load(tile)
    plane, check = planes + index * PLANE_FIELDS, checks + index * CHECK_FIELDS
    first = tl.load(tile + 1)
    recipe = tl.load(plane + RECIPE)
    if (mask >> recipe) & 1:
        own = details + program * DETAILS
        if tl.load(plane + TOKENS_KIND):
            key = _check_tokens(plane, check, first, requests, num_requests, own, NUM_TOKENS)
        else:
            key = _check_table(
                plane, check, first, tl.load(tile + 2), requests, num_requests, own, NUM_ROWS, NUM_BLOCKS
            )
        if key != NOTHING:
            tl.atomic_min(record, key + (recipe << RECIPE_SHIFT) + program)

    # Everybody takes a ticket behind what it wrote; whoever takes the last one sees all of it.
    if tl.atomic_add(record + 1, 1) == programs - 1:
        lowest = tl.atomic_min(record, NOTHING)
        if lowest != NOTHING:
            winner = details + (lowest & PROGRAM) * DETAILS
            for each in range(DETAILS):
                tl.store(record + 2 + each, tl.atomic_add(winner + each, 0))
