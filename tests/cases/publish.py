"""R3: a plan made on the host is written into the buffers of the graph that is replayed next, before it is."""

from __future__ import annotations

from typing import Any

import torch

from specfsm import Backend, Graph, GraphContractBroken, StaleResource, Table
from tests.cases.case import Case
from tests.cases.engine import DRAFT, SIZES, TARGET, Engine, lengths


def split(view: Any, buffer: torch.Tensor) -> torch.Tensor:
    """A planner: into how many pages each request's KV is split."""
    buffer.zero_()
    lens = view.batch.kv_lens
    buffer[: len(lens)] = torch.tensor([view.geometry.blocks(each) for each in lens])
    return buffer


def planned() -> Backend:
    """Lengths, and a plan that the host makes from them into a buffer that the kernel reads."""
    plan = Table("plan", reads=("batch", "blocks", "lengths"), dtype="int32", shape=("S",), sentinel=0, refresh=split)
    return Backend("flashinfer", (lengths(), plan))


def captured(engine: Engine, length: int = 8) -> Graph:
    """A graph of the draft's phase; the engine is in the target's phase afterwards."""
    with engine.fsm.record(("decode", 2)) as graph:
        engine.fsm.draft_forward(engine.batch(length))
        engine.fsm.restore()
    return graph


class PlanOfTheWarmUp(Case):
    """The planner is called from the forward. A replay runs no forward, so every replayed step goes by the plan of the
    warm-up batch: of most requests only the first pages are read."""

    rule, name, refused = "R3", "TensorRT-LLM #18769", StaleResource
    facts = {"resource": "plan", "domain": DRAFT, "moved": {"lengths": (1, 2)}, "event": "draft_replay"}
    words = ("--draft_replay--> DRAFT_REPLAY refused", "flashinfer.plan [draft] is stale: lengths moved 1 → 2")

    def faulty(self) -> None:
        engine = Engine(planned(), drop=[("plan", DRAFT)])
        fsm, warm = engine.fsm, engine.batch(8)
        fsm.target_prepare(warm)
        engine.write(warm, DRAFT, "plan")
        with fsm.draft_forward(warm):
            pass
        fsm.target_prepare(warm)
        graph = captured(engine)
        fsm.target_prepare(engine.batch(9))
        with self.refusing(fsm):
            fsm.draft_replay(graph)

    def corrected(self) -> None:
        engine = Engine(planned())
        engine.fsm.target_prepare(engine.batch(8))
        graph = captured(engine)
        engine.fsm.target_prepare(engine.batch(9))
        with engine.fsm.draft_replay(graph):
            assert engine.fsm.value("plan")[:2].tolist() == [3, 3]


class PlanOfTheActiveBackend(Case):
    """Before the draft is captured the engine calls the planning hook of the attention backend that is active. That is
    the target's; the one that is about to be captured has no plan."""

    rule, name, refused = "R3", "SGLang #35275", StaleResource
    facts = {"resource": "plan", "domain": DRAFT, "never": True, "event": "draft_forward"}
    words = ("flashinfer.plan [draft] was never refreshed", "publish('plan', tensor, domain=DRAFT)")

    def prepared(self) -> Engine:
        engine = Engine(planned(), drop=["plan"])
        engine.write(engine.batch(), TARGET, "kv_lens", "plan")
        engine.fsm.target_prepare(engine.batch())
        return engine

    def faulty(self) -> None:
        engine = self.prepared()
        engine.write(engine.batch(), engine.fsm.domain, "plan")
        with self.refusing(engine.fsm):
            engine.fsm.draft_forward()

    def corrected(self) -> None:
        engine = self.prepared()
        engine.write(engine.batch(), DRAFT, "kv_lens", "plan")
        with engine.fsm.draft_forward():
            assert engine.metadata.plan is engine.fsm.value("plan", DRAFT)
        engine.fsm.target_prepare()
        captured(engine)


class PlanInTheEagerBuffer(Case):
    """Before the replay the plan is written into the buffer of the eager path. The graph reads the one that it was
    captured with."""

    rule, name, refused = "R3", "SGLang #37975", GraphContractBroken
    facts = {
        "key": ("decode", 2),
        "broken": ("is INVALID, not READY: plan [draft] was bound to another buffer",),
        "event": "draft_replay",
    }
    words = ("graph ('decode', 2): is INVALID", "to mend: record the graph again, or run eagerly")

    def faulty(self) -> None:
        engine = Engine(planned())
        engine.fsm.target_prepare(engine.batch())
        graph = captured(engine)
        engine.fsm.bind("plan", torch.zeros(SIZES.max_sequences, dtype=torch.int32), DRAFT)
        engine.fsm.target_prepare(engine.batch(9))
        with self.refusing(engine.fsm):
            engine.fsm.draft_replay(graph)

    def corrected(self) -> None:
        engine = Engine(planned())
        engine.fsm.target_prepare(engine.batch())
        graph = captured(engine)
        recorded = engine.fsm.value("plan", DRAFT)
        engine.fsm.target_prepare(engine.batch(9))
        with engine.fsm.draft_replay(graph):
            assert engine.fsm.value("plan") is recorded
            assert recorded[:2].tolist() == [3, 3]


class ViewsOfOneBuffer(Case):
    """The draft is captured with attention metadata that was built before the target was captured. All of it are views
    of one persistent buffer, which each later build wrote over: the kernel runs by the plan of another batch."""

    rule, name, refused = "R3", "vLLM #48261", StaleResource
    facts = {"resource": "plan", "domain": DRAFT, "moved": {"plan": (2, 3)}, "event": "draft_forward"}
    words = ("flashinfer.plan [draft] is stale: plan moved 2 → 3 since its last refresh",)

    def built_for_the_draft_first(self) -> Engine:
        """One buffer serves both caches, and the engine builds into it by itself."""
        plan = torch.zeros(SIZES.max_sequences, dtype=torch.int32)
        views = dict.fromkeys(("plan", "draft_plan"), plan)
        lens = {name: torch.zeros_like(plan) for name in ("kv_lens", "draft_kv_lens")}
        engine = Engine(planned(), metadata=type("Metadata", (), {**views, **lens})(), guard=True)
        engine.write(engine.batch(), DRAFT, "kv_lens", "plan")
        engine.write(engine.batch(12), TARGET, "kv_lens", "plan")
        engine.fsm.target_prepare(engine.batch(12))
        return engine

    def faulty(self) -> None:
        engine = self.built_for_the_draft_first()
        with self.refusing(engine.fsm):
            engine.fsm.draft_forward(engine.batch())

    def corrected(self) -> None:
        engine = self.built_for_the_draft_first()
        engine.write(engine.batch(), DRAFT, "plan")
        engine.fsm.draft_forward(engine.batch())
