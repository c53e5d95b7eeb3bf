"""What the draft's cache holds: its own validity, apart from the target's.

Both caches give a request pages, but only a draft forward fills the draft's. Whatever brings pages without one (a
prefix hit, a load-back, a transfer) leaves rows that are valid for the target and garbage for the draft, and nothing
fails: the draft only guesses badly. So the draft's valid length of each request is a fact of its own, reported like any
write.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from operator import le, sub
from typing import TYPE_CHECKING, ClassVar

from specfsm.domain import Batch
from specfsm.errors import DraftContentInvalid
from specfsm.states.phase import PHASE, Phase

if TYPE_CHECKING:
    from specfsm.orchestrator import Orchestrator

__all__ = ["DraftContent"]

DRAFT_PHASES = (Phase.DRAFT_FORWARD, Phase.DRAFT_REPLAY)
Hook = Callable[[], None]


class _Valid(dict[int, int]):
    """Request → rows that are made from its own tokens, wherever they lie; 0 for one that never began."""

    def __missing__(self, request: int) -> int:
        return 0


class DraftContent:
    """Refuses a draft phase that starts behind what the draft's cache holds of a request.

    A batch of the draft starts at ``kv_lens - tokens``: so much is read and not written. Within the phase each step
    reads what the phase wrote, so only its beginning is judged.
    """

    events: ClassVar[tuple[str, ...]] = ("draft_forward", "draft_replay")

    def __init__(self) -> None:
        self._valid = _Valid()
        self._here: dict[int, int] = {}  # rows whose pages lie in the pool, of requests with pages outside
        self._hooks: dict[int, list[tuple[int, Hook]]] = {}  # what waits until the draft's rows reach a length
        self._fsm: weakref.ref[Orchestrator] | None = None

    def admit(self, fsm: Orchestrator, event: str, batch: Batch | None) -> None:
        """Refuse a batch that reads rows which the draft never wrote.

        Raises:
            DraftContentInvalid: with every such request.
        """
        self._fsm = weakref.ref(fsm)
        if batch is None or fsm.state in DRAFT_PHASES or self._covers(batch):
            return
        short = tuple(
            (request, self.rows(request), kv_len - tokens)
            for request, kv_len, tokens in zip(batch.request_ids, batch.kv_lens, batch.tokens, strict=True)
            if kv_len - tokens > self.rows(request)
        )
        if short:
            move = PHASE.find(fsm.state, event)
            raise DraftContentInvalid(fsm.state, event, move.to if move else None, short=short)

    def _covers(self, batch: Batch) -> bool:
        """Whether it is plain that each request has the rows that `batch` reads. No Python runs for each."""
        if self._here and not self._here.keys().isdisjoint(batch.request_ids):
            return False
        read = map(sub, batch.kv_lens, batch.tokens)
        return all(map(le, read, map(self._valid.__getitem__, batch.request_ids)))

    def rows(self, request: int) -> int:
        """Rows of the request that the draft can read: valid, and in the pool. 0 for one that never began."""
        valid = self._valid[request]
        return min(valid, self._here.get(request, valid))

    # What the engine reports.

    def begin(self, request: int, rows: int = 0) -> None:
        """A request is taken in.

        Args:
            rows: how many the *draft's* cache has of it from a prefix hit or a transfer. What only the target has is
                not among them.

        Raises:
            ValueError: it is known already.
        """
        if request in self._valid:
            raise ValueError(f"the draft's rows of request {request} are known already: forget it first")
        self._valid[request] = _length(request, rows)

    def wrote(self, lengths: Mapping[int, int]) -> None:
        """The draft ran: each request's rows up to its length are made from tokens that it keeps. Hooks may run.

        Rows behind a length (drafted tokens that may be rejected) are not valid until a later forward has them as known
        tokens. A chunk reports where it ends.

        Raises:
            ValueError: the draft phase is active, or pages of a request are outside the pool. Nothing is taken.
            KeyError: a request never began.
        """
        if self._drafting:
            raise ValueError("the draft phase is active: report what it wrote when it has been left")
        for request, length in lengths.items():
            self._require_known(request)
            if _length(request, length) > self._here.get(request, length):
                raise ValueError(f"request {request} has pages outside the pool: load_back first")
        self._valid.update(lengths)
        for request in filter(self._hooks.__contains__, lengths):
            self._run_hooks(request)

    def cut(self, request: int, length: int) -> None:
        """Rows from `length` on are not the request's any more: rolled back, overwritten, or lost."""
        self._require_known(request)
        self._valid[request] = min(self._valid[request], _length(request, length))

    def offload(self, request: int, length: int, *, saved: bool) -> None:
        """Rows from `length` on left the pool.

        Args:
            saved: whether the draft's rows went with the target's. If not, they are lost.
        """
        self._require_known(request)
        if saved:
            self._here[request] = min(_length(request, length), self._here.get(request, length))
        else:
            self.cut(request, length)

    def load_back(self, request: int) -> None:
        """Every page of it is in the pool again: rows that were saved are readable, the others are lost."""
        self._require_known(request)
        self._here.pop(request, None)

    def forget(self, request_ids: Iterable[int]) -> None:
        """These requests left. Hooks that still wait for them are dropped: `rows` says how much could be saved."""
        for request in request_ids:
            for known in (self._valid, self._here, self._hooks):
                known.pop(request, None)

    # After the draft phase.

    def finalise(self, request: int, length: int, hook: Hook) -> None:
        """Run `hook` (save, transfer, publish a prefix) once the draft's cache holds `length` rows too, and no sooner
        than the draft phase is left. At once, if that is now.
        """
        self._require_known(request)
        self._hooks.setdefault(request, []).append((_length(request, length), hook))
        if not self._drafting:
            self._run_hooks(request)

    def require(self, request: int, length: int) -> None:
        """For an engine that saves by itself: refuse to take more rows out of the draft's cache than it holds.

        Raises:
            DraftContentInvalid: the draft has fewer, or its phase is still active.
        """
        fsm = None if self._fsm is None else self._fsm()
        if self.rows(request) < length or self._drafting:
            state = Phase.IDLE if fsm is None else fsm.state
            raise DraftContentInvalid(state, "finalise", short=((request, self.rows(request), length),))

    @property
    def _drafting(self) -> bool:
        fsm = None if self._fsm is None else self._fsm()
        return fsm is not None and fsm.state in DRAFT_PHASES

    def _run_hooks(self, request: int) -> None:
        waiting, rows = self._hooks.pop(request), self.rows(request)
        left = [each for each in waiting if each[0] > rows]
        if left:
            self._hooks[request] = left
        for length, hook in waiting:
            if length <= rows:
                hook()

    def _require_known(self, request: int) -> None:
        if request not in self._valid:
            raise KeyError(f"nothing is known of the draft's rows of request {request}: begin it first")


def _length(request: int, length: int) -> int:
    if length < 0:
        raise ValueError(f"request {request} cannot have {length} rows")
    return length
