"""Which slots of a pool hold which prefix.

A key belongs to a *slot*, not to a request: it stays when the request's pages are freed or offloaded, and goes when the
slot is handed out for something else. So a page that nobody holds can be found until it is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["Prefixes"]


class Prefixes:
    """Slot of each page of each known prefix. A key is every token that the page's rows were made from."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, ...], int] = {}
        self._keys: dict[int, tuple[int, ...]] = {}

    def publish(self, tokens: Sequence[int], slot: int) -> None:
        """The page in this slot holds the last rows of this prefix. The first slot that does is kept."""
        key = tuple(tokens)
        if key not in self._slots and slot not in self._keys:
            self._slots[key], self._keys[slot] = slot, key

    def find(self, prefixes: Iterator[Sequence[int]]) -> Iterator[int]:
        """The slots of these prefixes, up to the first that is unknown."""
        for tokens in prefixes:
            slot = self._slots.get(tuple(tokens))
            if slot is None:
                return
            yield slot

    def forget(self, slot: int) -> None:
        """The slot holds something else from now on."""
        key = self._keys.pop(slot, None)
        if key is not None:
            del self._slots[key]
