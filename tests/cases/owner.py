"""R1: what is derived from an owner is rebuilt when the owner is exchanged, or the switch fails."""

from __future__ import annotations

from typing import Any

import torch

from specfsm import Backend, FlashMLA, Pointer, RefreshDeclined, StaleResource, Table
from tests.cases.case import Case
from tests.cases.engine import DRAFT, TARGET, Engine, lengths


class BlockTableOfTheOtherCache(Case):
    """The draft phase exchanges the KV manager, and FlashMLA's block-id table stays what it was. The kernel reads pages
    by the other cache's ids: an illegal access, with captured graphs or without."""

    rule, name, refused = "R1", "TensorRT-LLM #15251", StaleResource
    facts = {
        "backend": "flash_mla",
        "resource": "block_ids_per_seq",
        "domain": DRAFT,
        "moved": {"blocks": (1, 2)},
        "event": "draft_forward",
    }
    words = ("flash_mla.block_ids_per_seq [draft] is stale: blocks moved 1 → 2", "drop no refresh of block_ids_per_seq")

    def faulty(self) -> None:
        engine = Engine(FlashMLA(), drop=[("block_ids_per_seq", DRAFT)])
        fsm, batch = engine.fsm, engine.batch()
        fsm.target_prepare(batch)
        engine.write(batch, DRAFT, "base_block_offsets", "generation_row_index", "block_ids_per_seq")
        with fsm.draft_forward(batch):
            pass
        engine.draft.reserve(7, 12)
        fsm.target_prepare(batch)
        with self.refusing(fsm):
            fsm.draft_forward(batch)

    def corrected(self) -> None:
        engine = Engine(FlashMLA())
        for _ in range(2):
            engine.fsm.target_prepare(engine.batch())
            with engine.fsm.draft_forward():
                assert engine.metadata.block_ids_per_seq[0, :2].tolist() == engine.draft.slots[7][:2]
            assert engine.metadata.block_ids_per_seq[0, :2].tolist() == engine.target.slots[7]
            engine.draft.reserve(7, 12)


class DeclinedRefresh(Case):
    """The hook that rebuilds the table returns early where it cannot, and nobody looks at what it returned. The table
    is all zeros, so every request reads block 0: nothing fails and the acceptance rate looks perfect."""

    rule, name, refused = "R1", "TensorRT-LLM #18343", RefreshDeclined
    facts = {"resource": "block_ids", "domain": DRAFT, "never": True}
    words = ("its refresh ran and returned nothing (declined)", "make the refresh return what it wrote")

    def engine(self, knows: tuple[str, ...]) -> Engine:
        def rebuild(view: Any, buffer: torch.Tensor) -> torch.Tensor | None:
            if str(view.domain) not in knows:
                return None
            view.rows()
            return buffer.copy_(view.manager.host_block_offsets[0, :, 0])

        reads = ("manager", "blocks", "batch")
        return Engine(
            Backend("mla", (Table("block_ids", reads=reads, dtype="int32", shape=("S", "B"), refresh=rebuild),))
        )

    def faulty(self) -> None:
        engine = self.engine(knows=("target",))
        engine.fsm.target_prepare(engine.batch())
        with self.refusing(engine.fsm):
            engine.fsm.draft_forward()

    def corrected(self) -> None:
        engine = self.engine(knows=("target", "draft"))
        engine.fsm.target_prepare(engine.batch())
        with engine.fsm.draft_forward():
            assert engine.metadata.block_ids[0, :2].tolist() == engine.draft.slots[7]


class HeadCountOfTheTarget(Case):
    """An engine builds the draft's metadata by itself and takes the number of heads that the builder got from the
    target's configuration. The draft has fewer."""

    rule, name, refused = "R1", "vLLM #39775", StaleResource
    facts = {"resource": "num_heads", "domain": DRAFT, "never": True, "resources": ("num_heads",)}
    words = ("builder.num_heads [draft] was never refreshed (it is derived from manager)", "publish('num_heads'")

    def built(self, *of_the_draft: str) -> Engine:
        backend = Backend(
            "builder",
            (
                Pointer("num_heads", reads=("manager",), of=lambda view: view.geometry.num_kv_heads),
                lengths("seq_lens"),
            ),
        )
        engine = Engine(backend, guard=True)
        fsm, batch = engine.fsm, engine.batch()
        for domain, manager in ((TARGET, engine.target), (DRAFT, engine.draft)):
            engine.write(batch, domain, "seq_lens")
            if domain is TARGET or "num_heads" in of_the_draft:
                fsm.publish("num_heads", manager.geometry.num_kv_heads, domain)
        fsm.target_prepare(batch)
        return engine

    def faulty(self) -> None:
        engine = self.built()
        with self.refusing(engine.fsm):
            engine.fsm.draft_forward()

    def corrected(self) -> None:
        engine = self.built("num_heads")
        with engine.fsm.draft_forward():
            assert engine.fsm.value("num_heads") == 2
        assert engine.fsm.value("num_heads") == 8
