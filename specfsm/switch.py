"""What the metadata carries: the record of its originals, and how they are exchanged for the draft's values and back.

The first original wins: entering a replay from an eager draft keeps the record of the first entry, so what returns at
the end is what the engine had before any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from specfsm.backends.binding import Binding
from specfsm.backends.resource import Path, Shared
from specfsm.backends.script import Script, script
from specfsm.domain import Domain
from specfsm.states.resource import bits

__all__ = ["Carried", "Switch"]

ENTRIES = (Path.EAGER, Path.RECORDING, Path.REPLAY)
"""How the draft's phase may be entered."""


Carried = tuple[Binding, tuple[Any, ...] | None, dict[int, Any], tuple[Any, ...]]
"""What a refused transition puts back: who is active, the originals, the saved contents of what is shared, and what
each attribute of `Switch.carried` held."""

Put = Callable[[Any, Sequence[Any], Mapping[int, Any]], None]
"""Puts values on the metadata: (metadata, values, host halves by place) → None."""


def reader(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Compile ``(o.a, o.b, …)``, as `operator.attrgetter` does, for any number of names and in half its time."""
    read: Callable[[Any], tuple[Any, ...]] = eval(f"lambda o: ({''.join(f'o.{name}, ' for name in names)})")
    return read


Line = tuple[Sequence[str | None], str]
"""Attributes, None for a value that goes nowhere, and the expression of as many values."""


def writer(lines: Sequence[Line], makers: Sequence[Callable[[], Any]] = ()) -> Put:
    """Compile lines such as ``(o.a, _, o.b, ) = values``, each set from left to right: much faster than `setattr` in
    a loop.

    Args:
        lines: expressions of ``values``, ``hosts`` and ``make``.
        makers: what ``make[0]``, ``make[1]``, … are.
    """
    code = [f"({''.join(f'o.{name}, ' if name else '_, ' for name in names)}) = {source}" for names, source in lines]
    scope: dict[str, Any] = {"make": tuple(makers)}
    exec("\n    ".join(["def put(o, values, hosts):", *(code or ["pass"])]), scope)
    put: Put = scope["put"]
    return put


def _tuple(expressions: Sequence[str]) -> str:
    return f"({''.join(f'{each}, ' for each in expressions)})"


def _emptied(clears: Sequence[tuple[str, int, Callable[[], Any]]]) -> Line:
    """Every plan and cache without a value; makers are in the order of the clears."""
    made = ["None" if make() is None else f"make[{at}]()" for at, (_, _, make) in enumerate(clears)]
    return [name for name, _, _ in clears], _tuple(made)


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
        self.read = reader(self.carried)
        self.leave_out(drop)
        self.originals: tuple[Any, ...] | None = None
        self.shared: dict[int, Any] = {}
        self._touched: list[tuple[int, Any]] = []
        self._carriers: dict[int, Put] = {}

    def leave_out(self, drop: tuple[int, int]) -> None:
        """Compile the actions, without those of the dropped resources, from now on."""
        self.scripts: Mapping[Path, tuple[Script, Script]] = {
            path: (script(self.target, path, drop[Domain.TARGET]), script(self.draft, path, drop[Domain.DRAFT]))
            for path in Path
        }
        self._there = {path: self._way_there(self.scripts[path][Domain.DRAFT]) for path in ENTRIES}
        self._back = self._way_back(self.scripts[Path.RESTORE][Domain.TARGET])

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

    def _way_there(self, steps: Script) -> Put:
        """Takes the draft's values, in the order of the resources, then the host halves, and drops plans and caches."""
        taken: list[str | None] = [None for _ in self.resources]
        halves = [(name, f"hosts.get({place})") for name, place, half in steps.rebinds if half]
        for name, place, half in steps.rebinds:
            taken[place] = taken[place] if half else name
        lines: list[Line] = [(taken, "values")]
        lines.append(([name for name, _ in halves], _tuple([source for _, source in halves])))
        return writer([*lines, _emptied(steps.clears)], [make for _, _, make in steps.clears])

    def _way_back(self, steps: Script) -> Put:
        """Drops plans and caches, then returns, last first, what a restore returns from the record of the originals."""
        returned = {name for name, *_ in steps.rebinds} & {*self.attributes}
        originals = [name if name in returned else None for name in self.carried[::-1]]
        clears = steps.clears[::-1]
        return writer([_emptied(clears), (originals, "values[::-1]")], [make for _, _, make in clears])

    def _carrier(self, mask: int) -> Put:
        """Puts these resources' values on the metadata, as they are now."""
        names: list[str] = []
        sources: list[str] = []
        makers: list[Callable[[], Any]] = []
        for place in bits(mask):
            resource = self.resources[place]
            for half, attribute in enumerate(resource.attributes):
                source = f"hosts.get({place})" if half else f"values[{place}]"
                if resource.empty() is not None:
                    source = f"make[{len(makers)}]() if {source} is None else {source}"
                    makers.append(resource.empty)
                names.append(attribute)
                sources.append(source)
        made = self._carriers[mask] = writer([(names, _tuple(sources))], makers)
        return made

    # The exchange.

    def to_draft(self, path: Path, steps: Script, carried: Carried) -> None:
        """Keep the originals, save what is shared, take the draft's values, drop plans and caches."""
        self.originals = carried[-1]
        if steps.shared:
            self.shared = {place: self._save(place) for place in steps.shared}
        self._there[path](self.metadata, self.draft.values, self.draft.hosts)
        self.active = self.draft

    def to_target(self, steps: Script) -> None:
        """Backwards: plans and caches dropped, the originals returned, the shared contents copied back."""
        assert self.originals is not None, "the originals are recorded when a draft phase is entered"
        self._back(self.metadata, self.originals, {})
        if steps.shared:
            for place in steps.shared:
                self._save(place)
                self._load(place, self.shared[place])
            self.shared = {}
        self.originals, self.active = None, self.target

    def carry(self, binding: Binding, mask: int) -> None:
        """Put new values on the metadata, or, where the other domain is active, into the record of the originals."""
        if binding is not self.active and binding is not self.target:
            return
        put = self._carriers.get(mask) or self._carrier(mask)
        if binding is self.active:
            put(self.metadata, binding.values, binding.hosts)
            return
        originals = SimpleNamespace()
        put(originals, binding.values, binding.hosts)
        for attribute, value in vars(originals).items():
            if attribute in self.attributes:
                self._note_original(attribute, value)
            else:
                setattr(self.metadata, attribute, value)

    def _note_original(self, attribute: str, value: Any) -> None:
        assert self.originals is not None, "the originals are recorded while the draft is active"
        index = self.carried.index(attribute)
        self.originals = (*self.originals[:index], value, *self.originals[index + 1 :])

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
        """A transition is about to change something: nothing shared is touched yet."""
        if self._touched:
            self._touched.clear()
        return self.active, self.originals, self.shared, self.read(self.metadata)

    def put_back(self, carried: Carried) -> int:
        """Make the metadata, and the contents of every shared buffer, what they were.

        Returns:
            The mask of the shared buffers that were written for it.
        """
        active, originals, shared, values = carried
        written = 0
        for place, saved in reversed(self._touched):
            self._load(place, saved)
            written |= 1 << place
        now = self.read(self.metadata)
        for attribute, value, held in zip(self.carried[::-1], values[::-1], now[::-1], strict=True):
            if held is not value:
                setattr(self.metadata, attribute, value)
        self.active, self.originals, self.shared = active, originals, shared
        return written

    def reset(self) -> None:
        """Bind the target's own values, whatever the metadata carries now."""
        for attribute, place, half in self.whole.rebinds:
            value = self.target.hosts.get(place) if half else self.target.values[place]
            setattr(self.metadata, attribute, value)
        for attribute, _, empty in self.whole.clears:
            setattr(self.metadata, attribute, empty())
        self.active, self.originals, self.shared = self.target, None, {}
