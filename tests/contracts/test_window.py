"""Room for the whole window: asked before it starts, in both caches, for every request."""

from __future__ import annotations

import attrs
import pytest

from specfsm.contracts.window import Window, crowded
from specfsm.domain import Batch, Domain
from specfsm.errors import WindowOverflow
from specfsm.states.phase import Phase
from tests import toys
from tests.toys import BATCH, REQUESTS, World, geometry, manager, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT
DRAFT_LEN = 3


def build(target: int = 40, draft: int = 40, only: int | None = None, **options: bool) -> World:
    """A world whose requests have room for so many tokens; `only`: one request alone is short of the draft's."""

    def of_draft(request: int) -> int:
        return draft if only in (None, request) else 40

    return world(contracts=[Window(lambda _: target, of_draft, draft_len=DRAFT_LEN, **options)])


def refused(at: World, event: str) -> WindowOverflow:
    """The refusal of an event, which changes nothing."""
    return toys.refused(at.fsm, WindowOverflow, lambda: getattr(at.fsm, event)(BATCH))


def test_last_block_may_lack_room_for_the_window() -> None:
    """vLLM #16370: the request fits its pages, its window does not. Refused before the first draft token."""
    length = BATCH.kv_lens[0]
    at = build(draft=length + DRAFT_LEN - 2, only=3, at_once=False)
    at.fsm.target_prepare(BATCH)
    error = refused(at, "draft_forward")
    assert error.short == ((3, DRAFT, length + DRAFT_LEN - 1, length + DRAFT_LEN - 2),)
    assert (error.request, error.domain, error.to) == (3, DRAFT, Phase.DRAFT_FORWARD)

    roomy = build(draft=length + DRAFT_LEN - 1, at_once=False)
    roomy.fsm.target_prepare(BATCH)
    with roomy.fsm.draft_forward(BATCH):
        for _ in range(DRAFT_LEN - 1):
            roomy.fsm.draft_step()


def test_pools_are_asked_together_before_the_step() -> None:
    """TensorRT-LLM #18660: the target's pages suffice, the draft's do not. The step is refused before the target
    runs, not when the draft's pool is dry."""
    at = build(draft=BATCH.kv_lens[0] + DRAFT_LEN - 1)
    error = refused(at, "target_prepare")
    assert [(request, domain) for request, domain, *_ in error.short] == [(request, DRAFT) for request in REQUESTS]
    build(draft=BATCH.kv_lens[0] + DRAFT_LEN).fsm.target_prepare(BATCH)


def test_targets_own_writes_are_bounded() -> None:
    error = refused(build(target=BATCH.kv_lens[0] - 1), "target_prepare")
    assert {domain for _, domain, *_ in error.short} == {TARGET}
    build(target=BATCH.kv_lens[0]).fsm.target_prepare(BATCH)


def test_step_past_the_pages_is_refused() -> None:
    """A loop that draws more draft tokens than it made room for stops at the last page."""
    at = build(draft=BATCH.kv_lens[0] + DRAFT_LEN)
    at.fsm.target_prepare(BATCH)
    with at.fsm.draft_forward(BATCH):
        for _ in range(DRAFT_LEN):
            at.fsm.draft_step()
        with pytest.raises(WindowOverflow):
            at.fsm.draft_step()
        assert at.fsm.state is Phase.DRAFT_FORWARD
    assert at.fsm.domain is TARGET


def test_rejected_tokens_keep_their_places() -> None:
    """A window of which nothing was accepted is written again in the same places: no page more, and none less."""
    places = BATCH.kv_lens[0] + DRAFT_LEN
    at = build(target=places, draft=places)
    for _ in range(3):
        at.round_trip(BATCH)
    ignored = attrs.evolve(BATCH, kv_lens=tuple(length + 1 for length in BATCH.kv_lens))
    with pytest.raises(WindowOverflow):
        at.fsm.target_prepare(ignored)


def test_without_a_draft_only_the_target_is_asked() -> None:
    window = Window(lambda _: 8, None, draft_len=DRAFT_LEN)
    assert list(window.shortages("target_prepare", BATCH)) == []
    assert list(window.shortages("draft_forward", BATCH)) == []


def test_batch_of_nobody_is_short_of_nothing() -> None:
    window = Window({}.__getitem__, {}.__getitem__, draft_len=DRAFT_LEN)
    assert list(window.shortages("target_prepare", Batch((), (), ()))) == []


def test_each_request_is_asked_at_each_event() -> None:
    """Nothing is kept of what fitted before: a look-up in whatever the engine has by then."""
    room = dict.fromkeys(REQUESTS, 11)
    window = Window(room.__getitem__, room.__getitem__, draft_len=DRAFT_LEN)
    assert list(window.shortages("target_prepare", BATCH)) == []
    room[9] = 10
    assert list(window.shortages("target_prepare", BATCH)) == [(9, DRAFT, 11, 10)]


def test_draft_length_may_change_between_steps() -> None:
    window = Window(lambda _: 8, lambda _: 9, draft_len=3)
    assert len(list(window.shortages("target_prepare", BATCH))) == len(REQUESTS)
    window.draft_len = 1
    assert list(window.shortages("target_prepare", BATCH)) == []


def test_capacity_is_not_asked_of_an_empty_event() -> None:
    at = build()
    with pytest.raises(ValueError, match="needs a batch"):
        at.fsm.target_prepare()
    at.fsm.contracts["target_prepare"][0].admit(at.fsm, "target_prepare", None)


@pytest.mark.parametrize(("longest", "full"), [((8, 8), ()), ((9, 8), (DRAFT,)), ((21, 1), (TARGET, DRAFT)), ((), ())])
def test_admission_counts_every_pool(longest: tuple[int, ...], full: tuple[Domain, ...]) -> None:
    """Pages are counted request by request: two halves of a page are two pages."""
    pools = {TARGET: (geometry(TARGET), 6), DRAFT: (geometry(DRAFT), 8)}  # pages of 4 and of 2 tokens
    assert crowded(pools, longest) == full


def test_toy_managers_hold_what_the_window_counts() -> None:
    """Capacities may come from whatever the manager keeps."""
    draft = manager(DRAFT)
    window = Window(lambda _: 40, lambda request: len(draft.slots[request]) * 2, draft_len=DRAFT_LEN)
    assert {fits for *_, fits in window.shortages("draft_forward", BATCH)} == {6}
