"""The resource machine, one for each (resource, domain), and the ledger that runs all of them as bit masks.

A resource is *fresh* in a domain iff every input it is derived from still has the version that its last refresh
consumed. Comparing version tuples of ten resources costs microseconds; so each input knows its readers as a bit
mask, moving it ORs them into the domain's stale mask, and a check is one AND. Versions and stamps stay, for the
explanation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import unique
from operator import add
from typing import NamedTuple

from attrs import frozen

from specfsm.domain import Domain
from specfsm.states.table import Move, States, Table

__all__ = ["RESOURCE", "Freshness", "Ledger", "bits"]


@unique
class Freshness(States):
    UNBOUND = "unbound"
    STALE = "stale"
    FRESH = "fresh"


BIND = Move("bind", Freshness.STALE, why="a buffer or value was bound: nothing is known of its contents")
UNBIND = Move("unbind", Freshness.UNBOUND, why="the value was dropped (a plan invalidated, a cache cleared)")
MOVE = Move("move", Freshness.STALE, why="an input moved, or the contents were edited: a refresh is due")
PUBLISH = Move("publish", Freshness.FRESH, why="a refresh returned what it wrote: stamped with what it consumed")
DECLINE = Move("decline", Freshness.STALE, why="a refresh ran and returned nothing: as stale as before")

RESOURCE = Table(
    name="resource",
    initial=Freshness.UNBOUND,
    rows=(
        (Freshness.UNBOUND, (BIND, Move("move", Freshness.UNBOUND, why="nothing is bound that could become stale"))),
        (Freshness.STALE, (BIND, MOVE, PUBLISH, DECLINE, UNBIND)),
        (Freshness.FRESH, (BIND, MOVE, PUBLISH, UNBIND)),
    ),
)


def bits(mask: int) -> Iterator[int]:
    """The positions of the set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Saved(NamedTuple):
    """What a refused transition puts back: for each domain, what is bound and stale, the versions and the stamps."""

    bound: tuple[int, ...]
    stale: tuple[int, ...]
    versions: tuple[list[int], ...]
    stamps: tuple[list[list[int] | None], ...]


@frozen
class Publication:
    """What publishing or editing a mask of resources touches.

    Args:
        steps: by how much each version moves: 1 for those of the mask.
        places: whose stamps do.
        readers: mask of what is derived from them.
    """

    steps: tuple[int, ...]
    places: tuple[int, ...]
    readers: int


class Ledger:
    """Every (resource, domain) at once: what is bound, what is stale, and which versions each refresh consumed.

    Args:
        inputs: names of the inputs.
        reads: resource → what its contents are derived from (inputs and resources), producers first.
        views: resource → resources whose *binding* it follows, though not their contents (an alias of a buffer).

    A resource is itself an input to its readers: publishing or editing it moves its version.

    Attributes:
        versions: for each domain, the version of each input and resource.
        stamps: for each domain and resource, the versions that its last refresh consumed; None before the first.

    A domain's lists are never changed but replaced: to save them is to keep them, and a stamp is a list that was.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        reads: Mapping[str, Sequence[str]],
        views: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.names = tuple(reads)
        self.inputs = tuple(inputs)
        self.index = {name: place for place, name in enumerate(self.names)}
        self.position = {name: place for place, name in enumerate((*inputs, *self.names))}
        self.sources = self._sources(reads)
        self.readers = [self._mask_of_readers(name) for name in self.position]
        self.follow = self._followers(views or {})
        count = len(self.position)
        self._steps = tuple(tuple(int(at == place) for at in range(count)) for place in range(count))
        self.versions: list[list[int]] = [[0] * count for _ in Domain]
        self.stamps: list[list[list[int] | None]] = [[None] * len(self.names) for _ in Domain]
        self.bound = [0 for _ in Domain]
        self.stale = [0 for _ in Domain]
        self.saved: Saved | None = None
        self._publications: dict[int, Publication] = {}

    def _sources(self, reads: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
        """Everything a resource is derived from, directly or through others, in order of first mention."""
        closed: dict[str, tuple[str, ...]] = {}
        for name, direct in reads.items():
            through = (source for read in direct for source in (read, *closed.get(read, ())))
            closed[name] = tuple(dict.fromkeys(through))
        return closed

    def _mask_of_readers(self, name: str) -> int:
        return self.mask(reader for reader, sources in self.sources.items() if name in sources)

    def _followers(self, views: Mapping[str, Sequence[str]]) -> list[int]:
        """For each resource, whatever goes stale when it is *bound* elsewhere: its readers, its views and theirs."""
        follow = []
        for name in self.names:
            viewers = [view for view, followed in views.items() if name in followed]
            mask = self.readers[self.position[name]] | self.mask(viewers)
            for view in viewers:
                mask |= self.readers[self.position[view]]
            follow.append(mask)
        return follow

    def mask(self, names: Iterable[str]) -> int:
        """The bit mask of these resources."""
        mask = 0
        for name in names:
            mask |= 1 << self.index[name]
        return mask

    # The events of the resource table, each over many resources at once.

    def bind(self, domain: Domain, place: int) -> None:
        self._advance(domain, self._steps[len(self.inputs) + place])
        self.stamps[domain] = stamps = self.stamps[domain][:]
        stamps[place] = None
        self.bound[domain] |= 1 << place
        self.stale[domain] |= 1 << place | self.follow[place]

    def unbind(self, domain: Domain, mask: int) -> None:
        if (self.bound[domain] | self.stale[domain]) & mask:
            self.saved = None
            self.bound[domain] &= ~mask
            self.stale[domain] &= ~mask

    def move(self, domain: Domain, source: str) -> None:
        """An input moved, or a resource was edited."""
        place = self.position[source]
        if place >= len(self.inputs):
            self.edit(domain, 1 << (place - len(self.inputs)))
            return
        self._advance(domain, self._steps[place])
        self.stale[domain] |= self.readers[place]

    def edit(self, domain: Domain, mask: int) -> None:
        """The contents of these were edited: they, and whatever is derived from them, are stale."""
        if mask:
            edited = self._publications.get(mask) or self._publication(mask)
            self._advance(domain, edited.steps)
            self.stale[domain] |= edited.readers | mask

    def publish(self, domain: Domain, mask: int) -> None:
        """These were refreshed, all from the inputs as they are now. Their other readers, if bound, become stale."""
        if not mask:
            return
        published = self._publications.get(mask) or self._publication(mask)
        stamp = self._advance(domain, published.steps)
        self.stale[domain] = (self.stale[domain] | published.readers & self.bound[domain]) & ~mask
        self.stamps[domain] = stamps = self.stamps[domain][:]
        for place in published.places:
            stamps[place] = stamp

    def _advance(self, domain: Domain, steps: Iterable[int]) -> list[int]:
        """Move the versions by these steps, in a new list."""
        self.saved = None
        self.versions[domain] = versions = list(map(add, self.versions[domain], steps))
        return versions

    def _publication(self, mask: int) -> Publication:
        places = tuple(bits(mask))
        positions = tuple(len(self.inputs) + place for place in places)
        readers = 0
        for position in positions:
            readers |= self.readers[position]
        steps = tuple(map(sum, zip(*(self._steps[position] for position in positions), strict=True)))
        made = self._publications[mask] = Publication(steps, places, readers)
        return made

    def assume(self, domain: Domain, mask: int) -> None:
        """Take these as fresh while a graph is recorded, because it is replayed only when they are."""
        self.saved = None
        self.stale[domain] &= ~mask

    # Queries.

    def state(self, domain: Domain, name: str) -> Freshness:
        bit = 1 << self.index[name]
        if not self.bound[domain] & bit:
            return Freshness.UNBOUND
        return Freshness.STALE if self.stale[domain] & bit else Freshness.FRESH

    def moved(self, domain: Domain, name: str) -> dict[str, tuple[int, int]]:
        """Source → (version at the last refresh, version now) of what moved since: inputs, else resources."""
        stamp = self.stamps[domain][self.index[name]]
        now = self.versions[domain]
        places = sorted(self.position[source] for source in (*self.sources[name], name))
        named = tuple(self.position)
        if stamp is None:
            return {named[place]: (0, now[place]) for place in places if named[place] in self.inputs}
        moved = {named[place]: (stamp[place], now[place]) for place in places if stamp[place] != now[place]}
        return {name: change for name, change in moved.items() if name in self.inputs} or moved

    def save(self) -> Saved:
        """What `load` puts back."""
        if self.saved is None:
            self.saved = Saved(tuple(self.bound), tuple(self.stale), tuple(self.versions), tuple(self.stamps))
        return self.saved

    def load(self, saved: Saved) -> None:
        self.bound[:], self.stale[:] = saved.bound, saved.stale
        self.versions[:], self.stamps[:] = saved.versions, saved.stamps
        self.saved = saved
