"""What the draft's cache holds: its own validity, apart from the target's.

Both caches give a request pages, but only a draft forward fills the draft's. Whatever brings pages without one (a
prefix hit, a load-back, a transfer) leaves rows that are valid for the target and garbage for the draft, and nothing
fails: the draft only guesses badly. So the draft's valid length of each request is a fact of its own, reported like any
write.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from attrs import define, field

from specfsm.domain import Batch
from specfsm.errors import DraftContentInvalid
from specfsm.states.phase import PHASE, Phase

if TYPE_CHECKING:
    from specfsm.orchestrator import Orchestrator

__all__ = ["DraftContent"]

DRAFT_PHASES = (Phase.DRAFT_FORWARD, Phase.DRAFT_REPLAY)
Hook = Callable[[], None]


@define
class _Rows:
    """One request.

    Args:
        valid: rows that are made from its own tokens, wherever they lie.
        here: rows whose pages lie in the pool; None where all do.
        hooks: what waits until the draft's rows reach a length.
    """

    valid: int
    here: int | None = None
    hooks: list[tuple[int, Hook]] = field(factory=list)

    @property
    def readable(self) -> int:
        return self.valid if self.here is None else min(self.valid, self.here)


class DraftContent:
    """Refuses a draft phase that starts behind what the draft's cache holds of a request.

    A batch of the draft starts at ``kv_lens - tokens``: so much is read and not written. Within the phase each step
    reads what the phase wrote, so only its beginning is judged.
    """

    events: ClassVar[tuple[str, ...]] = ("draft_forward", "draft_replay")

    def __init__(self) -> None:
        self._rows: dict[int, _Rows] = {}
        self._fsm: weakref.ref[Orchestrator] | None = None

    def admit(self, fsm: Orchestrator, event: str, batch: Batch | None) -> None:
        """Refuse a batch that reads rows which the draft never wrote.

        Raises:
            DraftContentInvalid: with every such request.
        """
        self._fsm = weakref.ref(fsm)
        if batch is None or fsm.state in DRAFT_PHASES:
            return
        short = tuple(
            (request, self.rows(request), kv_len - tokens)
            for request, kv_len, tokens in zip(batch.request_ids, batch.kv_lens, batch.tokens, strict=True)
            if kv_len - tokens > self.rows(request)
        )
        if short:
            move = PHASE.find(fsm.state, event)
            raise DraftContentInvalid(fsm.state, event, move.to if move else None, short=short)

    def rows(self, request: int) -> int:
        """Rows of the request that the draft can read: valid, and in the pool. 0 for one that never began."""
        held = self._rows.get(request)
        return 0 if held is None else held.readable

    # What the engine reports.

    def begin(self, request: int, rows: int = 0) -> None:
        """A request is taken in.

        Args:
            rows: how many the *draft's* cache has of it from a prefix hit or a transfer. What only the target has is
                not among them.

        Raises:
            ValueError: it is known already.
        """
        if request in self._rows:
            raise ValueError(f"the draft's rows of request {request} are known already: forget it first")
        self._rows[request] = _Rows(_length(request, rows))

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
            here = self._known(request).here
            if _length(request, length) > (length if here is None else here):
                raise ValueError(f"request {request} has pages outside the pool: load_back first")
        for request, length in lengths.items():
            self._known(request).valid = length
        for request in lengths:
            self._run_hooks(self._known(request))

    def cut(self, request: int, length: int) -> None:
        """Rows from `length` on are not the request's any more: rolled back, overwritten, or lost."""
        held = self._known(request)
        held.valid = min(held.valid, _length(request, length))

    def offload(self, request: int, length: int, *, saved: bool) -> None:
        """Rows from `length` on left the pool.

        Args:
            saved: whether the draft's rows went with the target's. If not, they are lost.
        """
        held = self._known(request)
        if saved:
            held.here = _length(request, length) if held.here is None else min(held.here, length)
        else:
            self.cut(request, length)

    def load_back(self, request: int) -> None:
        """Every page of it is in the pool again: rows that were saved are readable, the others are lost."""
        self._known(request).here = None

    def forget(self, request_ids: Iterable[int]) -> None:
        """These requests left. Hooks that still wait for them are dropped: `rows` says how much could be saved."""
        for request in request_ids:
            self._rows.pop(request, None)

    # After the draft phase.

    def finalise(self, request: int, length: int, hook: Hook) -> None:
        """Run `hook` (save, transfer, publish a prefix) once the draft's cache holds `length` rows too, and no sooner
        than the draft phase is left. At once, if that is now.
        """
        held = self._known(request)
        held.hooks.append((_length(request, length), hook))
        if not self._drafting:
            self._run_hooks(held)

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

    def _run_hooks(self, held: _Rows) -> None:
        due = [hook for length, hook in held.hooks if length <= held.readable]
        held.hooks = [each for each in held.hooks if each[0] > held.readable]
        for hook in due:
            hook()

    def _known(self, request: int) -> _Rows:
        try:
            return self._rows[request]
        except KeyError:
            raise KeyError(f"nothing is known of the draft's rows of request {request}: begin it first") from None


def _length(request: int, length: int) -> int:
    if length < 0:
        raise ValueError(f"request {request} cannot have {length} rows")
    return length
