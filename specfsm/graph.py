"""A captured graph and its contract: what it baked in at the recording, and what must therefore hold at a replay.

Recording executes nothing, so nothing becomes fresh by it, and a replay runs the addresses that were recorded whatever
the metadata carries by then. So a graph remembers each (resource, domain) that its phases read, with address, shape,
stride and dtype, and the bounds of the batch it was made for.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from attrs import fields, frozen

from specfsm.backends.resource import Buffer, Pointer
from specfsm.domain import Batch, Domain
from specfsm.states.graph import GRAPH
from specfsm.states.graph import Graph as GraphState
from specfsm.states.machine import Compiled
from specfsm.states.resource import bits

if TYPE_CHECKING:
    from specfsm.backends.binding import Binding
    from specfsm.backends.script import Script

__all__ = ["Baked", "Graph"]

READY = GraphState.READY  # looking an enum's member up takes 0.2 µs


@frozen
class Baked:
    """What a recording read of one (resource, domain).

    Args:
        what: for a buffer its address, shape, stride and dtype; for a pointer its value.
    """

    place: int
    domain: Domain
    what: Any

    def differs(self, binding: Binding) -> str:
        """What is different now, or an empty string."""
        value, was = binding.values[self.place], self.what
        if isinstance(was, Layout) and was.holds(value):
            return ""
        now = bake(value)
        if now == was:
            return ""
        name = binding.backend.resources[self.place].name
        line = f"{name} [{self.domain}] was recorded as {_shown(was)}, but is {_shown(now)}"
        return f"{line}: another {', '.join(_other(was, now))}" if isinstance(now, Layout) else line


@frozen
class Layout:
    """One buffer's place in memory."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def holds(self, value: Any) -> bool:
        """Whether `value` lies there. Asked of one buffer after the other, so nothing is made for it."""
        return (
            isinstance(value, torch.Tensor)
            and value.data_ptr() == self.address
            and value.shape == self.shape
            and value.stride() == self.stride
            and value.dtype is self.dtype
        )

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {list(self.shape)} strides {list(self.stride)} at {self.address:#x}"


def _other(was: Any, now: Layout) -> list[str]:
    """In what two places differ: address, shape, stride, dtype."""
    return [each.name for each in fields(Layout) if getattr(was, each.name, None) != getattr(now, each.name)]


def bake(value: Any) -> Any:
    """What a graph keeps of a value."""
    if isinstance(value, torch.Tensor):
        return Layout(value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
    return value


def _shown(what: Any) -> str:
    return str(what) if isinstance(what, Layout) else repr(what)


class Graph:
    """One captured graph, its machine and its contract.

    Args:
        key: what tells it from the engine's other graphs: padded batch size, draft length, ….
        max_len: longest KV length it may be replayed with; by default what the recorded tables hold.

    Attributes:
        state: EMPTY, RECORDING, READY or INVALID.
        reads: for each domain, mask of the resources that its phases read.
        made: of those, what the graph itself writes before it reads them; the rest must be fresh before a replay.
        writes: what a replay leaves stale for everyone else.
        batches: for each domain, the batch that its phases were recorded with.
        baked: the contract, once it is READY.
        paired: whether it was recorded for the same requests in both caches.
        longest: for each domain, the longest KV length that the graph and the tables have room for.
        proven: for each domain that it reads, the binding's epoch when all of `baked` was last found as it was.
        why: why it is INVALID.
    """

    def __init__(self, key: Hashable, *, max_len: int | None = None) -> None:
        self.key = key
        self.max_len = max_len
        self.machine = Compiled(GRAPH, subject=f"graph {key}")
        self._clear()

    def __repr__(self) -> str:
        return f"<Graph {self.key} {self.state.name}>"

    def _clear(self) -> None:
        self.reads, self.made, self.writes = [0, 0], [0, 0], [0, 0]
        self.batches: list[Batch | None] = [None, None]
        self.baked: tuple[Baked, ...] = ()
        self.paired, self.longest = False, [0, 0]
        self.proven: tuple[int, int] | None = None
        self.why = ""

    @property
    def state(self) -> GraphState:
        state: GraphState = self.machine.state
        return state

    # The events of the graph table.

    def record(self) -> None:
        """A capture begins; what was known of an earlier one is gone."""
        self.machine.fire("record")
        self._clear()

    def note(self, binding: Binding, steps: Script, batch: Batch) -> None:
        """A phase is being recorded in this domain."""
        self.wrote(binding.domain, steps.recorded)
        self.reads[binding.domain] |= steps.required
        self.batches[binding.domain] = self.batches[binding.domain] or batch

    def wrote(self, domain: Domain, mask: int) -> None:
        """The capture writes these: before any phase reads them, or to advance what was read."""
        self.made[domain] |= mask & ~self.reads[domain]
        self.writes[domain] |= mask

    def needs(self, domain: Domain) -> int:
        """Mask of what must be fresh before a replay."""
        return self.reads[domain] & ~self.made[domain]

    def seal(self, bindings: tuple[Binding, Binding]) -> None:
        """The capture ended: bake the contract."""
        if self.state is GraphState.RECORDING:
            self.baked = tuple(self._bake(bindings))
            target, draft = self.batches
            self.paired = target is not None and draft is not None and target.request_ids == draft.request_ids
            for binding in bindings:
                width = binding.view.geometry.max_tokens_per_seq
                self.longest[binding.domain] = width if self.max_len is None else min(self.max_len, width)
            self.machine.fire("seal")

    def abandon(self) -> None:
        """The capture failed: nothing of it is kept."""
        self.machine.fire("abandon")
        self._clear()

    def invalidate(self, why: str) -> None:
        """A buffer that it reads is elsewhere now."""
        if self.state is not GraphState.EMPTY:
            self.machine.fire("invalidate")
            self.why = self.why or why

    def release(self) -> None:
        """The engine dropped it."""
        self.machine.fire("release")
        self._clear()

    def _bake(self, bindings: tuple[Binding, Binding]) -> Iterator[Baked]:
        for binding in dict.fromkeys(bindings):
            for place in bits(self.reads[binding.domain]):
                if isinstance(binding.backend.resources[place], Buffer | Pointer):
                    yield Baked(place, binding.domain, bake(binding.values[place]))

    # The contract.

    def holds(self, bindings: tuple[Binding, Binding], batch: Batch) -> bool:
        """Whether integers prove that a replay is within the contract: no buffer was bound and no pointer replaced
        since all of it was last compared, and the batches are within the bounds. Not seen: a tensor that was moved in
        place (``set_``, ``resize_``) and not reported."""
        if self.proven != self._epochs(bindings) or self.machine.state is not READY:
            return False
        for binding, each in self._asked(bindings, batch):
            if not self._within(binding, each):
                return False
        return self._same_requests(bindings, batch)

    def breaches(self, bindings: tuple[Binding, Binding], batch: Batch) -> Iterator[str]:
        """Everything that forbids a replay now, one line each; freshness is not among them."""
        if self.state is not READY:
            yield f"is {self.state.name}, not READY" + (f": {self.why}" if self.why else "")
            return
        elsewhere = [line for baked in self.baked if (line := baked.differs(bindings[baked.domain]))]
        self.proven = None if elsewhere else self._epochs(bindings)
        yield from elsewhere
        for binding, each in self._asked(bindings, batch):
            if not self._within(binding, each):
                yield from self._bounds(binding, each)
        if not self._same_requests(bindings, batch):
            yield (
                "was recorded for the same requests in both caches, but the target's batch has "
                f"{bindings[0].batch and bindings[0].batch.request_ids} and the draft's {batch.request_ids}"
            )

    def _epochs(self, bindings: tuple[Binding, Binding]) -> tuple[int, int]:
        target, draft = bindings
        return target.epoch if self.reads[0] else 0, draft.epoch if self.reads[1] else 0

    def _asked(self, bindings: tuple[Binding, Binding], batch: Batch) -> tuple[tuple[Binding, Batch], ...]:
        """Whose bounds are asked for which batch: the target's too, if its phase is in the graph."""
        target, draft = bindings
        if target is draft or target.batch is None or self.batches[0] is None:
            return ((draft, batch),)
        return (target, target.batch), (draft, batch)

    def _within(self, binding: Binding, batch: Batch) -> bool:
        """Whether `batch` is within the bounds of the domain. Looks at no request by itself."""
        recorded = self.batches[binding.domain]
        if recorded is None:
            return True
        tokens = recorded.tokens
        return (
            recorded.rows == batch.rows
            and recorded.num_contexts == batch.num_contexts
            and (tokens is batch.tokens or tokens[: len(batch)] == batch.tokens)
            and max(batch.kv_lens, default=0) <= self.longest[binding.domain]
        )

    def _bounds(self, binding: Binding, batch: Batch) -> Iterator[str]:
        """What of `batch` is not within the bounds of the domain."""
        recorded = self.batches[binding.domain]
        assert recorded is not None, "without one there are no bounds"
        for what, was, now in (
            ("requests", recorded.rows, batch.rows),
            ("contexts", recorded.num_contexts, batch.num_contexts),
        ):
            if was != now:
                yield f"was recorded for {was} {what}, but the batch has {now}: pad it to the recorded size"
        if recorded.rows == batch.rows and recorded.tokens[: len(batch)] != batch.tokens:
            yield f"was recorded for {recorded.tokens} tokens a request, but the batch has {batch.tokens}"
        width = binding.view.geometry.max_tokens_per_seq
        limit = width if self.max_len is None else self.max_len
        for request, length in zip(batch.request_ids, batch.kv_lens, strict=True):
            if length > limit:
                yield f"was recorded for KV lengths up to {limit}, but request {request} has {length}"
            elif length > width:
                yield f"reads tables {width} tokens wide [{binding.domain}], but request {request} has {length}"

    def _same_requests(self, bindings: tuple[Binding, Binding], batch: Batch) -> bool:
        """A graph of both models passes from one to the other row by row."""
        target = bindings[0].batch
        if not self.paired or target is None or bindings[0] is bindings[1]:
            return True
        return target.request_ids is batch.request_ids or target.request_ids == batch.request_ids
