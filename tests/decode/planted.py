"""Faults planted into a running decode loop, and what becomes of each: ``python -m tests.decode.planted`` tells.

Each is a mistake that public reports show engines make. None may be silent: it is refused by an error, or found and
mended. ``--write`` writes the table into docs/faults.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from attrs import field, frozen

from specfsm.backends.refresher import Refresher
from specfsm.contracts.consensus import Consensus
from specfsm.contracts.lifetime import Flight
from specfsm.decode.cache import PagedKVCache
from specfsm.decode.lifecycle import Lifecycle
from specfsm.decode.loop import DecodeLoop
from specfsm.decode.step import Step
from specfsm.domain import Domain
from specfsm.errors import IllegalTransition
from specfsm.states.diagram import pipe_table
from specfsm.verify import Check
from tests.decode.conftest import draft, move_pages, places, prompt, reference, settings, target

__all__ = ["DOCUMENT", "FAULTS", "PLACES", "Fault", "document", "outcome", "refreshing_anothers_row", "table"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "faults.md"
BEGIN, END = "<!-- planted: python -m tests.decode.planted --write -->\n", "<!-- end of planted -->\n"
PLACES: dict[str, dict[str, Any]] = {
    "eager": {},
    "overlap": {"overlap": True},
    "replay": {"graphs": "whole", "graph_sizes": (2,)},
    "draft replay, overlap": {"graphs": "draft", "graph_sizes": (2,), "overlap": True},
}
STATIC = 6
"""A step by which every place runs what it is named for: both requests generate, graphs were recorded and replayed."""
PROMPTS, NEW = (prompt(90, 9), prompt(91, 6)), 24
TARGET, DRAFT = Domain.TARGET, Domain.DRAFT
TABLES = {
    "trtllm": "kv_cache_block_offsets",
    "flash_mla": "kv_block_ids_per_seq",
    "dsa": "block_table",
    "deepseek_v4": "sliding_block_tables",
}
"""What the attention of each backend finds pages through."""

Act = Callable[[DecodeLoop], object]


def _nothing(loop: DecodeLoop) -> None:
    """Nothing happens."""


@frozen(kw_only=True)
class Fault:
    """One mistake.

    Args:
        name: what the engine does.
        kind: of mistake.
        source: a public report of it, where there is one.
        options: further arguments of the loop.
        settings: changes of its settings.
        around: holds while it decodes: patched engine code.
        act: what the engine does before step `STATIC`.
        moves: whether pages move between steps, so that tables must follow.
        level: the first check level that finds it.
        places: where it can be planted.
    """

    name: str
    kind: str
    source: str = ""
    options: dict[str, Any] = field(factory=dict)
    settings: dict[str, Any] = field(factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    act: Act = _nothing
    moves: bool = True
    level: Check = Check.STAMPS
    places: tuple[str, ...] = tuple(PLACES)


def outcome(fault: Fault, place: str, check: Check, backend: str = "trtllm") -> str:
    """ "refused (class)", "found (class)" if the loop mended it, or what was silent."""
    options = settings(backend, **{"max_tokens": 50, "host_blocks": 24, **PLACES[place], **fault.settings})
    found: list[str] = []
    try:
        with fault.around():
            loop = DecodeLoop(target(), draft("self"), options, check=check, **fault.options)
            _listen(loop, found)
            harm = _decode(loop, fault)
    except (IllegalTransition, ValueError) as error:
        return f"refused ({type(error).__name__})"
    if harm or not found:
        return harm or "silent: nothing happened"
    return f"found ({', '.join(dict.fromkeys(found))})"


def _listen(loop: DecodeLoop, found: list[str]) -> None:
    """Note what the loop catches and mends."""
    admit = loop.content.admit

    def listening(*event: Any) -> None:
        try:
            admit(*event)
        except IllegalTransition as error:
            found.append(type(error).__name__)
            raise

    loop.content.admit = listening  # type: ignore[method-assign]


def _decode(loop: DecodeLoop, fault: Fault) -> str:
    """What shows of a fault that nobody refused: other tokens, or a draft that is the target and guesses badly."""
    expected = {loop.submit(tokens, NEW): reference(tokens, NEW) for tokens in PROMPTS}
    outputs: dict[int, list[int]] = {request: [] for request in expected}
    step, missed = 0, False
    while loop.running or loop.waiting or loop.pending:
        if step == STATIC:
            fault.act(loop)
        for each in loop.step():
            outputs[each.request] += each.tokens
            missed |= each.accepted < each.proposed and not each.finished
        if fault.moves:
            move_pages(loop)
        step += 1
    if any(written != expected[request][: len(written)] for request, written in outputs.items()):
        return "silent: other tokens"
    return "silent: acceptance falls" if missed else ""


# What engines do wrong.


def _leave_out(domain: Domain, loop: DecodeLoop) -> None:
    """A path on which the table's refresh was forgotten: from now on."""
    masks = [0, 0]
    masks[domain] = loop.fsm.ledger.mask([_table(loop)])
    loop.fsm.switch.leave_out((masks[0], masks[1]))


def _table(loop: DecodeLoop) -> str:
    return TABLES[loop.settings.backend]


def _publish_then_write(step: Step, domain: Domain, lens: torch.Tensor, tokens: int | None = None) -> None:
    fsm = step.loop.fsm
    buffer = fsm.value("kv_lens_cuda", domain)
    fsm.publish("kv_lens_cuda", buffer, domain)
    buffer[: step.size] = lens


def _correct_the_target(step: Step, domain: Domain, lens: torch.Tensor, tokens: int | None = None) -> None:
    fsm = step.loop.fsm
    buffer = fsm.value("kv_lens_cuda", TARGET)
    buffer[: step.size] = lens
    fsm.publish("kv_lens_cuda", buffer, domain)


@contextmanager
def _writing_the_target() -> Iterator[None]:
    """In the draft phase the engine advances the target's lengths."""
    forward = DecodeLoop.forward

    def wrong(loop: DecodeLoop, batch: Any, domain: Domain, *limit: Any) -> Any:
        if domain is DRAFT:
            loop.fsm.value("kv_lens_cuda", TARGET).add_(1)
        return forward(loop, batch, domain, *limit)

    with patch.object(DecodeLoop, "forward", wrong):
        yield


def _free_at_once(loop: Lifecycle) -> None:
    for request in loop.leaving:
        for cache in loop.caches:
            cache.free(request.id)


def _save_before_the_draft(loop: DecodeLoop, request: Any) -> None:
    """An engine that saves a prompt's pages by itself asks whether it may."""
    loop.content.require(request.id, request.prompt_len)


def _rebind(loop: DecodeLoop) -> None:
    setattr(loop.metadata, _table(loop), getattr(loop.metadata, _table(loop)).clone())


def _bind(loop: DecodeLoop) -> None:
    loop.fsm.bind(_table(loop), loop.fsm.value(_table(loop), DRAFT).clone(), DRAFT)


def _publish_another(loop: DecodeLoop) -> None:
    loop.fsm.publish(_table(loop), loop.fsm.value(_table(loop), DRAFT).clone(), DRAFT)


@contextmanager
def _copying_between_twins() -> Iterator[None]:
    """In the draft phase, behind the refresh, and before the model reads it."""
    forward = DecodeLoop.forward

    def wrong(loop: DecodeLoop, batch: Any, domain: Domain, *limit: Any) -> Any:
        if domain is DRAFT:
            theirs, own = (loop.fsm.value(_table(loop), each) for each in (TARGET, DRAFT))
            width = min(theirs.shape[-1], own.shape[-1])
            own[..., :width] = theirs[..., :width]
        return forward(loop, batch, domain, *limit)

    with patch.object(DecodeLoop, "forward", wrong):
        yield


def _free_running(loop: DecodeLoop) -> None:
    loop.cache.free(loop.running[0].id)


def _free_in_flight(loop: DecodeLoop) -> None:
    request = loop.running[0].id
    assert loop.pending is not None
    loop.abort(request)
    loop.cache.free(request)


def _abort_in_flight(loop: DecodeLoop) -> None:
    assert loop.pending is not None
    loop.abort(loop.running[0].id)


def _take_every_row(flight: Flight) -> Iterator[tuple[int, int]]:
    return ((row, flight.claim(row)) for row in range(len(flight.rows)))


def _reserve_less(name: str) -> AbstractContextManager[Any]:
    """One cache's pages end where the window begins."""
    cache = DecodeLoop._cache

    def short(loop: DecodeLoop, domain: Domain, *more: Any) -> Any:
        pages = cache(loop, domain, *more)
        reserve = pages.reserve
        if domain.name == name:
            pages.reserve = lambda request, tokens: reserve(request, max(tokens - loop.settings.window - 8, 1))  # type: ignore[method-assign]
        return pages

    return patch.object(DecodeLoop, "_cache", short)


def _wipe(loop: DecodeLoop) -> None:
    """The draft's pages are lost (a load-back without them), and the contract is told."""
    assert loop.draft_cache is not None
    request = loop.running[0].id
    loop.draft_cache.pool[places(loop.draft_cache, request)] = 1e4
    loop.content.cut(request, 0)


@contextmanager
def _alone() -> Iterator[None]:
    """A group of one rank, so that a loop can vote."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    votes = DecodeLoop.__init__

    def voting(loop: DecodeLoop, *arguments: Any, **options: Any) -> None:
        votes(loop, *arguments, consensus=Consensus(), **options)

    try:
        with patch.object(DecodeLoop, "__init__", voting):
            yield
    finally:
        dist.destroy_process_group()


def _apply_last_vote(loop: DecodeLoop) -> None:
    assert loop.consensus is not None
    loop.consensus.agreed(loop.fsm, loop.consensus.step + 1)


@contextmanager
def refreshing_anothers_row() -> Iterator[None]:
    """A refresh kernel's wrong index: the first row of the batch gets the second one's pages. torch's counters do not
    see what a kernel writes."""
    refresh = Refresher.refresh

    def wrong(refresher: Refresher, *arguments: Any) -> Any:
        outcome = refresh(refresher, *arguments)
        for binding, written in zip(refresher.bindings, outcome[0], strict=False):
            for place, resource in enumerate(binding.backend.resources):
                if resource.name in TABLES.values() and written >> place & 1:
                    table = binding.values[place].data
                    rows = table[0] if table.dim() > 2 else table
                    rows[0] = rows[1].clone()
        return outcome

    with patch.object(Refresher, "refresh", wrong):
        yield


@contextmanager
def _handing_out_anothers_page() -> Iterator[None]:
    """The manager's books are right, and its table is not: a request's first page is another's."""
    write = PagedKVCache._write_row

    def wrong(cache: PagedKVCache, row: int, request: int) -> None:
        write(cache, row, request)
        others = [each for each, owned in cache._owned.items() if each > request > 0 and owned.blocks]
        if others and cache._owned[request].blocks:
            entry = cache._encode(cache._owned[others[0]].blocks[0])
            cache.host_block_offsets[0, row, :, 0] += entry - cache.host_block_offsets[0, row, 0, 0].item()

    with patch.object(PagedKVCache, "_write_row", wrong):
        yield


FAULTS = (
    Fault(name="the target's table is not refreshed", kind="drop", act=partial(_leave_out, TARGET)),
    Fault(name="the draft's table is not refreshed", kind="drop", source="TensorRT-LLM #15251",
          act=partial(_leave_out, DRAFT)),
    Fault(name="lengths are published, then written", kind="reorder", source="vllm-ascend #15417",
          level=Check.TENSORS, around=lambda: patch.object(Step, "_correct", _publish_then_write)),
    Fault(name="a prompt's pages are saved before the draft has run", kind="reorder", source="vLLM #35158",
          settings={"prefix_cache": True}, around=lambda: patch.object(DecodeLoop, "_publish", _save_before_the_draft)),
    Fault(name="pages are freed when a request ends, not at the fence", kind="reorder",
          around=lambda: patch.object(DecodeLoop, "_release", _free_at_once)),
    Fault(name="the metadata carries another buffer than the bound one", kind="wrong object",
          source="SGLang #37975", level=Check.TENSORS, act=_rebind),
    Fault(name="a captured buffer is replaced", kind="wrong object", source="TensorRT-LLM #16290", act=_bind,
          places=("replay", "draft replay, overlap")),
    Fault(name="another buffer is written and published", kind="wrong object", source="SGLang #37975",
          act=_publish_another),
    Fault(name="the target's lengths are published as the draft's", kind="wrong object",
          around=lambda: patch.object(Step, "_correct", _correct_the_target)),
    Fault(name="the target's lengths are written in the draft phase", kind="wrong object",
          level=Check.TENSORS, around=_writing_the_target),
    Fault(name="the draft's table is filled from the target's", kind="wrong object", level=Check.TENSORS,
          around=_copying_between_twins),
    Fault(name="last step's vote is applied to this step", kind="stale vote", source="TensorRT-LLM #17710",
          around=_alone, act=_apply_last_vote),
    Fault(name="a running request's pages are freed", kind="early free", act=_free_running),
    Fault(name="pages are freed while a step in flight writes to them", kind="early free", source="vLLM #45357",
          act=_free_in_flight, places=("overlap", "draft replay, overlap")),
    Fault(name="a retired request's results are taken", kind="early free", source="SGLang #23456",
          around=lambda: patch.object(Flight, "live", _take_every_row), act=_abort_in_flight,
          places=("overlap",)),
    Fault(name="the target's pages end before its window", kind="short window",
          around=lambda: _reserve_less("TARGET")),
    Fault(name="the draft's pages end before its window", kind="short window", source="vLLM #16370",
          around=lambda: _reserve_less("DRAFT")),
    Fault(name="the draft's rows are lost", kind="content", source="SGLang #19897", act=_wipe),
    Fault(name="a refresh writes another request's row", kind="foreign page", source="TensorRT-LLM #16925",
          level=Check.CONTENTS, around=refreshing_anothers_row),
    Fault(name="the manager's table shows another request's page", kind="foreign page", level=Check.CONTENTS,
          around=_handing_out_anothers_page, moves=False),
)  # fmt: skip


# The table.


def table() -> str:
    """Planted × found, as Markdown."""
    rows = []
    for fault in FAULTS:
        cells = (outcome(fault, place, fault.level) if place in fault.places else "–" for place in PLACES)
        rows.append((fault.kind, fault.name, fault.source or "–", fault.level.name.lower(), *cells))
    return pipe_table(("kind", "the engine", "seen in", "level", *PLACES), rows)


def document(text: str, rows: str) -> str:
    """The document with this table between its markers."""
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n{rows}\n{END}{after}"


def main() -> None:
    torch.set_num_threads(1)
    rows = table()
    print(rows)
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(document(DOCUMENT.read_text(), rows))


if __name__ == "__main__":
    main()
