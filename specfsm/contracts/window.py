"""Room: every request has pages for the whole draft window, in both caches, before the window starts.

All lengths are counted in *places*, not in tokens that were kept: a rejected token occupies its place until the next
window overwrites it. So a window's need is its last place if everything were accepted, and a rejection frees nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import sub
from typing import TYPE_CHECKING, ClassVar

from attrs import define, field
from attrs.validators import ge

from specfsm.domain import Batch, Domain, Geometry
from specfsm.errors import WindowOverflow
from specfsm.states.phase import PHASE

if TYPE_CHECKING:
    from specfsm.orchestrator import Orchestrator

__all__ = ["Capacity", "Window", "crowded"]

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT

Capacity = Callable[[int], int]
"""Request → tokens that fit the pages it holds in one domain. Asked of each request at each event: a look-up in a
dictionary (its ``__getitem__``) costs a tenth of a function."""


@define
class Window:
    """Refuses a phase whose writes would leave a request's pages.

    Asked at ``target_prepare``, for the target's own writes and for the draft's whole window after them; at
    ``draft_forward`` and ``draft_replay``, for the window; and at every ``draft_step``.

    Args:
        target, draft: capacity of a request in each domain. ``draft=None``: there is no draft to ask about.
        draft_len: L, tokens that the draft proposes. An engine whose L changes sets it before the step.
        at_once: the draft's pages are asked for at ``target_prepare`` already. False for an engine that allocates them
            between the target's phase and the draft's.

    A draft window ends at most L places behind the target's length: the draft catches up with what the target has and
    its own last token, then writes L - 1 more.
    """

    target: Capacity
    draft: Capacity | None
    draft_len: int = field(validator=ge(0), kw_only=True)
    at_once: bool = field(default=True, kw_only=True)

    events: ClassVar[tuple[str, ...]] = ("target_prepare", "draft_forward", "draft_step", "draft_replay")

    def admit(self, fsm: Orchestrator, event: str, batch: Batch | None) -> None:
        """Refuse `event` if a request of `batch` lacks room for it.

        Raises:
            WindowOverflow: with every request that is short, in either domain.
        """
        if batch is None:
            return
        short = tuple(self.shortages(event, batch))
        if short:
            move = PHASE.find(fsm.state, event)
            raise WindowOverflow(fsm.state, event, move.to if move else None, short=short)

    def shortages(self, event: str, batch: Batch) -> Iterator[tuple[int, Domain, int, int]]:
        """(request, domain, tokens needed, tokens that fit) wherever the first exceeds the second."""
        for domain, capacity, ahead in self._asked(event):
            spare = map(sub, map(capacity, batch.request_ids), batch.kv_lens)  # no Python runs for each request
            if min(spare, default=ahead) >= ahead:
                continue
            for request, kv_len in zip(batch.request_ids, batch.kv_lens, strict=True):
                fits = capacity(request)
                if kv_len + ahead > fits:
                    yield request, domain, kv_len + ahead, fits

    def _asked(self, event: str) -> Iterator[tuple[Domain, Capacity, int]]:
        """Which domain is asked for how many places behind the batch's lengths."""
        if event == "target_prepare":
            yield TARGET, self.target, 0
            if self.at_once and self.draft is not None and self.draft_len:
                yield DRAFT, self.draft, self.draft_len
        elif self.draft is not None:
            yield DRAFT, self.draft, 0 if event == "draft_step" else max(self.draft_len - 1, 0)


def crowded(pools: Mapping[Domain, tuple[Geometry, int]], longest: Sequence[int]) -> tuple[Domain, ...]:
    """Admission: the domains whose pool cannot hold all these requests at their longest.

    Args:
        pools: domain → (geometry, pages that requests may have: those of dummy rows are not among them).
        longest: tokens of each request at its longest, window included.
    """
    return tuple(domain for domain, (geometry, pages) in pools.items() if sum(map(geometry.blocks, longest)) > pages)
