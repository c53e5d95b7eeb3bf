"""R9: what the draft phase changes is recorded before and given back on every way out, sources and all."""

from __future__ import annotations

from contextlib import suppress

from specfsm import NestedPhase, Phase, StaleResource, Trtllm
from tests.cases.case import Case
from tests.cases.engine import DRAFT, TARGET, Engine


class LeftBehindByAWarmUp(Case):
    """A draft forward of the warm-up runs out of memory, which is tolerated: a smaller size is tried next. What was
    saved on entry is still there, and every later forward fails with an assertion that says nothing."""

    rule, name, refused = "R9", "TensorRT-LLM #16382", NestedPhase
    facts = {"state": Phase.DRAFT_FORWARD, "event": "draft_forward"}
    words = ("the draft phase is active already", "leave it first (end the with block, or call restore())")

    def faulty(self) -> None:
        engine = Engine(Trtllm())
        engine.fsm.target_prepare(engine.batch())
        with suppress(MemoryError):
            engine.fsm.draft_forward()
            raise MemoryError
        with self.refusing(engine.fsm):
            engine.fsm.draft_forward()

    def corrected(self) -> None:
        engine = Engine(Trtllm())
        engine.fsm.target_prepare(engine.batch())
        with suppress(MemoryError), engine.fsm.draft_forward():
            raise MemoryError
        engine.fsm.target_prepare()
        with engine.fsm.draft_forward():
            pass


class ContextsNotRestored(Case):
    """The draft loop turns every row into a generation: the number of contexts becomes 0. What is derived from it is
    restored afterwards, the number itself is not, and the target runs its prompt as a generation."""

    rule, name, refused = "R9", "TensorRT-LLM #17381", StaleResource
    facts = {"resource": "num_contexts", "domain": TARGET, "misbound": True, "event": "restore"}
    words = ("trtllm.num_contexts [target] still holds the other cache's value", "let the transition switch")

    def faulty(self) -> None:
        engine = Engine(Trtllm(), drop=[("num_contexts", TARGET)])
        batch = engine.batch(contexts=1)
        engine.fsm.announce(batch, TARGET)
        engine.fsm.publish("num_contexts", batch.num_contexts, TARGET)
        engine.fsm.target_prepare(batch)
        engine.fsm.draft_forward()
        engine.fsm.draft_step()
        assert engine.metadata.num_contexts == 0
        with self.refusing(engine.fsm):
            engine.fsm.restore()

    def corrected(self) -> None:
        engine = Engine(Trtllm())
        engine.fsm.target_prepare(engine.batch(contexts=1))
        with engine.fsm.draft_forward():
            engine.fsm.draft_step()
            assert engine.metadata.num_contexts == engine.fsm.value("num_contexts", DRAFT) == 0
        assert engine.metadata.num_contexts == 1
