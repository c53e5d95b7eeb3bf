"""R2: what is derived from layout, lengths or draft step is rebuilt when these move, though the owner did not."""

from __future__ import annotations

import torch

from specfsm import DSA, Backend, Plan, StaleResource, Trtllm
from specfsm.states.resource import Freshness
from tests.cases.case import Case
from tests.cases.engine import DRAFT, TARGET, Engine, lengths


class TokensOfTheTargetsLayout(Case):
    """The map from token to request is built for the target's layout, 1 + draft length tokens a request. The draft loop
    runs one token a request and keeps the map: indexer keys are written into other requests' pages, and acceptance
    falls. The manager did not change at all."""

    rule, name, refused = "R2", "TensorRT-LLM #16925", StaleResource
    facts = {
        "backend": "dsa",
        "resource": "req_idx_per_token",
        "domain": DRAFT,
        "moved": {"layout": (1, 2)},
        "event": "draft_step",
    }
    words = ("dsa.req_idx_per_token [draft] is stale: layout moved 1 → 2 since its last refresh",)

    def faulty(self) -> None:
        engine = Engine(DSA(), drop=[("req_idx_per_token", DRAFT)])
        fsm, batch = engine.fsm, engine.batch(tokens=4)
        fsm.target_prepare(batch)
        engine.write(batch, DRAFT, "_seq_lens_cuda", "req_idx_per_token")
        fsm.draft_forward(batch)
        with self.refusing(fsm):
            fsm.draft_step()

    def corrected(self) -> None:
        engine = Engine(DSA())
        engine.draft.reserve(7, 12)
        engine.fsm.target_prepare(engine.batch(tokens=4))
        with engine.fsm.draft_forward():
            assert engine.metadata.req_idx_per_token[:8].tolist() == [0] * 4 + [1] * 4
            engine.fsm.draft_step()
            assert engine.metadata.req_idx_per_token[:3].tolist() == [0, 1, -1]


class RejectedTokensCounted(Case):
    """The draft's lengths are advanced by all tokens that were proposed. How many of them the target rejected becomes
    known later and goes into the batch, but not into the lengths that the kernel reads."""

    rule, name, refused = "R2", "vllm-ascend #8230", StaleResource
    facts = {"backend": "trtllm", "resource": "kv_lens_cuda", "domain": DRAFT, "moved": {"lengths": (1, 2)}}
    words = ("trtllm.kv_lens_cuda [draft] is stale: lengths moved 1 → 2",)

    def engine(self) -> Engine:
        engine = Engine(Trtllm(), drop=[("kv_lens_cuda", DRAFT)])
        engine.fsm.target_prepare(engine.batch(length=8, tokens=4))
        return engine

    def faulty(self) -> None:
        engine = self.engine()
        engine.write(engine.batch(length=8), DRAFT, "kv_lens_cuda")
        with self.refusing(engine.fsm):
            engine.fsm.draft_forward(engine.batch(length=6))

    def corrected(self) -> None:
        engine = self.engine()
        accepted = engine.batch(length=6)
        engine.fsm.value("kv_lens_cuda", DRAFT)[:2] = torch.tensor(accepted.kv_lens)
        engine.write(accepted, DRAFT, "kv_lens_cuda")
        with engine.fsm.draft_forward(accepted):
            assert engine.metadata.kv_lens_cuda[:2].tolist() == [6, 6]


class TwoPredicatesOfStaleness(Case):
    """Whether the plan must be made anew is decided in two places: by its owner, and by the code that runs it. They
    disagree, and a plan made for other lengths is run."""

    rule, name, refused = "R2", "TensorRT-LLM #12161", StaleResource
    facts = {"resource": "plan", "domain": TARGET, "moved": {"lengths": (1, 2)}, "resources": ("plan",)}
    words = ("planned.plan [target] is stale: lengths moved 1 → 2", "refresh it before this event")

    def engine(self) -> Engine:
        """One step with a plan, then another with longer requests, for which the owner sees no need of a new one."""
        engine = Engine(Backend("planned", (lengths(), Plan("plan", reads=("batch", "lengths")))), guard=True)
        engine.write(engine.batch(length=8), TARGET, "kv_lens")
        engine.fsm.publish("plan", "for 8 tokens")
        engine.fsm.target_prepare(engine.batch(length=8))
        engine.write(engine.batch(length=9), TARGET, "kv_lens")
        return engine

    def faulty(self) -> None:
        engine = self.engine()
        with self.refusing(engine.fsm):
            engine.fsm.target_prepare(engine.batch(length=9))

    def corrected(self) -> None:
        """One predicate: the machine's."""
        engine = self.engine()
        stale = [line.resource for line in engine.fsm.explain().lines if line.state is Freshness.STALE]
        if "plan" in stale:
            engine.fsm.publish("plan", "for 9 tokens")
        engine.fsm.target_prepare(engine.batch(length=9))
        assert engine.metadata.plan == "for 9 tokens"
