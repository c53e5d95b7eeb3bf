"""What the metadata carries: the record of its originals, and how they are exchanged for the draft's values and back.

The first original wins: entering a replay from an eager draft keeps the record of the first entry, so what returns at
the end is what the engine had before any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from attrs import frozen

from specfsm.backends.binding import Binding
from specfsm.backends.resource import Path, Shared
from specfsm.backends.script import Script, script
from specfsm.domain import Domain
from specfsm.states.resource import bits

__all__ = ["Carried", "Switch"]


@frozen
class Carried:
    """What a refused transition puts back on the metadata."""

    active: Binding
    originals: tuple[Any, ...] | None
    shared: dict[int, Any]
    values: tuple[Any, ...]


class Switch:
    """Exchanges the values of two bindings on one metadata object.

    Args:
        metadata: the object.
        target, draft: the bindings; the same one where the draft shares the target's cache.
        drop: for each domain, mask of the resources whose actions are left out (fault injection).

    Attributes:
        active: whose values the metadata carries.
        carried: every attribute that the backend declares.
        attributes: those of them that follow the switch.
        scripts: path → (target's, draft's) compiled actions.
    """

    def __init__(self, metadata: Any, target: Binding, draft: Binding, drop: tuple[int, int] = (0, 0)) -> None:
        self.metadata = metadata
        self.resources = target.backend.resources
        self.target, self.draft, self.active = target, draft, target
        self.whole = script(draft, Path.EAGER, 0)
        self.attributes = self._exchanged()
        self.carried = tuple(name for resource in self.resources for name in resource.attributes)
        self._introduce()
        self.read = self._reader()
        self.leave_out(drop)
        self.originals: tuple[Any, ...] | None = None
        self.shared: dict[int, Any] = {}
        self._touched: list[tuple[int, Any]] = []

    def leave_out(self, drop: tuple[int, int]) -> None:
        """Compile the actions, without those of the dropped resources, from now on."""
        self.scripts: Mapping[Path, tuple[Script, Script]] = {
            path: (script(self.target, path, drop[Domain.TARGET]), script(self.draft, path, drop[Domain.DRAFT]))
            for path in Path
        }
        self._returned = self._way_back()
        self._pairs: dict[Path, tuple[tuple[str, Any], ...]] = {}

    @property
    def unified(self) -> bool:
        return self.draft is self.target

    def _exchanged(self) -> tuple[str, ...]:
        """Every attribute that follows the switch."""
        return () if self.unified else tuple(name for name, *_ in (*self.whole.rebinds, *self.whole.clears))

    def _introduce(self) -> None:
        """An attribute that the engine never set starts empty."""
        for resource in self.resources:
            for name in resource.attributes:
                if not hasattr(self.metadata, name):
                    setattr(self.metadata, name, resource.empty())

    def _reader(self) -> Callable[[Any], tuple[Any, ...]]:
        if len(self.carried) > 1:
            return attrgetter(*self.carried)
        return lambda metadata: tuple(getattr(metadata, name) for name in self.carried)

    def _way_back(self) -> tuple[tuple[str, int], ...]:
        """(attribute, its place in the record) of what a restore returns, last first."""
        returned = {name for name, *_ in self.scripts[Path.RESTORE][Domain.TARGET].rebinds}
        pairs = [(name, index) for index, name in enumerate(self.carried) if name in returned]
        return tuple(reversed(pairs))

    # The exchange.

    def begin(self) -> None:
        """A transition starts: nothing is touched yet."""
        self._touched.clear()

    def to_draft(self, path: Path) -> None:
        """Remember the originals, save what is shared, take the draft's values, drop plans and caches."""
        steps, metadata = self.scripts[path][Domain.DRAFT], self.metadata
        self.originals = self.read(metadata)
        for place in steps.shared:
            self.shared[place] = self._save(place)
        for attribute, value in self._pairs.get(path) or self._resolve(path, steps):
            setattr(metadata, attribute, value)
        for attribute, _, empty in steps.clears:
            setattr(metadata, attribute, empty())
        self.active = self.draft

    def to_target(self) -> None:
        """Backwards: plans and caches dropped, the originals returned, the shared contents copied back."""
        steps, metadata = self.scripts[Path.RESTORE][Domain.TARGET], self.metadata
        assert self.originals is not None, "the originals are recorded when a draft phase is entered"
        for attribute, _, empty in steps.clears:
            setattr(metadata, attribute, empty())
        originals = self.originals
        for attribute, index in self._returned:
            setattr(metadata, attribute, originals[index])
        for place in steps.shared:
            saved = self.shared.pop(place)
            self._save(place)
            self._load(place, saved)
        self.originals, self.active = None, self.target

    def carry(self, binding: Binding, mask: int) -> None:
        """Put new values on the metadata, or, where the other domain is active, into the record of the originals."""
        self._pairs = {}
        if binding is not self.active and binding is not self.target:
            return
        for place in bits(mask):
            resource = self.resources[place]
            for half, attribute in enumerate(resource.attributes):
                value = binding.hosts.get(place) if half else binding.values[place]
                value = resource.empty() if value is None else value
                if binding is self.active or attribute not in self.attributes:
                    setattr(self.metadata, attribute, value)
                else:
                    self._note_original(attribute, value)

    def _note_original(self, attribute: str, value: Any) -> None:
        assert self.originals is not None, "the originals are recorded while the draft is active"
        index = self.carried.index(attribute)
        self.originals = (*self.originals[:index], value, *self.originals[index + 1 :])

    def _resolve(self, path: Path, steps: Script) -> tuple[tuple[str, Any], ...]:
        """The pairs of a switch, kept until a value changes."""
        pairs = tuple(
            (attribute, self.draft.hosts.get(place) if half else self.draft.values[place])
            for attribute, place, half in steps.rebinds
        )
        self._pairs[path] = pairs
        return pairs

    def _save(self, place: int) -> Any:
        resource, buffer = self.resources[place], self.target.values[place]
        assert isinstance(resource, Shared)
        saved = buffer.clone() if resource.save is None else resource.save(buffer)
        self._touched.append((place, saved))
        return saved

    def _load(self, place: int, saved: Any) -> None:
        resource, buffer = self.resources[place], self.target.values[place]
        assert isinstance(resource, Shared)
        if resource.load is None:
            buffer.copy_(saved)
        else:
            resource.load(buffer, saved)

    # Undo.

    def remember(self) -> Carried:
        return Carried(self.active, self.originals, self.shared.copy(), self.read(self.metadata))

    def put_back(self, carried: Carried) -> int:
        """Make the metadata, and the contents of every shared buffer, what they were.

        Returns:
            The mask of the shared buffers that were written for it.
        """
        written = 0
        for place, saved in reversed(self._touched):
            self._load(place, saved)
            written |= 1 << place
        now = self.read(self.metadata)
        for attribute, value, held in zip(self.carried[::-1], carried.values[::-1], now[::-1], strict=True):
            if held is not value:
                setattr(self.metadata, attribute, value)
        self._pairs = {}
        self.active, self.originals, self.shared = carried.active, carried.originals, carried.shared
        return written

    def reset(self) -> None:
        """Bind the target's own values, whatever the metadata carries now."""
        for attribute, place, half in self.whole.rebinds:
            value = self.target.hosts.get(place) if half else self.target.values[place]
            setattr(self.metadata, attribute, value)
        for attribute, _, empty in self.whole.clears:
            setattr(self.metadata, attribute, empty())
        self.active, self.originals, self.shared, self._pairs = self.target, None, {}, {}
