"""The draft's rows of each request: kept through everything that moves pages, and never read beyond."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from specfsm.contracts.content import DraftContent
from specfsm.domain import Batch, Domain
from specfsm.errors import DraftContentInvalid
from specfsm.states.phase import Phase
from tests.toys import BATCH, REQUESTS, World, refused, world

BEFORE = BATCH.kv_lens[0] - BATCH.tokens[0]
"""Rows that the draft's pass over `BATCH` reads and does not write."""


def holding(rows: int = BEFORE, **of: int) -> DraftContent:
    """Every request has `rows` rows in the draft's cache; ``r3=4``: request 3 has 4."""
    content = DraftContent()
    for request in REQUESTS:
        content.begin(request, of.get(f"r{request}", rows))
    return content


def prepared(content: DraftContent) -> World:
    at = world(contracts=[content])
    at.fsm.target_prepare(BATCH)
    return at


def drafts(at: World, batch: Batch = BATCH) -> None:
    with at.fsm.draft_forward(batch):
        at.fsm.draft_step()


# What the draft reads.


def test_rows_that_only_the_target_has_are_not_drafted_from() -> None:
    """SGLang #19897: a prefix hit gives the request pages whose rows are the target's. Refused; a pass that begins at
    the first missing row is let through."""
    content = holding(r3=2)
    at = prepared(content)
    error = refused(at.fsm, DraftContentInvalid, lambda: at.fsm.draft_forward(BATCH))
    assert error.short == ((3, 2, BEFORE),)
    assert (error.request, error.to) == (3, Phase.DRAFT_FORWARD)

    missing = tuple(kv_len - content.rows(request) for request, kv_len in zip(REQUESTS, BATCH.kv_lens, strict=True))
    drafts(at, attrs.evolve(BATCH, tokens=missing))
    content.wrote(dict(zip(REQUESTS, BATCH.kv_lens, strict=True)))
    at.fsm.target_prepare(BATCH)
    drafts(at)


@pytest.mark.parametrize("saved", [True, False])
def test_load_back_brings_what_was_saved(saved: bool) -> None:
    """SGLang #32176: pages come back from the host with the target's rows alone. With the draft's, drafting goes on;
    while they are away it does not."""
    content = holding()
    at = prepared(content)
    content.offload(9, 4, saved=saved)
    with pytest.raises(DraftContentInvalid, match=f"request 9 has 4 valid rows .* would read {BEFORE}"):
        at.fsm.draft_forward(BATCH)
    content.load_back(9)
    assert content.rows(9) == (BEFORE if saved else 4)
    if saved:
        drafts(at)
    else:
        with pytest.raises(DraftContentInvalid):
            at.fsm.draft_forward(BATCH)


def test_offloads_add_up() -> None:
    """The first row that left decides, and a rollback while they are away is not forgotten."""
    content = holding(8)
    content.offload(7, 6, saved=True)
    content.offload(7, 4, saved=True)
    content.offload(7, 5, saved=True)
    assert content.rows(7) == 4
    content.cut(7, 5)
    content.load_back(7)
    assert content.rows(7) == 5


def test_rollback_takes_rows_and_gives_none() -> None:
    content = holding()
    at = prepared(content)
    content.cut(7, BEFORE + 1)
    assert content.rows(7) == BEFORE
    drafts(at)
    content.cut(7, BEFORE - 1)
    at.fsm.target_prepare(BATCH)
    with pytest.raises(DraftContentInvalid):
        at.fsm.draft_forward(BATCH)


def test_chunks_follow_each_other() -> None:
    """Chunk by chunk: one that begins behind the end of the last one is refused."""
    content = holding(0)
    at = prepared(content)
    for start, end in ((0, 3), (3, 6)):
        drafts(at, Batch(REQUESTS, (end,) * 3, (end - start,) * 3, num_contexts=3))
        content.wrote(dict.fromkeys(REQUESTS, end))
        at.fsm.target_prepare(BATCH)
    with pytest.raises(DraftContentInvalid):
        at.fsm.draft_forward(Batch(REQUESTS, (9,) * 3, (2,) * 3))


def test_window_reads_what_it_wrote() -> None:
    """Later steps, and a replay within the phase, read rows that nobody reported yet."""
    at = prepared(holding())
    with at.fsm.draft_forward(BATCH):
        for _ in range(3):
            at.fsm.draft_step()
        content = at.fsm.contracts["draft_replay"][0]
        content.admit(at.fsm, "draft_replay", at.fsm.batch(Domain.DRAFT))


def test_unreported_pass_is_not_believed() -> None:
    """A forward that nobody reports (it failed, say) leaves the rows as they were."""
    content = holding()
    at = prepared(content)
    drafts(at)
    assert content.rows(7) == BEFORE


def test_request_that_never_began_has_nothing() -> None:
    at = prepared(DraftContent())
    with pytest.raises(DraftContentInvalid, match="request 7 has 0 valid rows"):
        at.fsm.draft_forward(BATCH)


# What waits for the draft.


def test_cache_is_saved_after_the_draft_phase() -> None:
    """vLLM #35158: saved between the target's forward and the draft's, it holds rows that the draft never wrote."""
    content, saved = holding(), []
    at = prepared(content)
    end = BATCH.kv_lens[0]
    content.finalise(7, end, lambda: saved.append(content.rows(7)))
    with pytest.raises(DraftContentInvalid, match=f"{end} rows of request 7 would be saved, but .* holds {BEFORE}"):
        content.require(7, end)
    with at.fsm.draft_forward():
        with pytest.raises(DraftContentInvalid):
            content.require(7, BEFORE)  # its pages are being written
        assert saved == []
    assert saved == [], "left, but nobody says that the forward ran"
    content.wrote({7: end})
    assert saved == [end]
    content.require(7, end)


def test_hook_that_is_due_waits_for_the_end_of_the_phase() -> None:
    content, saved = holding(), []
    at = prepared(content)
    with at.fsm.draft_forward():
        content.finalise(7, BEFORE, lambda: saved.append("late"))
        assert saved == []
    content.finalise(7, BEFORE, lambda: saved.append("now"))
    assert saved == ["late", "now"]


def test_hooks_of_a_request_that_left_never_run() -> None:
    content, saved = holding(), []
    content.finalise(7, BEFORE + 1, lambda: saved.append("never"))
    content.forget([7])
    content.begin(7)
    content.wrote({7: BEFORE + 1})
    assert saved == []


def test_request_that_left_takes_all_that_was_known_of_it() -> None:
    """The next one under its id has no pages outside the pool."""
    content = holding()
    content.offload(7, 2, saved=True)
    content.forget([7])
    content.begin(7, BEFORE)
    assert content.rows(7) == BEFORE
    drafts(prepared(content))


def test_pages_outside_the_pool_are_their_requests_business() -> None:
    """A request that is not in the batch may be away; one that is in it is judged by what is there."""
    content = holding()
    at = prepared(content)
    content.begin(8, 9)
    content.offload(8, 1, saved=True)
    content.offload(9, BEFORE, saved=True)
    drafts(at)
    content.offload(9, BEFORE - 1, saved=True)
    at.fsm.target_prepare(BATCH)
    error = refused(at.fsm, DraftContentInvalid, lambda: at.fsm.draft_forward(BATCH))
    assert error.short == ((9, BEFORE - 1, BEFORE),)


# What it cannot take.

FAULTS: dict[str, tuple[Callable[[DraftContent], object], type[Exception], str]] = {
    "begun twice": (lambda c: c.begin(7), ValueError, "rows of request 7 are known already"),
    "unknown": (lambda c: c.cut(8, 1), KeyError, "nothing is known of the draft's rows of request 8"),
    "one of two unknown": (lambda c: c.wrote({7: 8, 8: 8}), KeyError, "request 8"),
    "negative": (lambda c: c.wrote({3: 9, 7: -1}), ValueError, "request 7 cannot have -1 rows"),
    "negative start": (lambda c: c.begin(8, -2), ValueError, "request 8 cannot have -2 rows"),
    "away": (lambda c: c.wrote({3: 9, 9: 8}), ValueError, "request 9 has pages outside the pool: load_back first"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_impossible_report_changes_nothing(fault: str) -> None:
    report, error, message = FAULTS[fault]
    content = holding()
    content.offload(9, 4, saved=True)
    with pytest.raises(error, match=message):
        report(content)
    assert [content.rows(request) for request in REQUESTS] == [BEFORE, BEFORE, 4]


def test_report_from_within_the_phase_is_refused() -> None:
    content = holding()
    at = prepared(content)
    with at.fsm.draft_forward(), pytest.raises(ValueError, match="the draft phase is active"):
        content.wrote({7: 8})
    content.wrote({7: 8})
