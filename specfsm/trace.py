"""What happened: a ring buffer of transitions, a summary by event, and an export that Perfetto opens.

Appending is one tuple into a deque, cheap enough to stay on. Names are resolved when somebody looks.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from specfsm.domain import Domain
from specfsm.states.resource import bits

__all__ = ["Summary", "Trace", "Transition", "Work"]

Work = tuple[Domain | None, int, int, int]
"""The domain that an event looked at, mask of what it refreshed, mask of what was proven not to need it, and mask of
what it refreshed ahead, in the draft's cache."""


@frozen
class Transition:
    """One committed transition.

    Args:
        event, state: what was fired and where it led, by name.
        start_ns, end_ns: `time.perf_counter_ns` around the whole protocol.
        domain: whose resources it looked at; None where it refreshes none.
        refreshed: mask of the resources that were stale and were refreshed.
        proven: mask of the resources that were fresh, so that their refresh was proven unnecessary.
        ahead: mask of the draft's resources that were refreshed along with the target's.
    """

    event: str
    state: str
    start_ns: int
    end_ns: int
    domain: Domain | None = None
    refreshed: int = 0
    proven: int = 0
    ahead: int = 0


@frozen
class Summary:
    """All transitions of one event, added up."""

    event: str
    count: int
    total_ns: int
    refreshed: int
    proven: int


class Trace:
    """The last `capacity` transitions (all of them where it is None).

    Args:
        capacity: how many are kept.
        names: the backend's resource names by place; the orchestrator fills them in.

    Attributes:
        append: takes (event, state, start, end, (domain, refreshed, proven, ahead)), see `Transition`.
    """

    def __init__(self, capacity: int | None = 4096, names: Sequence[str] = ()) -> None:
        self.ring: deque[tuple[Any, ...]] = deque(maxlen=capacity)
        self.names = tuple(names)
        self.append = self.ring.append

    def __iter__(self) -> Iterator[Transition]:
        return (Transition(event, to.value, start, end, *work) for event, to, start, end, work in self.ring)

    def __len__(self) -> int:
        return len(self.ring)

    def clear(self) -> None:
        self.ring.clear()

    def resources(self, mask: int) -> tuple[str, ...]:
        return tuple(self.names[place] for place in bits(mask))

    def summary(self) -> list[Summary]:
        """One row an event, in order of first appearance."""
        rows: dict[str, list[Transition]] = {}
        for transition in self:
            rows.setdefault(transition.event, []).append(transition)
        return [
            Summary(
                event,
                len(each),
                sum(one.end_ns - one.start_ns for one in each),
                sum(one.refreshed.bit_count() + one.ahead.bit_count() for one in each),
                sum(one.proven.bit_count() for one in each),
            )
            for event, each in rows.items()
        ]

    def to_perfetto(self) -> dict[str, Any]:
        """Trace Event Format: a slice for each transition, and one for each phase between two of them."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for tid, name in ((1, "transitions"), (2, "phases"))
        ]
        previous: Transition | None = None
        for one in self:
            if previous is not None:
                events.append(_slice(previous.state, 2, previous.end_ns, one.start_ns, {}))
            facts = {"refreshed": self.resources(one.refreshed), "proven unnecessary": self.resources(one.proven)}
            if one.ahead:
                facts["refreshed ahead, draft"] = self.resources(one.ahead)
            events.append(_slice(one.event, 1, one.start_ns, one.end_ns, {"domain": str(one.domain), **facts}))
            previous = one
        return {"traceEvents": events, "displayTimeUnit": "ns"}

    def save(self, path: str | Path) -> None:
        """Write `to_perfetto` as JSON; open it at ui.perfetto.dev."""
        Path(path).write_text(json.dumps(self.to_perfetto()))


def _slice(name: str, tid: int, start_ns: int, end_ns: int, args: dict[str, Any]) -> dict[str, Any]:
    timing = {"ts": start_ns / 1e3, "dur": max(0, end_ns - start_ns) / 1e3}
    return {"ph": "X", "pid": 1, "tid": tid, "name": name, "cat": "specfsm", **timing, "args": args}
