"""`explain()`: every resource in both domains, what it was refreshed from, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from specfsm.backends.backend import Backend
from specfsm.backends.binding import Binding
from specfsm.backends.resource import Path, Resource
from specfsm.domain import Domain, UnifiedCache
from specfsm.states.phase import Phase
from specfsm.states.resource import Freshness, Ledger

__all__ = ["Explanation", "Line", "explain", "matrix", "text_table"]


@frozen
class Line:
    """One (resource, domain).

    Args:
        stamp: input → version that the last refresh consumed; empty where there was none.
        moved: input → (version then, version now) of whatever moved since.
        verdict: the same in words.
    """

    resource: str
    kind: str
    domain: Domain
    state: Freshness
    stamp: dict[str, int]
    moved: dict[str, tuple[int, int]]
    verdict: str


@frozen
class Explanation:
    """The whole table. ``str()`` renders it."""

    phase: Phase
    serves: Domain
    backend: str
    note: str
    lines: tuple[Line, ...]

    def __str__(self) -> str:
        head = f"{self.backend} in {self.phase.name}, serving the {self.serves}'s cache"
        rows = [
            (line.resource, line.kind, str(line.domain), line.state.name, _versions(line.stamp), line.verdict)
            for line in self.lines
        ]
        table = text_table(("resource", "kind", "domain", "state", "refreshed from", "verdict"), rows)
        return "\n".join(filter(None, (head, self.note, table)))


def explain(
    backend: Backend,
    ledger: Ledger,
    bindings: Sequence[Binding],
    phase: Phase,
    serves: Domain,
    unified: UnifiedCache | None,
    unowned: Sequence[str] = (),
) -> Explanation:
    """Look at every (resource, domain) without touching any.

    Args:
        unowned: at check level "contents", the tables whose pages are compared with no owner.
    """
    distinct = dict.fromkeys(bindings)
    lines = tuple(
        _line(resource, ledger, binding, binding.present[place])
        for place, resource in enumerate(backend.resources)
        for binding in distinct
    )
    shared = f"the draft shares the target's cache: {unified.reason}" if unified else ""
    owners = f"the manager does not tell who owns the pages of {', '.join(unowned)}" if unowned else ""
    return Explanation(phase, serves, backend.name, "\n".join(filter(None, (shared, owners))), lines)


def _line(resource: Resource, ledger: Ledger, binding: Binding, present: bool) -> Line:
    domain, name = binding.domain, resource.name
    state = ledger.state(domain, name)
    stamp = ledger.stamps[domain][ledger.index[name]]
    consumed = {} if stamp is None else {each: stamp[ledger.position[each]] for each in ledger.sources[name]}
    consumed = {each: version for each, version in consumed.items() if each in ledger.inputs}
    moved = ledger.moved(domain, name)
    return Line(name, resource.kind, domain, state, consumed, moved, _verdict(resource, state, stamp, moved, present))


def _verdict(
    resource: Resource,
    state: Freshness,
    stamp: Sequence[int] | None,
    moved: dict[str, tuple[int, int]],
    present: bool,
) -> str:
    if not present:
        return "this domain has none"
    if state is Freshness.UNBOUND:
        return "dropped; made by whoever needs it first" if resource.lazy else "not bound"
    if state is Freshness.FRESH:
        return "fresh"
    if stamp is None:
        return f"never refreshed; derived from {', '.join(resource.reads)}"
    return "stale: " + ", ".join(f"{name} {was} → {now}" for name, (was, now) in moved.items())


def _versions(stamp: dict[str, int]) -> str:
    return ", ".join(f"{name} {version}" for name, version in stamp.items()) or "–"


def matrix(backend: Backend) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of the backend's resource × path table, straight from its declaration."""
    head = ("resource", "kind", "derived from", "space", *(path.value for path in Path))
    rows = []
    for resource in backend.resources:
        space = getattr(resource, "space", None)
        sources = (
            (*resource.reads, *filter(None, (getattr(resource, "of", None),)))
            if resource.kind == "Alias"
            else resource.reads
        )
        only = "" if len(resource.domains) == len(Domain) else f" ({', '.join(map(str, resource.domains))} only)"
        actions = (" + ".join(action.value for action in resource.actions(path)) or "–" for path in Path)
        rows.append((resource.name + only, resource.kind, ", ".join(sources), str(space or "–"), *actions))
    return head, rows


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned for a terminal."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = (head, ["─" * width for width in widths], *rows)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in lines
    )
