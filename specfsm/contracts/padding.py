"""Padding: what rows that are nobody's may touch.

A phase is run with more rows than there are requests, because a graph was captured for so many, or because a rank that
has no request must meet the others in their collectives. Such a row reads and writes whatever its tables say. Where it
is a *padded* row they say the sentinel; where it is a *dummy*, a request that is nobody's, they say its pages. Either
must be no live request's, in the target's cache and in the draft's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specfsm.backends.resource import Buffer
from specfsm.domain import NOBODY, SHARED, Batch, Domain, Geometry, KVManager, OwningKVManager
from specfsm.errors import PaddingViolated, UnknownMetadata
from specfsm.kernels.recipes import PLACES, GatherTable
from specfsm.states.phase import PHASE

if TYPE_CHECKING:
    from specfsm.orchestrator import Orchestrator

__all__ = ["Padding"]

Reached = tuple[int, int | None, int | None, int | str | None]
"""(row, request, page, owner), as in `PaddingViolated.reached`."""


class Padding:
    """Refuses a batch whose padded rows or dummies would reach a page that is not theirs.

    Asked of the domain that the event serves: at ``target_prepare`` of the target, at the draft's events of the draft.
    It needs managers that tell whose each page is (`OwningKVManager`). What a manager said holds until its blocks move,
    so a batch that is padded as the last one costs a comparison, and one that is not padded nothing.

    Args:
        reserved: further requests that are nobody's: one that holds the page which a sentinel names, say.

    It lets `KVManager.arrange` put the rows in the batch's order, as the refresh behind it does.
    """

    events: ClassVar[tuple[str, ...]] = ("target_prepare", "draft_forward", "draft_step", "draft_replay")

    def __init__(self, reserved: Iterable[int] = ()) -> None:
        self.reserved = frozenset(reserved)
        self._judged: list[Any] = [None for _ in Domain]
        self._fits: list[dict[int, int]] = [{} for _ in Domain]

    def admit(self, fsm: Orchestrator, event: str, batch: Batch | None) -> None:
        """Refuse `event` if a row of `batch` that is nobody's reaches a page that is not its own.

        Raises:
            PaddingViolated: with every such row and page.
            UnknownMetadata: the domain's manager does not tell whose its pages are.
        """
        if batch is None or not (batch.dummies or batch.padded > len(batch)):
            return
        binding = fsm.bindings[Domain.TARGET if event == "target_prepare" else Domain.DRAFT]
        domain, manager = binding.domain, binding.manager
        judged = (manager.generation, manager.blocks_version, batch.request_ids, batch.dummies, batch.rows)
        reached: list[Reached] = []
        if self._judged[domain] != judged:
            self._judged[domain] = None
            reached += self._reached(fsm, domain, manager, batch)
        if not reached:
            self._judged[domain] = judged
            reached += self._short(domain, batch)
        if reached:
            move = PHASE.find(fsm.state, event)
            to, each = move.to if move else None, tuple(dict.fromkeys(reached))
            raise PaddingViolated(fsm.state, event, to, domain=domain, reached=each)

    def _reached(self, fsm: Orchestrator, domain: Domain, manager: KVManager, batch: Batch) -> Iterator[Reached]:
        """What the rows resolve to that is not theirs; notes on the way how many tokens fit the pages of each dummy."""
        tables = [each for each in fsm.backend.resources if isinstance(each, Buffer) and domain in each.domains]
        owners = _owners(domain, manager, tables)
        pages = _pages(manager, batch)
        page_size = manager.geometry.tokens_per_block
        self._fits[domain] = {row: page_size * len(held) for row, held in pages.items()}
        mine = self.reserved | batch.dummies
        reached = [(row, page) for row, held in pages.items() for page in held]
        for own in owners.values():
            holders = torch.as_tensor(own)[[page for _, page in reached]].tolist()
            for (row, page), holder in zip(reached, holders, strict=True):
                if holder not in mine:
                    yield row, batch.request_ids[row], page, _somebody(holder)
        if batch.rows > len(batch):
            for page, owner in _sentinels(tables, owners, manager.geometry):
                if owner != NOBODY and owner not in mine:
                    for row in range(len(batch), batch.rows):
                        yield row, None, page, _somebody(owner)

    def _short(self, domain: Domain, batch: Batch) -> Iterator[Reached]:
        """The dummies that have no page for a token of theirs: behind its pages a row holds the sentinel."""
        for row, fits in self._fits[domain].items():
            if batch.kv_lens[row] > fits:
                yield row, batch.request_ids[row], None, None


def _owners(domain: Domain, manager: KVManager, tables: Iterable[Buffer]) -> dict[str, Any]:
    """Whose each slot is, of every pool that a table of the manager's own rows points into and that it tells of."""
    if not isinstance(manager, OwningKVManager):
        raise UnknownMetadata(
            f"the {domain} manager {type(manager).__qualname__} cannot be asked about padding",
            ("it does not tell whose its pages are: it lacks page_owners",),
            "give it what specfsm.OwningKVManager names, or leave the contract Padding out",
        )
    pools = {each.space.pool for each in tables if isinstance(each.recipe, GatherTable) and each.space is not None}
    owners = {pool: manager.page_owners(pool) for pool in sorted(pools)}
    return {pool: own for pool, own in owners.items() if own is not None}


def _pages(manager: KVManager, batch: Batch) -> dict[int, list[int]]:
    """Row of each dummy → the pages that the manager's table has for it, in token order."""
    if not batch.dummies:
        return {}
    rows, table, scale = manager.arrange(batch.request_ids), manager.host_block_offsets, manager.geometry.index_scale
    mine = batch.dummy_rows
    entries = table[0, [rows[row] for row in mine], 0].tolist()
    return {row: [entry // scale for entry in held if entry >= 0] for row, held in zip(mine, entries, strict=True)}


def _sentinels(tables: Iterable[Buffer], owners: Mapping[str, Any], geometry: Geometry) -> Iterator[tuple[int, int]]:
    """(page, owner) of every sentinel that is a place."""
    for table in tables:
        space = table.space
        if space is not None and space.unit in PLACES and space.pool in owners and table.sentinel >= 0:
            page = table.sentinel // geometry.scale(space.unit)
            yield page, int(owners[space.pool][page])


def _somebody(owner: int) -> int | str | None:
    return {NOBODY: None, SHARED: "several"}.get(owner, owner)
