"""A paged KV cache: pages, block ids, slots, a host pool, and the table that a manager hands to attention.

A *block id* names a page for as long as a request owns it; a *slot* is where the page lies in the primary pool. They
are equal until a page is offloaded: when it comes back it takes whatever slot is free. `host_block_offsets` speaks of
slots only.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import define, field

from specfsm.decode.prefix import Prefixes
from specfsm.domain import NOBODY, SHARED, Geometry, RowOrder

__all__ = ["PagedKVCache", "PoolExhausted", "RowLog"]

SECONDARY = -(2**31)  # bit 31 of an int32: the page lies in the host pool


class PoolExhausted(MemoryError):
    """A cache has no page left for what was asked of it."""


class RowLog:
    """Which rows of a table were written, in order; what `specfsm.TrackingKVManager` answers from.

    Args:
        rows: of the table. Of more than four writes a row the oldest are forgotten.
    """

    def __init__(self, rows: int) -> None:
        self.capacity = 4 * rows
        self.first = 0
        self.written = array("q")

    def write(self, row: int) -> None:
        self.written.append(row)
        if len(self.written) > self.capacity:
            self.write_all()

    def write_all(self) -> None:
        """Every row was written, or may have been."""
        self.first += len(self.written) + 1
        self.written = array("q")

    def since(self, version: int | None) -> tuple[int, torch.Tensor | None]:
        """(version now, rows written since that one: int64, or None where they are not known)."""
        now = self.first + len(self.written)
        if version is None or not self.first <= version <= now:
            return now, None
        rows = self.written[version - self.first :]
        return now, torch.frombuffer(rows, dtype=torch.int64) if rows else torch.empty(0, dtype=torch.int64)


@define
class _Owned:
    """What one request holds.

    Args:
        row: its row of the table, in a slot-ordered cache.
        blocks: its block ids, in token order.
    """

    row: int
    blocks: list[int] = field(factory=list)


class PagedKVCache:
    """One domain's KV cache and its manager (`specfsm.OwningKVManager`).

    Args:
        geometry: page size, pool size, table width, layers, planes, heads, dtype, and how entries are encoded.
        max_requests: rows of the table.
        host_blocks: pages of the secondary pool.
        device: where the primary pool lies.
        extra: further pools, whose pages go wherever the page of keys and values goes: name → bytes of a layer's page.

    Attributes:
        pool: [slots, layers, planes, tokens a block, KV heads, head dim].
        extra: name → uint8 [layers, slots, bytes].
        host_block_offsets: int32 [1, max_requests, planes, blocks], host; see `KVManager`.
        capacity: request → tokens that fit its pages; a look-up, since it is asked of each request at each event.
        may_free: asked before a request's pages are given back, and told whether the request ends with them; refuses by
            raising.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        max_requests: int,
        host_blocks: int = 0,
        device: torch.device | str = "cpu",
        extra: Mapping[str, int] | None = None,
    ) -> None:
        self.geometry = geometry
        self.max_requests = max_requests
        self.generation = 0
        self.blocks_version = 0
        g = geometry
        page = (g.num_layers, g.kv_factor, g.tokens_per_block, g.num_kv_heads, g.head_dim)
        dtype = getattr(torch, g.dtype)
        self.pool = torch.zeros((g.blocks_in_primary_pool, *page), dtype=dtype, device=device)
        self.host_pool = torch.zeros((host_blocks, *page), dtype=dtype)
        self.extra, self._host_extra = (
            {
                name: torch.zeros((g.num_layers, blocks, size), dtype=torch.uint8, device=where)
                for name, size in (extra or {}).items()
            }
            for blocks, where in ((g.blocks_in_primary_pool, device), (host_blocks, "cpu"))
        )
        pinned = torch.device(device).type == "cuda"
        shape = (1, max_requests, g.kv_factor, g.max_blocks_per_seq)
        self.host_block_offsets = torch.full(shape, -1, dtype=torch.int32, pin_memory=pinned)
        # Page 0 goes last, so that a table of zeros, which nobody wrote, does not show the right page by luck.
        self._free_slots = [*range(1, g.blocks_in_primary_pool), 0]
        self._free_host = list(range(host_blocks))
        self._free_ids = [*self._free_slots, *range(g.blocks_in_primary_pool, g.blocks_in_primary_pool + host_blocks)]
        self._free_rows = list(range(max_requests))
        self._slot_of: dict[int, int] = {}
        self._host_of: dict[int, int] = {}
        self._owned: dict[int, _Owned] = {}
        self._room: dict[int, int] = {}
        self.capacity: Callable[[int], int] = self._room.__getitem__
        self._sharers: dict[int, int] = {}  # of each block that several requests hold, how many do beside the first
        self.prefixes = Prefixes()
        self._owners = array("q", [NOBODY]) * g.blocks_in_primary_pool
        self._order: tuple[int, ...] = ()
        self._log = RowLog(max_requests)
        self.may_free: Callable[[int, bool], None] = _anybody

    @property
    def pool_pointers(self) -> Sequence[int]:
        return (self.pool.data_ptr(), *(pool.data_ptr() for pool in self.extra.values()))

    @property
    def free_blocks(self) -> int:
        """Pages of the primary pool that nobody holds."""
        return len(self._free_slots)

    @property
    def free_host_blocks(self) -> int:
        """Pages of the host pool that nobody holds."""
        return len(self._free_host)

    def pages(self) -> torch.Tensor:
        """The pool as flat pages: [slots x layers x planes, tokens a block, KV heads, head dim]."""
        return self.pool.flatten(0, 2)

    def block_ids(self, request: int) -> tuple[int, ...]:
        """The request's raw block ids: names, not places."""
        return tuple(self._owned[request].blocks)

    def page_owners(self, pool: str) -> torch.Tensor:
        """The request that holds each slot, see `specfsm.OwningKVManager`: the same in every pool. A view, kept up to
        date by whatever takes a slot or gives it back."""
        return torch.frombuffer(self._owners, dtype=torch.int64)

    # Assignment. Whatever changes it moves `blocks_version`.

    def add(self, request: int) -> None:
        """Take a request in; it holds no page yet."""
        if request in self._owned:
            raise ValueError(f"request {request} is in the cache already")
        if not self._free_rows:
            raise PoolExhausted(f"all {self.max_requests} rows of the cache are taken")
        self._owned[request], self._room[request] = _Owned(self._free_rows.pop(0)), 0

    def reserve(self, request: int, tokens: int) -> None:
        """Make room for `tokens` tokens of the request in all. Pages are only ever added.

        Raises:
            PoolExhausted: the table is too narrow or the pool too small; nothing was taken.
        """
        owned = self._owned[request]
        wanted = self.geometry.blocks(tokens)
        more = wanted - len(owned.blocks)
        if wanted > self.geometry.max_blocks_per_seq:
            limit = self.geometry.max_tokens_per_seq
            raise PoolExhausted(f"request {request} needs {tokens} tokens, but a sequence holds {limit}")
        if more > self.free_blocks:
            raise PoolExhausted(f"request {request} needs {more} more pages, but {self.free_blocks} are free")
        for _ in range(more):
            owned.blocks.append(self._take(request, self._free_slots[0]))
        if more > 0:
            self._changed(request)

    def _take(self, request: int, slot: int, keeps: bool = False) -> int:
        """A new block of the request's in this free slot; unless it keeps what lies there, no prefix is found there."""
        block: int = self._free_ids.pop(0)
        self._free_slots.remove(slot)
        self._slot_of[block], self._owners[slot] = slot, request
        if not keeps:
            self.prefixes.forget(slot)
        return block

    # Prefixes.

    def publish(self, request: int, tokens: Sequence[int], *, ahead: int = 0) -> None:
        """The request's pages hold the rows of these tokens: others that begin alike may have them.

        Args:
            ahead: how many tokens behind a row its contents depend on, too.
        """
        page = self.geometry.tokens_per_block
        for index in range((len(tokens) - ahead) // page):
            slot = self._slot_of.get(self._owned[request].blocks[index])
            if slot is not None:
                self.prefixes.publish(tokens[: (index + 1) * page + ahead], slot)

    def adopt(self, request: int, tokens: Sequence[int], most: int, *, ahead: int = 0) -> int:
        """Begin a request that holds no page with those that are known to hold its first rows: shared with whoever
        holds them, or taken from the free ones.

        Args:
            most: rows that it may begin with.

        Returns:
            how many rows it has now: whole pages.
        """
        page, owned = self.geometry.tokens_per_block, self._owned[request]
        whole = range(1, min(most, len(tokens) - ahead) // page + 1)
        holders = {slot: block for block, slot in self._slot_of.items()}
        for slot in self.prefixes.find(tokens[: index * page + ahead] for index in whole):
            block = holders.get(slot)
            if block is None:
                block = self._take(request, slot, keeps=True)
            else:
                self._sharers[block] = self._sharers.get(block, 0) + 1
                self._owners[slot] = SHARED
            owned.blocks.append(block)
        if owned.blocks:
            self._changed(request)
        return len(owned.blocks) * page

    def detach(self, request: int, row: int) -> None:
        """Rows from this one on are about to be written: the request gets copies of the pages that it shares there."""
        owned = self._owned[request]
        blocks = owned.blocks if self._sharers else []
        for index in range(row // self.geometry.tokens_per_block, len(blocks)):
            if self._release(blocks[index], owned):
                continue
            slot = self._free_slots[0]
            old, blocks[index] = self._slot_of[blocks[index]], self._take(request, slot)
            self.pool[slot].copy_(self.pool[old])
            for pool in self.extra.values():
                pool[:, slot].copy_(pool[:, old])
            self._changed(request)

    def _release(self, block: int, owned: _Owned) -> bool:
        """Give up one share of a block; whether it was nobody else's."""
        if block not in self._sharers:
            return True
        self._sharers[block] -= 1
        if not self._sharers[block]:
            del self._sharers[block]
            [last] = (request for request, each in self._owned.items() if block in each.blocks and each is not owned)
            self._owners[self._slot_of[block]] = last
        return False

    def free(self, request: int) -> None:
        """Give all pages of the request back, and its row, if `may_free` lets it."""
        self.may_free(request, True)
        owned = self._owned.pop(request)
        del self._room[request]
        self._give_back(owned)
        self._free_rows.append(owned.row)
        if self.geometry.row_order is RowOrder.SLOT:
            self.host_block_offsets[:, owned.row] = -1
            self._log.write(owned.row)
        else:
            self.host_block_offsets.fill_(-1)
            self._log.write_all()
        self._order = ()
        self.blocks_version += 1

    def discard(self, request: int) -> None:
        """Give all pages of the request back, contents and all, if `may_free` lets it. It keeps its row."""
        self.may_free(request, False)
        self._give_back(self._owned[request])
        self._changed(request)

    def _give_back(self, owned: _Owned) -> None:
        for block in owned.blocks:
            if not self._release(block, owned):
                continue
            if block in self._slot_of:
                self._leave(self._slot_of.pop(block))
            else:
                self._free_host.append(self._host_of.pop(block))
            self._free_ids.append(block)
        owned.blocks.clear()

    def _leave(self, slot: int) -> None:
        self._free_slots.append(slot)
        self._owners[slot] = NOBODY

    def offload(self, request: int, index: int) -> None:
        """Move the request's `index`-th page to the host pool: its id stays, its slot is free for others. Of a
        shared page it takes a copy there, under an id of its own."""
        owned = self._owned[request]
        block = owned.blocks[index]
        if block not in self._slot_of:
            raise ValueError(f"page {index} of request {request} is offloaded already")
        if not self._free_host:
            raise PoolExhausted(f"the host pool of {len(self.host_pool)} pages is full")
        slot, place = self._slot_of[block], self._free_host.pop(0)
        if self._release(block, owned):
            self._leave(self._slot_of.pop(block))
        else:
            block = owned.blocks[index] = self._free_ids.pop(0)
        self.host_pool[place].copy_(self.pool[slot])
        for name, pool in self.extra.items():
            self._host_extra[name][:, place].copy_(pool[:, slot])
        self._host_of[block] = place
        self._changed(request)

    def load_back(self, request: int) -> None:
        """Bring every offloaded page of the request back, each into whatever slot is free."""
        gone = [block for block in self._owned[request].blocks if block in self._host_of]
        if len(gone) > self.free_blocks:
            raise PoolExhausted(
                f"request {request} has {len(gone)} offloaded pages, but {self.free_blocks} slots are free"
            )
        for block in gone:
            place, slot = self._host_of.pop(block), self._free_slots.pop(0)
            self.prefixes.forget(slot)
            self.pool[slot].copy_(self.host_pool[place])
            for name, pool in self.extra.items():
                pool[:, slot].copy_(self._host_extra[name][:, place])
            self._slot_of[block], self._owners[slot] = slot, request
            self._free_host.append(place)
        if gone:
            self._changed(request)

    # The table.

    def arrange(self, request_ids: Sequence[int]) -> list[int]:
        """The row of each request. A batch-ordered cache first writes its rows in this order."""
        order = tuple(request_ids)
        if order == self._order:  # of a batch-ordered cache, and nobody in it has left
            return list(range(len(order)))
        if not all(map(self._owned.__contains__, order)):
            unknown = [request for request in order if request not in self._owned]
            raise KeyError(f"requests {unknown} hold nothing in this cache")
        if self.geometry.row_order is RowOrder.SLOT:
            return [self._owned[request].row for request in order]
        self.host_block_offsets.fill_(-1)
        for row, request in enumerate(order):
            self._write_row(row, request)
        self._order = order
        self._log.write_all()
        return list(range(len(order)))

    def changed_rows(self, since: int | None) -> tuple[int, torch.Tensor | None]:
        """The version of the table, and which of its rows were written since it had another one."""
        return self._log.since(since)

    def _changed(self, request: int) -> None:
        self.blocks_version += 1
        self._room[request] = len(self._owned[request].blocks) * self.geometry.tokens_per_block
        if self.geometry.row_order is RowOrder.SLOT:
            self._write_row(self._owned[request].row, request)
        elif request in self._order:
            self._write_row(self._order.index(request), request)

    def _write_row(self, row: int, request: int) -> None:
        self._log.write(row)
        entries = torch.tensor([self._encode(block) for block in self._owned[request].blocks], dtype=torch.int32)
        self.host_block_offsets[:, row] = -1
        for plane in range(self.geometry.kv_factor):
            field_of_plane = plane if self.geometry.row_order is RowOrder.BATCH else 0
            self.host_block_offsets[0, row, plane, : len(entries)] = entries + field_of_plane

    def _encode(self, block: int) -> int:
        if block in self._slot_of:
            return self._slot_of[block] * self.geometry.index_scale
        return SECONDARY + self._host_of[block] * self.geometry.index_scale


def _anybody(request: int, ends: bool) -> None:
    """Nobody was asked to guard the pages."""
