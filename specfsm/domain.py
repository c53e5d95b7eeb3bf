"""What a phase switch is about: the two cache domains, their geometry, the batch, and the inputs that move.

Nothing here imports torch, so that the tables in `specfsm.states` and everything that checks them stay
importable (and fast to import) anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, IntEnum, unique
from operator import le
from typing import Any, Protocol, runtime_checkable

from attrs import evolve, field, frozen
from attrs.validators import ge, gt

__all__ = [
    "INPUTS",
    "NOBODY",
    "SHARED",
    "AddressSpace",
    "Batch",
    "Domain",
    "Geometry",
    "KVManager",
    "OwningKVManager",
    "RowOrder",
    "SlidingKVManager",
    "TrackingKVManager",
    "UnifiedCache",
    "Unit",
]


@unique
class Domain(IntEnum):
    """A KV cache that the attention metadata can serve. The value indexes every per-domain list."""

    TARGET = 0
    DRAFT = 1

    def __str__(self) -> str:
        return self.name.lower()

    @property
    def other(self) -> Domain:
        return Domain(1 - self)


INPUTS: dict[str, str] = {
    "manager": "identity and generation of the domain's KV manager",
    "blocks": "the manager's block assignment: allocate, free, offload, swap",
    "batch": "request ids, their order, contexts before generations, padding",
    "lengths": "KV lengths, which follow accepted and rejected counts",
    "layout": "tokens of each request in the phase",
}
"""The inputs every domain has, with what moves each. A backend may declare more of its own."""


@unique
class Unit(Enum):
    """What one entry of a table counts."""

    BLOCK = "block"  # a manager's block id: a name, not a place; survives offload
    ENTRY = "entry"  # the manager's own encoding: slot x index_scale + field, bit 31 for the secondary pool
    SLOT = "slot"  # a place in the primary pool
    PAGE = "page"  # a flat place: slot x num_layers x kv_factor + field
    TOKEN = "token"  # a token's place
    BYTE = "byte"  # an offset in bytes from the pool's base
    ROW = "row"  # a row of the manager's own table
    REQUEST = "request"  # a row of the batch


@frozen
class AddressSpace:
    """Where an index points: which pool of the domain, counted in which unit.

    The domain is not part of it: a resource declares its address space once and has a value in each domain.
    """

    pool: str
    unit: Unit

    def __str__(self) -> str:
        return f"{self.pool}/{self.unit.value}"


@unique
class RowOrder(Enum):
    """How the rows of a manager's table are ordered."""

    BATCH = "batch"  # row i of the table is row i of the batch
    SLOT = "slot"  # rows are stable; the batch finds its own through a row index


@frozen(kw_only=True)
class Geometry:
    """The shape of one domain's cache. Never a constant of a backend: target and draft differ in every one of these.

    Args:
        tokens_per_block: page size, in tokens.
        blocks_in_primary_pool: slots of the device pool; a decoded entry lies in ``[0, blocks_in_primary_pool)``.
        max_blocks_per_seq: width of the block table, in blocks a sequence.
        num_layers: layers that have a page in each block.
        kv_factor: 2 where keys and values are two planes, 1 where one row holds both (latent attention).
        num_kv_heads: KV heads of one page.
        head_dim: elements of one head of one token.
        index_scale: what the manager's own entries are multiplied by: an entry is ``slot x index_scale + field``.
        row_order: whether the manager's rows follow the batch.
        num_pools: pools of the manager.
        sliding_types: sliding-window tables of each layer, where the manager has any.
        dtype: name of the pool's element type, as torch spells it.
    """

    tokens_per_block: int = field(validator=gt(0))
    blocks_in_primary_pool: int = field(validator=gt(0))
    max_blocks_per_seq: int = field(validator=gt(0))
    num_layers: int = field(validator=gt(0))
    kv_factor: int = field(default=2, validator=gt(0))
    num_kv_heads: int = field(default=1, validator=gt(0))
    head_dim: int = field(default=1, validator=gt(0))
    index_scale: int = field(default=1, validator=gt(0))
    row_order: RowOrder = RowOrder.BATCH
    num_pools: int = field(default=1, validator=gt(0))
    sliding_types: int = field(default=1, validator=gt(0))
    dtype: str = "float32"

    @property
    def pages_per_slot(self) -> int:
        """Flat pages of one slot: a plane of a layer each."""
        return self.num_layers * self.kv_factor

    @property
    def max_tokens_per_seq(self) -> int:
        return self.max_blocks_per_seq * self.tokens_per_block

    def scale(self, unit: Unit) -> int:
        """How many of `unit` one slot spans: what a decoded slot is multiplied by to be counted in `unit`."""
        return {Unit.SLOT: 1, Unit.PAGE: self.pages_per_slot, Unit.TOKEN: self.tokens_per_block}[unit]

    def blocks(self, tokens: int) -> int:
        """Blocks that `tokens` tokens occupy."""
        return -(-tokens // self.tokens_per_block)


@runtime_checkable
class KVManager(Protocol):
    """What a domain asks of its KV manager. TensorRT-LLM's V1 (batch-ordered) and V2 (slot-ordered) both fit.

    Attributes:
        geometry: shape of the cache.
        generation: moves when storage is reallocated, so that every address changes. Feeds the input ``manager``.
        blocks_version: moves with every allocate, free, offload, load-back and swap. Feeds the input ``blocks``.
        host_block_offsets: int32 [pools, rows, planes, blocks], host; entry = slot x index_scale + field, -1 where
            nothing is assigned, bit 31 set where the block lies in the secondary (host) pool.
        pool_pointers: base address of each pool, in bytes.
    """

    @property
    def geometry(self) -> Geometry: ...
    @property
    def generation(self) -> int: ...
    @property
    def blocks_version(self) -> int: ...
    @property
    def host_block_offsets(self) -> Any: ...
    @property
    def pool_pointers(self) -> Sequence[int]: ...

    def arrange(self, request_ids: Sequence[int]) -> Sequence[int]:
        """The row of `host_block_offsets` that holds each request, in batch order.

        A batch-ordered manager rewrites its table to this order and answers 0, 1, 2, …; a slot-ordered one only
        looks its rows up.
        """
        ...


NOBODY = -(2**63)
"""In a table of request ids: no request."""

SHARED = NOBODY + 1
"""Likewise: several requests, each of which may read what lies there."""


@runtime_checkable
class OwningKVManager(KVManager, Protocol):
    """A manager that tells whose each page is, so that what a row resolves to can be judged."""

    def page_owners(self, pool: str) -> Any:
        """The request that holds each slot of a primary pool: int64 [blocks_in_primary_pool] on the host, `NOBODY`
        where none does, `SHARED` where several do. None: it does not tell for this pool.

        Args:
            pool: as the backend's address spaces name it.
        """
        ...


@runtime_checkable
class TrackingKVManager(KVManager, Protocol):
    """What a manager may say beside that, so that only the rows that changed are staged."""

    def changed_rows(self, since: int | None) -> tuple[int, Any]:
        """(version of the table now, rows of `host_block_offsets` that were written since it had the version `since`).

        The rows are an int64 tensor on the host, in any order; None where they are not known, and always for None.
        Every write counts, those of `arrange` too. It is asked after `arrange`.
        """
        ...


@runtime_checkable
class SlidingKVManager(KVManager, Protocol):
    """What a backend with a sliding window asks beside that. L layers, Y types of sliding table.

    Attributes:
        sliding_pools: [L, Y], pool of each layer and type; -1 where there is none.
        sliding_scales: [L, Y], pages of that pool from one base page to the next.
        sliding_offsets: [L], the layer's page within them.
        sparse_pointers: compress ratio → base address of its pool; ratio 1 is the window's own.
        window_pointers: layer → address of its first page in the window's pool.
        compressed_pointers: layer → address of its compressed entries; empty where nothing is compressed.
    """

    @property
    def sliding_pools(self) -> Sequence[Sequence[int]]: ...
    @property
    def sliding_scales(self) -> Sequence[Sequence[int]]: ...
    @property
    def sliding_offsets(self) -> Sequence[int]: ...
    @property
    def sparse_pointers(self) -> dict[int, int]: ...
    @property
    def window_pointers(self) -> dict[int, int]: ...
    @property
    def compressed_pointers(self) -> dict[int, int]: ...

    def compute_sliding_base(self, request_ids: Sequence[int]) -> Any:
        """Base page ids of the sliding tables, int32 [pools, rows, planes, blocks] on the host, -1 where there is none.

        Computed anew from the manager's own blocks, in a buffer that the manager keeps; whoever copies it does so after
        this, and before the next call.
        """
        ...


@frozen
class UnifiedCache:
    """Says that the draft keeps its KV in the *target's* cache, and why. Declared, never inferred."""

    reason: str = field()

    @reason.validator
    def _has_reason(self, _: object, reason: str) -> None:
        if not reason.strip():
            raise ValueError("UnifiedCache needs the reason why the draft shares the target's cache, for explain()")


def _ints(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _differ(now: tuple[int, ...], before: tuple[int, ...]) -> bool:
    """Identity first: what an engine keeps from step to step need not be compared entry by entry."""
    return now is not before and now != before


def _set(values: Iterable[int]) -> frozenset[int]:
    return frozenset(values)


@frozen
class Batch:
    """The requests of one phase, contexts (prefill) first, then generations.

    Args:
        request_ids: id of each request, in row order.
        kv_lens: tokens of each request in the domain's cache once this phase has written its own.
        tokens: tokens of each request in this phase; ``kv_lens - tokens`` were there before.
        num_contexts: rows that prefill; the rest generate.
        padded: rows that the phase is run with, where that is more than there are requests: a captured size, say. Rows
            behind the last request are nobody's: every resource holds its sentinel there. 0: no row is added.
        dummies: those of the requests that are nobody's. Each resolves in the domain's cache as any request does, to
            pages of its own, so that what its row writes reaches no other's.

    Attributes:
        packed: what was made of it before, by whoever packs it for a device: the same batch often serves both domains.
    """

    request_ids: tuple[int, ...] = field(converter=_ints)
    kv_lens: tuple[int, ...] = field(converter=_ints)
    tokens: tuple[int, ...] = field(converter=_ints)
    num_contexts: int = field(default=0, validator=ge(0))
    padded: int = 0
    dummies: frozenset[int] = field(default=frozenset(), converter=_set)
    packed: dict[Any, Any] = field(factory=dict, init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        rows = len(self.request_ids)
        if not rows == len(self.kv_lens) == len(self.tokens):
            sizes = {"request_ids": rows, "kv_lens": len(self.kv_lens), "tokens": len(self.tokens)}
            raise ValueError(f"a batch has one entry a request in each field, got {sizes}")
        if self.num_contexts > rows:
            raise ValueError(f"{self.num_contexts} contexts in a batch of {rows} requests")
        if len(set(self.request_ids)) < rows:
            raise ValueError(f"a request stands twice in the batch: {self.request_ids}")
        if min(self.tokens, default=1) < 1 or not all(map(le, self.tokens, self.kv_lens)):
            self._name_impossible()
        if self.padded or self.dummies:
            self._check_padding()

    def _name_impossible(self) -> None:
        for request, kv_len, tokens in zip(self.request_ids, self.kv_lens, self.tokens, strict=True):
            if not 0 < tokens <= kv_len:
                raise ValueError(f"request {request} has {tokens} tokens in this phase, but a KV length of {kv_len}")

    def _check_padding(self) -> None:
        if self.padded and self.padded < len(self.request_ids):
            raise ValueError(f"a batch of {len(self.request_ids)} requests cannot be run with {self.padded} rows")
        strangers = sorted(self.dummies.difference(self.request_ids))
        if strangers:
            raise ValueError(f"the dummies {strangers} are no requests of the batch: {self.request_ids}")

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def rows(self) -> int:
        """Rows that the phase is run with: the requests', dummies included, and the padded ones behind them."""
        return self.padded or len(self.request_ids)

    @property
    def live_rows(self) -> tuple[int, ...]:
        """The rows whose results count: those of requests that are no dummies."""
        if not self.dummies:
            return tuple(range(len(self.request_ids)))
        return tuple(row for row, request in enumerate(self.request_ids) if request not in self.dummies)

    @property
    def dummy_rows(self) -> tuple[int, ...]:
        """The rows of the dummies; padded rows, which no request has, are not among them."""
        return tuple(row for row, request in enumerate(self.request_ids) if request in self.dummies)

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens)

    def moved(self, previous: Batch | None) -> tuple[str, ...]:
        """The inputs in which this batch differs from the one before it."""
        if previous is self:
            return ()
        if previous is None:
            return ("batch", "lengths", "layout")
        moved = []
        if (
            _differ(self.request_ids, previous.request_ids)
            or self.num_contexts != previous.num_contexts
            or (self.padded != previous.padded and self.rows != previous.rows)
            or self.dummies != previous.dummies
        ):
            moved.append("batch")
        if _differ(self.kv_lens, previous.kv_lens):
            moved.append("lengths")
        if _differ(self.tokens, previous.tokens):
            moved.append("layout")
        return tuple(moved)

    def next_step(self) -> Batch:
        """The batch of the next draft step: one more token each; generations first, then the former contexts.

        The order is TensorRT-LLM's: after the first draft step of a batch with context rows every row generates, and
        its tables become the concatenation (generation rows, context rows). Dummies stay dummies wherever their rows
        go, and padded rows stay behind all of them.
        """
        cut = self.num_contexts
        order = (*range(cut, len(self)), *range(cut))
        return evolve(
            self,
            request_ids=tuple(self.request_ids[row] for row in order),
            kv_lens=tuple(self.kv_lens[row] + 1 for row in order),
            tokens=(1,) * len(self),
            num_contexts=0,
        )
