"""The seven kinds of resource: what each holds, and what a phase switch does to it.

A backend declares resources; the orchestrator runs their actions. Which action a kind takes on which path is the
literal `ACTIONS` below: the documents' matrices are printed from it, and the orchestrator is compiled from it, so the
eager, recording and replay paths cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, unique
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define, field, frozen

from specfsm.domain import AddressSpace, Batch, Domain, Geometry, KVManager
from specfsm.kernels.recipes import Recipe

if TYPE_CHECKING:
    import torch

__all__ = [
    "ACTIONS",
    "Action",
    "Alias",
    "Axis",
    "Buffer",
    "Cache",
    "DomainView",
    "Path",
    "Plan",
    "Pointer",
    "Resource",
    "Shared",
    "Staged",
    "Table",
]

Axis = str | int
"""One axis of a symbolic shape: a number, or a letter: S sequences, T tokens, C = 1 + draft length, and of the
domain's own manager B blocks a sequence, P pools, R rows of its table, Q planes, L layers, Y sliding types."""


@unique
class Path(Enum):
    """The ways in which a resource meets a transition. Hashed by identity in C, as states are."""

    __hash__ = object.__hash__

    PREPARE = "in its own phase"  # target_prepare, draft_step: the domain is active already
    EAGER = "eager draft"
    RECORDING = "recording"
    REPLAY = "before replay"
    RESTORE = "restore"


@unique
class Action(Enum):
    REBIND = "rebind"  # the attribute takes the domain's own value
    REFRESH = "refresh"  # if stale: written anew from its inputs
    DERIVE = "re-derive"  # a view of another resource: rebound, and made anew if stale
    INVALIDATE = "invalidate"  # dropped; whoever needs it first makes it
    RECORDED = "recorded"  # dropped, so that the recorded phase makes its own inside the graph
    DROP = "drop"  # emptied; filled again on use
    SNAPSHOT = "snapshot"  # contents saved before the draft writes them
    COPY_BACK = "copy back"  # contents put back
    REFUSED = "refused"  # cannot take this path at all


R, F, D = Action.REBIND, Action.REFRESH, Action.DERIVE


def _nothing_bound(name: str) -> Any:
    raise KeyError(f"{name}: this view is of no bound backend")


@define
class DomainView:
    """One cache domain, as a refresh sees it. Nothing in it changes: another batch makes another view.

    Args:
        value: name of a resource → what it is in this domain: a refresh may use those that the resource reads.
    """

    domain: Domain
    manager: KVManager
    geometry: Geometry
    batch: Batch | None
    axes: Mapping[str, int]
    value: Callable[[str], Any] = field(default=_nothing_bound, eq=False, repr=False)

    def rows(self) -> list[int]:
        """The manager's row of each request, in batch order."""
        if self.batch is None:
            return []
        return list(self.manager.arrange(self.batch.request_ids))


@frozen
class Resource:
    """What all kinds declare.

    Args:
        name: unique in the backend; what errors and `publish` call it.
        reads: inputs and resources that its contents are derived from.
        attribute: the metadata's attribute that carries it; defaults to the name. None: the orchestrator keeps it.
        domains: the domains that have one. A table of the target only is untouched by the draft.
        refreshed_by: "host" before the phase, or "graph" where a captured graph refreshes it itself.
        note: anything a reader of the matrix should know.
    """

    name: str
    reads: tuple[str, ...] = field(default=(), kw_only=True)
    attribute: str | None = field(kw_only=True)
    domains: tuple[Domain, ...] = field(default=tuple(Domain), kw_only=True)
    refreshed_by: str = field(default="host", kw_only=True)
    note: str = field(default="", kw_only=True)

    lazy: ClassVar[bool] = False  # may be absent when a phase begins: whoever needs it makes it

    @attribute.default
    def _named_attribute(self) -> str | None:
        return self.name

    @staticmethod
    def empty() -> Any:
        """What its attribute holds while there is no value."""
        return None

    @property
    def kind(self) -> str:
        return type(self).__name__

    def actions(self, path: Path) -> tuple[Action, ...]:
        """What a switch does to it on `path`; empty where nothing applies."""
        actions = ACTIONS[type(self)][path]
        if path is Path.RECORDING and self.refreshed_by == "graph":
            return (Action.REBIND, Action.RECORDED)
        return actions

    @property
    def attributes(self) -> tuple[str, ...]:
        """Every metadata attribute that follows the switch."""
        return () if self.attribute is None else (self.attribute,)


@frozen
class Pointer(Resource):
    """A reference or number that follows the domain: a manager, a pool's base address, a count of the batch.

    Args:
        of: its value in a domain.
    """

    of: Callable[[DomainView], Any] = field(kw_only=True)


@frozen
class Buffer(Resource):
    """A tensor of a declared dtype and symbolic shape; the base of the kinds that own memory.

    Args:
        dtype: name of the element type, as torch spells it.
        shape: symbolic axes, see `Axis`.
        space: where its entries point; None where they are no indices.
        sentinel: what padded rows and trailing columns hold; by default what the recipe says, else 0. Where a row
            follows a request's lengths or layout it is said, because only its reader knows what is harmless.
        recipe: how the refresh kernel derives it, as data.
        refresh: or a function ``(view, buffer) → buffer`` that writes it; None returned means it declined.
        on_device: whether the refresh runs on the device, from what is on the device, so that a graph can record it.
            A recipe does; a function that does says so.
    """

    dtype: str = field(kw_only=True)
    shape: tuple[Axis, ...] = field(kw_only=True)
    space: AddressSpace | None = field(default=None, kw_only=True)
    _sentinel: int | None = field(default=None, kw_only=True)
    recipe: Recipe | None = field(default=None, kw_only=True)
    refresh: Callable[[DomainView, torch.Tensor], Any] | None = field(default=None, kw_only=True)
    on_device: bool = field(kw_only=True)

    @on_device.default
    def _recipe_is_on_device(self) -> bool:
        return self.recipe is not None

    @property
    def said_sentinel(self) -> int | None:
        """The sentinel that the declaration, or else its recipe, names; None where neither does."""
        return getattr(self.recipe, "sentinel", None) if self._sentinel is None else self._sentinel

    @property
    def sentinel(self) -> int:
        return self.said_sentinel or 0

    @property
    def follows_rows(self) -> bool:
        """Whether it has an entry for each row, or each token, of the batch."""
        return not self.letters.isdisjoint("ST")

    @property
    def letters(self) -> set[str]:
        """The axes of its shape."""
        return {letter for axis in self.shape for letter in str(axis).split("*")}


@frozen
class Table(Buffer):
    """A device buffer, one for each domain.

    Args:
        twin: the metadata's attribute that carries the draft's buffer; defaults to ``draft_<attribute>``.
    """

    twin: str | None = field(kw_only=True)

    @twin.default
    def _named_twin(self) -> str | None:
        return None if self.attribute is None or Domain.DRAFT not in self.domains else f"draft_{self.attribute}"


@frozen
class Staged(Table):
    """A host and device pair: written on the host into a staging ring, then copied.

    Args:
        fill: ``(view, host buffer) → host buffer`` that writes all of it; None returned means it declined.
        patch: ``(view, host buffer, note) → note``, asked first: brings a buffer up to date that it wrote before, from
            what it noted then (None: nothing is known of the contents). None returned means that `fill` has to do it.
        host_attribute: the metadata's attribute that carries the host half, if the engine reads it; its twin is
            ``draft_<host_attribute>``.
    """

    fill: Callable[[DomainView, torch.Tensor], Any] = field(kw_only=True)
    patch: Callable[[DomainView, torch.Tensor, Any], Any] | None = field(default=None, kw_only=True)
    host_attribute: str | None = field(default=None, kw_only=True)

    @property
    def attributes(self) -> tuple[str, ...]:
        return tuple(name for name in (self.attribute, self.host_attribute) if name is not None)


@frozen
class Plan(Resource):
    """An opaque schedule, made lazily by whoever runs first and valid until one of its inputs moves.

    One attribute serves both domains, so every switch invalidates it.
    """

    lazy: ClassVar[bool] = True


@frozen
class Alias(Resource):
    """A view of another resource: it follows that one's binding, not its contents.

    Args:
        of: the resource it views.
        derive: ``(value of that resource, view) → value``.
    """

    of: str = field(kw_only=True)
    derive: Callable[[Any, DomainView], Any] = field(kw_only=True)


@frozen
class Cache(Resource):
    """A Python value keyed by the manager: a dict that is emptied by every switch and filled on use."""

    lazy: ClassVar[bool] = True

    @staticmethod
    def empty() -> dict[Any, Any]:
        return {}


@frozen
class Shared(Buffer):
    """A single buffer without a twin: its contents are saved before the draft writes them, and copied back.

    Args:
        save: ``buffer → saved`` for an engine that keeps its own record; whatever it returns is handed to `load`.
        load: ``(buffer, saved) → None``. Both or neither; by default the contents are copied.
    """

    save: Callable[[torch.Tensor], Any] | None = field(default=None, kw_only=True)
    load: Callable[[torch.Tensor, Any], Any] | None = field(default=None, kw_only=True)


Row = Mapping[Path, tuple[Action, ...]]
_BUFFER: Row = {Path.PREPARE: (F,), Path.EAGER: (R, F), Path.RECORDING: (R,), Path.REPLAY: (F,), Path.RESTORE: (R,)}

ACTIONS: Mapping[type[Resource], Row] = {
    Pointer: {
        Path.PREPARE: (F,),
        Path.EAGER: (R, F),
        Path.RECORDING: (R,),
        Path.REPLAY: (R, F),
        Path.RESTORE: (R,),
    },
    Table: _BUFFER,
    Staged: _BUFFER,
    Plan: {
        Path.PREPARE: (Action.INVALIDATE,),
        Path.EAGER: (Action.INVALIDATE,),
        Path.RECORDING: (Action.RECORDED,),
        Path.REPLAY: (Action.INVALIDATE,),
        Path.RESTORE: (Action.INVALIDATE,),
    },
    Alias: {path: () if path is Path.REPLAY else (D,) for path in Path},
    Cache: dict.fromkeys(Path, (Action.DROP,)),
    Shared: {
        Path.PREPARE: (F,),
        Path.EAGER: (Action.SNAPSHOT, F),
        Path.RECORDING: (Action.REFUSED,),
        Path.REPLAY: (Action.SNAPSHOT, F),
        Path.RESTORE: (Action.COPY_BACK,),
    },
}
"""Kind × path → actions, in the order they run. A path without actions is an explicit "not applicable"."""
