"""Refreshes that were rightly left out (R2): a checker must prove them unnecessary, and not demand them."""

from __future__ import annotations

from specfsm import DSA, Graph, Trtllm, UnifiedCache
from tests.cases.case import Case
from tests.cases.engine import Engine


class FirstPassReusesMetadata(Case):
    """The draft's first pass runs the target's batch over the same pages. The metadata that was built for the target
    holds for it: building it again before each replay is work for nothing."""

    rule, name, refused = "R2", "vLLM #40410", None

    def corrected(self) -> None:
        engine = Engine(Trtllm(), draft=UnifiedCache("the draft's layers lie in the target's pages"))
        engine.fsm.target_prepare(engine.batch())
        with engine.fsm.draft_forward():
            pass
        entered = next(each for each in engine.fsm.trace if each.event == "draft_forward")
        assert entered.refreshed == 0
        assert "kv_cache_block_offsets" in engine.fsm.trace.resources(entered.proven)


class WindowInOneGraph(Case):
    """All draft steps are captured in one graph that advances the lengths itself. Metadata is built once for the
    whole window; nothing is built between the steps."""

    rule, name, refused = "R2", "vLLM #46849", None

    def record(self, engine: Engine) -> Graph:
        batch = engine.batch(tokens=1)
        engine.fsm.target_prepare(batch)
        with engine.fsm.draft_forward(batch):
            pass
        engine.fsm.target_prepare(batch)
        with engine.fsm.record(("window", 2)) as graph, engine.fsm.draft_forward(batch):
            for step in range(1, 3):
                engine.fsm.announce(engine.batch(8 + step, tokens=1))
                engine.fsm.publish("kv_lens_cuda", engine.fsm.value("kv_lens_cuda").add_(1))
                engine.fsm.draft_step(engine.batch(8 + step, tokens=1))
        return graph

    def corrected(self) -> None:
        engine = Engine(DSA())
        for request in engine.REQUESTS:
            engine.draft.reserve(request, 12)
        graph = self.record(engine)
        engine.fsm.trace.clear()
        engine.fsm.target_prepare()
        for _ in range(2):
            with engine.fsm.draft_replay(graph):
                pass
            engine.fsm.target_prepare()
        first, again = (each for each in engine.fsm.trace if each.event == "draft_replay")
        resources = engine.fsm.trace.resources
        assert resources(first.refreshed) == ()
        assert resources(again.refreshed) == ("kv_lens_cuda",), "which the graph has advanced"
        assert {"req_idx_per_token", "slot_mapping_fp8", "block_table"} <= {*resources(again.proven)}
