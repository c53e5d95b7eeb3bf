"""What becomes of requests between two steps: they come and go, and their pages move.

Whatever happens here leaves three facts right, and nothing else has to be told: which rows of the target's cache are
made from a request's tokens (`Request.target_rows`), which of the draft's (`DraftContent`), and who lives (`Lifetime`).
The next step begins where either cache ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from attrs import evolve

from specfsm.contracts.content import DraftContent
from specfsm.contracts.lifetime import Lifetime
from specfsm.contracts.window import crowded
from specfsm.decode.cache import PagedKVCache, PoolExhausted
from specfsm.decode.model import Draft
from specfsm.decode.request import Emission, Request, Settings
from specfsm.domain import Domain, Geometry, UnifiedCache

__all__ = ["Lifecycle"]


class Lifecycle:
    """The requests of a loop. `DecodeLoop` adds the caches, the models and the steps.

    Attributes:
        waiting: not taken in yet.
        running: rows of the next batch.
        parked: offloaded.
        leaving: retired; their pages are given back when nothing in flight may write to them.
    """

    settings: Settings
    draft: Draft | None
    unified: UnifiedCache | None
    cache: PagedKVCache
    draft_cache: PagedKVCache | None

    def __init__(self) -> None:
        self.lifetime, self.content = Lifetime(), DraftContent()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.parked: list[Request] = []
        self.leaving: list[Request] = []
        self._unreported: list[Emission] = []
        self._ids = count(1)

    @property
    def caches(self) -> tuple[PagedKVCache, ...]:
        return (self.cache,) if self.draft_cache is None else (self.cache, self.draft_cache)

    @property
    def shift(self) -> int:
        """How many tokens ahead of its row the draft reads: 1 for one that reads the target's states too."""
        return 0 if self.draft is None else self.draft.shift

    def _drain(self) -> list[Emission]:
        """Wait for the step in flight and take what it wrote."""
        raise NotImplementedError

    def _dummy_blocks(self, page: int) -> int:
        """Pages that the dummies hold, in each cache."""
        return self.settings.dummies * -(-2 * self.settings.window // page)

    def submit(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        """Queue a request.

        Raises:
            ValueError: the prompt is empty, or the request could never fit a cache.
        """
        if not prompt:
            raise ValueError("the prompt is empty: there is nothing to continue")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        request = Request(next(self._ids), list(prompt), len(prompt), max_new_tokens)
        for domain, (geometry, pages) in self._pools().items():
            limit = min(geometry.max_blocks_per_seq, pages) * geometry.tokens_per_block - self.settings.window
            if len(prompt) + max_new_tokens > limit:
                raise ValueError(
                    f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones do not fit the {domain}'s cache, "
                    f"which holds {limit} tokens of a request beside the draft window"
                )
        self.waiting.append(request)
        return request.id

    def abort(self, request: int) -> None:
        """End a request between steps and give its pages back."""
        for each in self.waiting:
            if each.id == request:
                self.waiting.remove(each)
                return
        self._retire(self._find(request, self.running, self.parked))

    def preempt(self, request: int) -> None:
        """Give a running request's pages back and queue it again, first in line: it is prefilled anew from what it has
        written so far. What a step in flight computes for it is dropped."""
        preempted = self._find(request, self.running, self.parked)
        self._retire(preempted)
        self.waiting.insert(0, evolve(preempted, target_rows=0, drafted=[], states=None, probs=None))

    def roll_back(self, request: int, tokens: int) -> None:
        """Take back the last tokens that a running request wrote: the engine does not want them (a stop string, a
        grammar). Rows that were made from them are not its own any more, in either cache.

        Raises:
            KeyError: it does not run (any more, once the step in flight has been read).
            ValueError: it has not written so many.
        """
        self._unreported += self._drain()
        each = self._find(request, self.running)
        if not 0 <= tokens <= len(each.tokens) - each.prompt_len:
            written = len(each.tokens) - each.prompt_len
            raise ValueError(f"request {request} has written {written} tokens, of which {tokens} cannot be taken back")
        del each.tokens[len(each.tokens) - tokens :]
        each.restart(min(each.target_rows, len(each.tokens) - 1))
        if self.draft is not None:
            self.content.cut(request, len(each.tokens) - self.shift)

    def offload(self, request: int, draft: bool = True) -> None:
        """Take a running request out of the batch, its pages to the host pools, until `load_back`.

        Args:
            draft: whether the draft's pages go there too; if not, what they hold is lost.

        Raises:
            KeyError: it does not run (any more, once the step in flight has been read).
            PoolExhausted: a host pool is too small, or as many requests as a batch has rows are offloaded already;
                nothing was moved.
        """
        self._unreported += self._drain()
        parked = self._find(request, self.running)
        if len(self.parked) == self.settings.max_requests:
            raise PoolExhausted(f"{len(self.parked)} requests are offloaded, and there are rows for no more")
        saving = [cache for cache in self.caches if draft or cache is self.cache]
        for cache in saving:
            if len(cache.block_ids(request)) > cache.free_host_blocks:
                raise PoolExhausted(f"the host pool has no room for {len(cache.block_ids(request))} more pages")
        for cache in self.caches:
            if cache in saving:
                for index in range(len(cache.block_ids(request))):
                    cache.offload(request, index)
            else:
                cache.discard(request)
        if self.draft is not None:
            self.content.offload(request, 0, saved=draft)
        self.running.remove(parked)
        self.parked.append(parked)

    def load_back(self, request: int) -> None:
        """Let an offloaded request run again.

        Raises:
            KeyError: it is not offloaded.
            PoolExhausted: a pool, or the batch, has no room for it beside the running ones; nothing was moved.
        """
        parked = self._find(request, self.parked)
        if not self._fits(parked):
            raise PoolExhausted(f"request {request} does not fit beside the running ones")
        for cache in self.caches:
            cache.load_back(request)
        if self.draft is not None:
            self.content.load_back(request)
        self.parked.remove(parked)
        self.running.append(parked)

    def _find(self, request: int, *queues: list[Request]) -> Request:
        for queue in queues:
            for each in queue:
                if each.id == request:
                    return each
        raise KeyError(f"no request {request} is waiting or running")

    def _admit(self) -> None:
        """Take waiting requests in while both pools can hold every running one at its longest."""
        while self.waiting and self._fits(self.waiting[0]):
            request = self.waiting.pop(0)
            self.lifetime.begin(request.id)
            for cache in self.caches:
                cache.add(request.id)
            request.target_rows, held = self._prefix(request) if self.settings.prefix_cache else (0, 0)
            self.content.begin(request.id, held)
            self.running.append(request)

    def _prefix(self, request: Request) -> tuple[int, int]:
        """Rows that each cache already has of the request's prompt: it takes their pages over.

        A draft that reads the target's states needs those of every row that it lacks: the target begins no later.
        """
        tokens, held = request.tokens[: request.prompt_len], 0
        if self.draft_cache is not None:
            held = self.draft_cache.adopt(request.id, tokens, len(tokens), ahead=self.shift)
        most = min(len(tokens) - 1, held) if self.shift and self.draft_cache is not None else len(tokens) - 1
        rows = self.cache.adopt(request.id, tokens, most, ahead=self.shift if self.unified else 0)
        return rows, rows if self.unified else held

    def _publish(self, request: Request) -> None:
        """Its prompt stands in the target's cache: others may begin with these pages. The draft's are for others to
        take when the draft has written them too, and no sooner."""
        tokens = request.tokens[: request.prompt_len]
        if self.unified is None:
            self.cache.publish(request.id, tokens)
        if self.draft is not None:
            self.content.finalise(
                request.id,
                len(tokens) - self.shift,
                lambda: self.caches[-1].publish(request.id, tokens, ahead=self.shift),
            )

    def _fits(self, request: Request) -> bool:
        """Whether a row is free, and pages of each pool, beside those who may still write. One that was preempted waits
        until its former pages are free."""
        beside = (*self.running, *self.leaving)
        if len(beside) >= self.settings.max_requests or any(each.id == request.id for each in self.leaving):
            return False
        return not crowded(self._pools(), [self._longest(each) for each in (*beside, request)])

    def _pools(self) -> dict[Domain, tuple[Geometry, int]]:
        """Each cache's geometry, and the pages in it that requests may have: the dummies keep theirs."""
        geometries = {domain: cache.geometry for domain, cache in zip(Domain, self.caches, strict=False)}
        return {
            domain: (geometry, geometry.blocks_in_primary_pool - self._dummy_blocks(geometry.tokens_per_block))
            for domain, geometry in geometries.items()
        }

    def _longest(self, request: Request) -> int:
        """Tokens of a request at its longest, with the window that its last step may write."""
        return request.prompt_len + request.max_new_tokens + self.settings.window

    def _release(self) -> None:
        """Give back the pages of whoever left, once nothing in flight may write to them."""
        for request in self.lifetime.fence():
            for cache in self.caches:
                cache.free(request)
            self.leaving = [each for each in self.leaving if each.id != request]

    def _retire(self, request: Request) -> None:
        """Out of the batch; its pages are given back once no step in flight may write to them."""
        (self.parked if request in self.parked else self.running).remove(request)
        self.lifetime.retire([request.id])
        self.content.forget([request.id])
        self.leaving.append(request)
        self._release()
