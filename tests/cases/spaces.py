"""R6: an index carries its pool, its unit and its domain; it is not used as another without translation."""

from __future__ import annotations

from typing import Any

import torch

from specfsm import AddressSpace, Backend, IncompleteBackend, Staged, Table, Unit
from specfsm.kernels.recipes import GatherTable
from tests.cases.case import Case
from tests.cases.engine import Engine, keep


def fill(view: Any, host: torch.Tensor) -> torch.Tensor:
    """What the manager says, in its own encoding."""
    view.rows()
    return host.copy_(view.manager.host_block_offsets)


def fill_rows(view: Any, host: torch.Tensor) -> torch.Tensor:
    host.fill_(-1)
    host[: len(view.batch)] = torch.tensor(list(view.rows()))
    return host


WRONG_UNIT = (
    "block_table reads block_ids counted in entry, but it holds kv/block: translate it first, or correct its space"
)


class BlockIdsAsSlots(Case):
    """A block id is a name. It is the place of its block too, until a block goes to the host and another takes its
    slot; from then on a table of raw ids reads other requests' pages."""

    rule, name, refused = "R6", "TensorRT-LLM #13124", IncompleteBackend
    facts = {
        "backend": "mla",
        "offenders": (WRONG_UNIT,),
    }
    words = ("block_table reads block_ids counted in entry, but it holds kv/block",)

    def declare(self, unit: Unit) -> Backend:
        where = ("manager", "blocks", "batch")
        ids = Staged(
            "block_ids",
            reads=where,
            attribute=None,
            dtype="int32",
            shape=("P", "R", "Q", "B"),
            space=AddressSpace("kv", unit),
            fill=fill,
        )
        rows = Staged(
            "rows",
            reads=where,
            attribute=None,
            dtype="int32",
            shape=("S",),
            space=AddressSpace("kv", Unit.ROW),
            fill=fill_rows,
        )
        table = Table(
            "block_table",
            reads=("block_ids", "rows"),
            dtype="int32",
            shape=("S", "B"),
            space=AddressSpace("kv", Unit.SLOT),
            recipe=GatherTable(base="block_ids", rows="rows", unit=Unit.SLOT),
        )
        return Backend("mla", (ids, rows, table))

    def faulty(self) -> None:
        with self.refusing():
            self.declare(Unit.BLOCK)

    def corrected(self) -> None:
        engine = Engine(self.declare(Unit.ENTRY))
        engine.fsm.target_prepare(engine.batch())
        assert engine.metadata.block_table[0, :2].tolist() == engine.target.slots[7]


class OneFieldForTwoThings(Case):
    """One field of the metadata is a flat list of KV indices for one kernel and a two-dimensional block table for
    another. Which of them it holds depends on who wrote last."""

    rule, name, refused = "R6", "SGLang #28028", IncompleteBackend
    facts = {
        "offenders": (
            "the attribute page_table carries 2 resources (kv_indices, block_table): give each its own",
            "the attribute draft_page_table carries 2 resources (kv_indices, block_table): give each its own",
        )
    }
    words = ("the attribute page_table carries 2 resources (kv_indices, block_table)",)

    def declare(self, of_indices: str, of_table: str) -> Backend:
        return Backend(
            "paged",
            (
                Table("kv_indices", reads=("blocks",), attribute=of_indices, dtype="int32", shape=("T",), refresh=keep),
                Table(
                    "block_table", reads=("blocks",), attribute=of_table, dtype="int32", shape=("S", "B"), refresh=keep
                ),
            ),
        )

    def faulty(self) -> None:
        with self.refusing():
            self.declare("page_table", "page_table")

    def corrected(self) -> None:
        engine = Engine(self.declare("kv_indices", "page_table"))
        engine.fsm.target_prepare(engine.batch())
