"""Validation of a domain's tables in one launch: the launcher of a Triton kernel that recomputes what was written.

It goes over the planes and tiles of a `RefreshLaunch` (the same descriptors, so a rebinding is followed), but decodes
by plain division in int64, and leaves a *record* of the first violation on the device. The host need not wait for it:
a call only enqueues.

A record is i64 [7]: key, ticket, kind, found, expected, owner, request. The key is lowest for the first element of the
first recipe, whatever ran first, and `NOTHING` where all is well.

The kernel is `specfsm.kernels.validate_kernel`, its torch reference `specfsm.kernels.validate_reference`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from attrs import astuple, frozen
from torch import Tensor

from specfsm.domain import NOBODY, SHARED
from specfsm.kernels.recipes import ExpandRows, GatherTable, SlidingTable, SlotMapping
from specfsm.kernels.refresh import Bindings, Plane, RefreshLaunch
from specfsm.kernels.validate_reference import (
    BOUNDS,
    CONTENTS,
    INDEX_BITS,
    NOTHING,
    OWNER,
    PROGRAM_BITS,
    SENTINEL,
    validate_reference,
)

__all__ = ["KINDS", "ValidateLaunch", "Violation", "difference"]

KINDS = {BOUNDS: "bounds", SENTINEL: "sentinel", OWNER: "owner", CONTENTS: "contents"}


@frozen
class Violation:
    """One element that is not what it must be.

    Args:
        output: name of the table.
        index: of the element.
        failed: "bounds": no place of the pool. "sentinel": something stands where nothing may. "owner": a place in a
            page that the row's request does not hold. "contents": another value than the recomputed one.
        found, expected: what it holds, and what was recomputed.
        owner: the request that holds the page that was found; None for nobody's, for one that several share, or where
            no owner is known.
        request: the request whose row it is; None for a padded one.
    """

    output: str
    index: tuple[int, ...]
    failed: str
    found: int
    expected: int
    owner: int | None
    request: int | None


@frozen(kw_only=True)
class Check:
    """What the kernel needs of a plane beside `specfsm.kernels.refresh.Plane`: one row of a second descriptor table.

    Args:
        divisor: of an entry.
        first: place of the plane's first element in its output, counted in elements of a contiguous one.
        row, repeat: from one row, or copy of a row, to the next.
        owners: address of i64 [slots], the request that holds each; 0 where that is not known.
    """

    divisor: int
    first: int
    row: int
    repeat: int
    owners: int


class ValidateLaunch:
    """Validation of what a `RefreshLaunch` writes.

    Args:
        refresh: whose outputs are validated, with the same engine.
        pools: output → name of the pool whose owners its pages are compared with, see `know`.

    Raises:
        ValueError: a pool is named for an output that is none; or there are too many elements or programs for a key.
    """

    def __init__(self, refresh: RefreshLaunch, pools: Mapping[str, str] | None = None) -> None:
        self.refresh = refresh
        self.pools = dict(pools or {})
        if stray := self.pools.keys() - refresh.recipes.keys():
            raise ValueError(f"{', '.join(sorted(stray))}: no output of this launch, which has {list(refresh.recipes)}")
        tensors = refresh.tensors
        largest = max(tensors[name].numel() for name in refresh.recipes)
        if largest >> INDEX_BITS or refresh.programs >> PROGRAM_BITS:
            raise ValueError(f"{largest} elements or {refresh.programs} programs are too many for one record")
        rows = max(tensors[each.base].shape[1] for each in refresh.recipes.values() if hasattr(each, "base"))
        slots = refresh.geometry.blocks_in_primary_pool
        options: dict[str, Any] = {"dtype": torch.int64, "device": refresh.device}
        self.requests = torch.full((rows,), NOBODY, **options)
        self.owners = {pool: torch.full((slots,), NOBODY, **options) for pool in dict.fromkeys(self.pools.values())}
        self._empty = torch.tensor([NOTHING, *[0] * 6], dtype=torch.int64, device=refresh.device)
        if refresh.engine == "triton":
            self._build()

    def know(self, requests: Tensor, owners: Mapping[str, Tensor]) -> None:
        """Say whose rows and pages these are from now on, in stream order.

        Args:
            requests: i64 [R], the request of each row of the manager's table; `NOBODY` where none is known.
            owners: pool → i64 [slots], the request that holds each slot; `NOBODY` where none does. Every pool of
                `pools` must be there.

        Copies from pinned memory do not wait for the device.
        """
        self.requests[: len(requests)].copy_(requests, non_blocking=True)
        for pool, own in self.owners.items():
            own.copy_(owners[pool], non_blocking=True)

    def __call__(self, mask: int | None = None) -> Tensor:
        """Validate the outputs whose bit is set in `mask` (None: all), in one launch on the current stream.

        Returns:
            A new record on the device. Nothing waits for it.
        """
        refresh = self.refresh
        mask = (1 << len(refresh.recipes)) - 1 if mask is None else mask
        if refresh.engine == "reference":
            names = [name for bit, name in enumerate(refresh.recipes) if mask >> bit & 1]
            owners = {name: self.owners[pool] for name, pool in self.pools.items()}
            return validate_reference(refresh.recipes, refresh.tensors, refresh.geometry, names, self.requests, owners)
        record = self._empty.clone()
        if mask and refresh.programs:
            self._launch(mask, record)
        return record

    def read(self, record: Tensor) -> Violation | None:
        """What a record says, which must be on the host by now."""
        key, _, kind, found, expected, owner, request = record.tolist()
        if key == NOTHING:
            return None
        name = list(self.refresh.recipes)[key >> INDEX_BITS + PROGRAM_BITS]
        place = key >> PROGRAM_BITS & (1 << INDEX_BITS) - 1
        index = unravel(place, tuple(self.refresh.tensors[name].shape))
        return Violation(name, index, KINDS[kind], found, expected, _known(owner), _known(request))

    def _build(self) -> None:
        from specfsm.kernels.validate_kernel import validate_kernel

        self._kernel = validate_kernel
        rows = [
            astuple(self._check(name, plane, number))
            for name, planes in zip(self.refresh.recipes, self.refresh.planes, strict=True)
            for number, plane in enumerate(planes)
        ]
        self._checks = torch.tensor(rows, dtype=torch.int64).to(self.refresh.device)
        if self.refresh.device.type == "cuda" and self.refresh.programs:
            self._launch(0, self._empty.clone())  # compiles and loads the kernel; finds nothing

    def _check(self, name: str, plane: Plane, number: int) -> Check:
        bound: Bindings = self.refresh.bound
        recipe, shape = self.refresh.recipes[name], tuple(bound.tensors[name].shape)
        width = shape[-1]
        divisor = 1 if isinstance(recipe, SlidingTable) else bound.geometry.index_scale
        first, row, repeat = 0, width, 0
        if isinstance(recipe, GatherTable) and recipe.planes:
            pool, of_pool = divmod(number, shape[2])
            first, row = (pool * shape[1] * shape[2] + of_pool) * width, shape[2] * width
        elif isinstance(recipe, SlidingTable):
            first = number * prod(shape[2:])
        elif isinstance(recipe, ExpandRows):
            row, repeat = width * plane.repeats, width
        elif isinstance(recipe, SlotMapping):
            row = 0
        pool_name = self.pools.get(name)
        owners = 0 if pool_name is None else self.owners[pool_name].data_ptr()
        return Check(divisor=divisor, first=first, row=row, repeat=repeat, owners=owners)

    def _launch(self, mask: int, record: Tensor) -> None:
        refresh = self.refresh
        details = torch.empty((refresh.programs, 5), dtype=torch.int64, device=refresh.device)
        tables = (*refresh.descriptors, self._checks, self.requests, record, details)
        refresh.run(self._kernel, *tables, mask, len(self.requests), refresh.programs, *refresh.tile_sizes)


def difference(found: Tensor, expected: Tensor, low: int, high: int, sentinel: int) -> Tensor:
    """The first element of a buffer that is not what it must be: i64 [4] on its device: kind (0: there is none),
    element, found and expected. Nothing waits for it.

    Both have one shape and dtype. An integer outside [low, high] that is not the sentinel is out of bounds whatever is
    expected. A float stands there as the bits of its float64.
    """
    own, other = _bits(found).flatten(), _bits(expected).flatten()
    if not own.numel():
        return own.new_zeros(4)
    kind = torch.where(own != other, CONTENTS, 0)
    if not found.is_floating_point():
        kind = torch.where(((own < low) | (own > high)) & (own != sentinel), BOUNDS, kind)
    at = (kind != 0).to(torch.uint8).argmax()[None]  # the first of equal ones
    return torch.cat([kind[at], at, own[at], other[at]])


def unravel(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of an element in a shape, from its place in a contiguous tensor."""
    index = []
    for extent in reversed(shape):
        place, at = divmod(place, extent)
        index.append(at)
    return tuple(reversed(index))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.double().view(torch.int64) if tensor.is_floating_point() else tensor.long()


def _known(request: int) -> int | None:
    return None if request in (NOBODY, SHARED) else request
