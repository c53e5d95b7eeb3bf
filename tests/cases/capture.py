"""R4: a replay finds what was captured: addresses, shapes, and every value that was baked in."""

from __future__ import annotations

import torch

from specfsm import Backend, Graph, GraphContractBroken, IllegalTransition, Table, Trtllm
from tests.cases.case import Case
from tests.cases.engine import DRAFT, SIZES, Engine, keep, lengths


class OutputInTheGraphsPool(Case):
    """Each forward allocates the indexer's output. Captured, it comes from the pool that the graph shares with whatever
    else is captured, and the address that was baked in is somebody else's by the time of a replay."""

    rule, name, refused = "R4", "TensorRT-LLM #16290", IllegalTransition
    facts = {"event": "bind", "subject": "topk_indices [draft]"}
    words = ("topk_indices [draft]", "a graph is being recorded", "bind it before the recording")

    def engine(self) -> Engine:
        output = Table("topk_indices", reads=("batch",), dtype="int32", shape=("T", 8), refresh=keep)
        engine = Engine(Backend("indexer", (lengths(), output)))
        engine.fsm.target_prepare(engine.batch())
        return engine

    def new_output(self, engine: Engine) -> torch.Tensor:
        output = torch.empty(SIZES.max_tokens, 8, dtype=torch.int32)
        engine.fsm.bind("topk_indices", output, DRAFT)
        return output

    def faulty(self) -> None:
        engine = self.engine()
        with engine.fsm.record(("decode", 2)), engine.fsm.draft_forward(), self.refusing():
            self.new_output(engine)

    def corrected(self) -> None:
        engine = self.engine()
        output = self.new_output(engine)
        with engine.fsm.record(("decode", 2)) as graph, engine.fsm.draft_forward():
            pass
        with engine.fsm.draft_replay(graph):
            assert engine.fsm.value("topk_indices") is output


def recorded(engine: Engine, length: int, max_len: int | None) -> Graph:
    """A graph of the draft's phase, of so many tokens, taken after a warm-up."""
    engine.fsm.target_prepare(engine.batch(length))
    with engine.fsm.draft_forward():
        pass
    engine.fsm.target_prepare()
    with engine.fsm.record(("decode", 2, max_len), max_len=max_len) as graph, engine.fsm.draft_forward():
        pass
    return graph


class LengthBakedIn(Case):
    """The longest sequence length goes to the kernel as a number, so the graph has the one of its capture. Graphs are
    looked up by padded sizes alone, and a longer batch finds it: what lies beyond is not attended to."""

    rule, name, refused = "R4", "transformers #45323", GraphContractBroken
    facts = {
        "key": ("decode", 2, 12),
        "broken": (
            "was recorded for KV lengths up to 12, but request 7 has 13",
            "was recorded for KV lengths up to 12, but request 9 has 13",
        ),
    }
    words = ("graph ('decode', 2, 12): was recorded for KV lengths up to 12, but request 7 has 13",)

    def faulty(self) -> None:
        engine = Engine(Trtllm())
        graph = recorded(engine, length=8, max_len=12)
        engine.fsm.target_prepare(engine.batch(13))
        with self.refusing(engine.fsm):
            engine.fsm.draft_replay(graph)

    def corrected(self) -> None:
        engine = Engine(Trtllm())
        graphs = {limit: recorded(engine, length=8, max_len=limit) for limit in (12, 24)}
        for length in (12, 13):
            engine.fsm.target_prepare(engine.batch(length))
            fitting = min(limit for limit in graphs if limit >= length)
            with engine.fsm.draft_replay(graphs[fitting]):
                pass


class NarrowTable(Case):
    """The block table was captured as wide as the longest prompt. The first token decoded behind a full one takes a
    page more."""

    rule, name, refused = "R4", "nano-vllm #190", GraphContractBroken
    facts = {
        "broken": (
            "reads tables 16 tokens wide [draft], but request 7 has 17",
            "reads tables 16 tokens wide [draft], but request 9 has 17",
        )
    }
    words = ("reads tables 16 tokens wide [draft], but request 7 has 17",)

    def replay(self, width: int, *, refused: bool) -> None:
        engine = Engine(Trtllm(), width=width)
        graph = recorded(engine, length=16, max_len=1024)
        engine.fsm.target_prepare(engine.batch(16))
        if refused:
            with self.refusing(engine.fsm):
                engine.fsm.draft_replay(graph, engine.batch(17))
        else:
            with engine.fsm.draft_replay(graph, engine.batch(17)):
                pass

    def faulty(self) -> None:
        self.replay(width=4, refused=True)

    def corrected(self) -> None:
        self.replay(width=5, refused=False)
