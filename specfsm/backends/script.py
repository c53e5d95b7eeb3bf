"""What one path does to one domain's metadata, flattened from `ACTIONS` so that a switch is a loop over pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

from specfsm.backends.binding import Binding
from specfsm.backends.resource import Action, Alias, Buffer, Path, Pointer
from specfsm.domain import Domain

__all__ = ["Script", "script"]

SWITCHES = {Action.REBIND, Action.DERIVE}
CLEARS = {Action.INVALIDATE, Action.RECORDED, Action.DROP}
REFRESHES = {Action.REFRESH, Action.DERIVE, Action.INVALIDATE, Action.DROP}


@frozen
class Script:
    """The compiled actions of (domain, path).

    Args:
        rebinds: (attribute, place, whether it is the host half) of everything that takes the domain's own value.
        clears: (attribute, place, maker of the empty value) of everything that is dropped.
        shared: places of the buffers whose contents are saved on entry and copied back on restore.
        refreshable: mask of what is refreshed when stale.
        recorded: mask of the tables whose refresh is recorded, so that the graph refreshes them itself.
        required: mask of what must be fresh: whatever has an action on this path.
        cleared: mask of `clears`.
        baked: mask of what a recording takes as a Python value, which must be fresh before it.
        refused: mask of what cannot take this path at all.
        idle: (domain, nothing refreshed, what is proven not to need it, nothing ahead), for the trace of an event with
            nothing stale.
        missing: mask of what does *not* follow the switch because its action was dropped (fault injection).
    """

    rebinds: tuple[tuple[str, int, bool], ...]
    clears: tuple[tuple[str, int, Callable[[], Any]], ...]
    shared: tuple[int, ...]
    refreshable: int
    recorded: int
    required: int
    cleared: int
    baked: int
    refused: int
    missing: int
    idle: tuple[Domain, int, int, int]


def script(binding: Binding, path: Path, drop: int) -> Script:
    """Flatten what `path` does in the domain of `binding`, without the actions of the dropped resources.

    Args:
        drop: mask of resources whose bringing up to date is left out. A buffer is still rebound, but not refreshed; a
            value that would be rebound, dropped or derived keeps what the other domain left.
    """
    rebinds: list[tuple[str, int, bool]] = []
    clears: list[tuple[str, int, Callable[[], Any]]] = []
    shared: list[int] = []
    refreshable = recorded = required = cleared = baked = refused = missing = lazy = 0
    for place, resource in enumerate(binding.backend.resources):
        actions = set(resource.actions(path)) if binding.present[place] else set()
        bit, dropped = 1 << place, bool(drop >> place & 1)
        if actions:
            required |= bit
        if resource.lazy:
            lazy |= bit
        remade = Action.RECORDED in actions and resource.lazy
        if (actions & REFRESHES or remade) and not dropped:
            refreshable |= bit
        if Action.RECORDED in actions and isinstance(resource, Buffer) and resource.on_device and not dropped:
            recorded |= bit
        if Action.REFUSED in actions:
            refused |= bit
        if path is Path.RECORDING and isinstance(resource, Pointer):
            baked |= bit
        if path is Path.PREPARE:
            continue
        stays = resource.lazy or Action.COPY_BACK in actions or isinstance(resource, Pointer | Alias)
        if dropped and stays and actions:
            missing |= bit
        elif actions & SWITCHES:
            rebinds += [(attribute, place, bool(half)) for half, attribute in enumerate(resource.attributes)]
        elif actions & CLEARS and resource.lazy:
            cleared |= bit
            clears += [(attribute, place, resource.empty) for attribute in resource.attributes]
        if actions & {Action.SNAPSHOT, Action.COPY_BACK} and not missing & bit:
            shared.append(place)
    return Script(
        tuple(rebinds),
        tuple(clears),
        tuple(shared),
        refreshable,
        recorded,
        required,
        cleared,
        baked,
        refused,
        missing,
        idle=(binding.domain, 0, refreshable & ~lazy, 0),
    )
