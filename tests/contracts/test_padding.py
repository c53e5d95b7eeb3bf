"""Rows that are nobody's: what they resolve to is their own, in both caches."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from specfsm.backends.backend import shape_in
from specfsm.backends.resource import Buffer
from specfsm.contracts.padding import Padding
from specfsm.domain import Batch, Domain, RowOrder
from specfsm.errors import PaddingViolated, UnknownMetadata
from specfsm.states.phase import Phase
from tests import toys
from tests.toys import BACKENDS, REQUESTS, SIZES, World, manager, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT
DUMMIES = (-1, -2)
BATCH = Batch((*REQUESTS, *DUMMIES), (8,) * 3 + (3, 3), (2,) * 5, dummies=DUMMIES)
IDLE = Batch(DUMMIES, (3, 3), (2, 2), padded=4, dummies=DUMMIES)


def build(backend: str = "toy", order: RowOrder = RowOrder.BATCH, padding: Any = None, **options: Any) -> World:
    """A world in which each dummy has two pages in each cache."""
    at = world(backend, order=order, contracts=[padding or Padding()], **options)
    for held in (at.target, at.draft):
        for dummy in DUMMIES:
            held.allocate(dummy, 2)
    return at


def refused(at: World, event: str, batch: Batch) -> PaddingViolated:
    """The refusal of an event, which changes nothing."""
    return toys.refused(at.fsm, PaddingViolated, lambda: getattr(at.fsm, event)(batch))


def steal(at: World, domain: Domain, dummy: int, page: int) -> None:
    """The manager's table shows `page` as the dummy's second one; who owns it, it says as before."""
    held = at.target if domain is TARGET else at.draft
    owners = held.page_owners("kv")
    held.slots[dummy][1] = page
    held.page_owners = lambda pool: owners  # type: ignore[method-assign]  # what a manager that lost track would say
    held.blocks_version += 1
    if dummy in held.row_of:
        held._write(held.row_of[dummy], dummy)


@pytest.mark.parametrize("order", RowOrder)
@pytest.mark.parametrize("backend", ["toy", "trtllm", "flash_mla", "dsa", "deepseek_v4"])
def test_dummies_with_pages_of_their_own_pass(backend: str, order: RowOrder) -> None:
    at = build(backend, order)
    at.round_trip(BATCH)
    assert at.fsm.state is Phase.RESTORE


@pytest.mark.parametrize("order", RowOrder)
@pytest.mark.parametrize(("domain", "event"), [(TARGET, "target_prepare"), (DRAFT, "draft_forward")])
def test_dummy_in_a_live_requests_page_is_refused(order: RowOrder, domain: Domain, event: str) -> None:
    at = build(order=order)
    held = at.target if domain is TARGET else at.draft
    page = held.slots[3][0]
    steal(at, domain, -2, page)
    if domain is DRAFT:
        at.fsm.target_prepare(BATCH)
    error = refused(at, event, BATCH)
    assert (error.domain, error.row, error.request, error.page, error.owner) == (domain, 4, -2, page, 3)
    assert error.reached == ((4, -2, page, 3),)


def test_step_and_replay_are_asked_too() -> None:
    at = build()
    at.fsm.target_prepare(BATCH)
    at.fsm.draft_forward(BATCH)
    steal(at, DRAFT, -1, at.draft.slots[9][2])
    error = refused(at, "draft_step", BATCH.next_step())
    assert (error.domain, error.request, error.owner) == (DRAFT, -1, 9)
    assert "draft_replay" in Padding.events


def test_free_page_is_not_the_dummys() -> None:
    """What is free may be wanted again: a prefix cache counts on what stands there."""
    at = build()
    page = at.draft.free[0]
    steal(at, DRAFT, -1, page)
    at.fsm.target_prepare(BATCH)
    assert refused(at, "draft_forward", BATCH).reached == ((3, -1, page, None),)


def test_dummy_must_have_a_page_for_each_of_its_tokens() -> None:
    """Behind its pages a row holds the sentinel, which may be page 0. What was judged once is not forgotten."""
    at = build()
    at.fsm.target_prepare(BATCH)
    with at.fsm.draft_forward(BATCH):
        at.fsm.draft_step()
        long = at.fsm.batch()
        assert long is not None
        grown = attrs.evolve(long, kv_lens=(9, 9, 9, 4, 5))  # two pages of the draft's hold 4 tokens
        assert refused(at, "draft_step", grown).reached == ((4, -2, None, None),)
        at.draft.allocate(-2)
        at.fsm.draft_step(grown)


def test_a_verdict_holds_until_the_blocks_move() -> None:
    """The table is looked at once for a batch, and again when something moved."""
    at = build()
    asked: list[str] = []
    tell = at.target.page_owners
    at.target.page_owners = lambda pool: asked.append(pool) or tell(pool)  # type: ignore[method-assign, func-returns-value]  # counts
    for _ in range(3):
        at.fsm.target_prepare(BATCH)
    assert asked == ["kv"]
    at.target.swap()
    at.fsm.target_prepare(BATCH)
    at.fsm.target_prepare(attrs.evolve(BATCH, request_ids=(3, 7, 9, -2, -1)))
    assert asked == ["kv"] * 3


def test_refusal_is_no_verdict() -> None:
    """A batch that was refused is looked at again, and refused again."""
    at = build()
    steal(at, TARGET, -1, at.target.slots[7][0])
    assert refused(at, "target_prepare", BATCH).owner == refused(at, "target_prepare", BATCH).owner == 7


@pytest.mark.parametrize(
    ("backend", "page_0_of", "refuses"),
    [
        ("trtllm", 7, True),
        ("flash_mla", 7, True),
        ("dsa", 7, True),
        ("deepseek_v4", 7, False),  # its sentinels are no places
        ("trtllm", None, False),
        ("trtllm", -9, False),
    ],
)
def test_sentinel_may_be_no_live_page(backend: str, page_0_of: int | None, refuses: bool) -> None:
    """A padded row resolves to what its sentinel names. Engines keep that page free, or give it to a null request."""
    at = world(backend, contracts=[Padding(reserved=[-9])])
    assert at.target.slots[7][0] == 0
    if page_0_of != 7:
        at.target.slots[7].pop(0)
    if page_0_of == -9:
        at.target.slots[-9] = [0]
    batch = Batch(REQUESTS, (4,) * 3, (1,) * 3, padded=5)
    if refuses:
        assert refused(at, "target_prepare", batch).reached == ((3, None, 0, 7), (4, None, 0, 7))
    else:
        at.fsm.target_prepare(batch)


def test_batch_without_padding_asks_nothing() -> None:
    at = build()
    at.target.page_owners = at.draft.page_owners = None  # type: ignore[assignment, method-assign]  # would fail if asked
    at.round_trip(attrs.evolve(BATCH, dummies=()))
    at.fsm.contracts["target_prepare"][0].admit(at.fsm, "target_prepare", None)


def test_manager_must_tell_whose_its_pages_are() -> None:
    at = build(draft=Silent(manager(DRAFT)))
    at.fsm.target_prepare(BATCH)
    with pytest.raises(UnknownMetadata, match=r"the draft manager Silent .*\n.*lacks page_owners"):
        at.fsm.draft_forward(BATCH)


class Silent:
    """A manager that does not tell."""

    def __init__(self, whole: Any) -> None:
        for name in ("geometry", "generation", "blocks_version", "host_block_offsets", "pool_pointers", "arrange"):
            setattr(self, name, getattr(whole, name))


def test_pool_of_which_nothing_is_told_is_not_judged() -> None:
    at = build()
    steal(at, TARGET, -1, at.target.slots[7][0])
    at.target.page_owners = lambda pool: None  # type: ignore[method-assign]  # no pool
    at.fsm.target_prepare(BATCH)


def test_manager_may_tell_in_a_list() -> None:
    at = build()
    at.fsm.target_prepare(BATCH)
    steal(at, TARGET, -1, at.target.slots[7][0])
    owners = at.target.page_owners("kv").tolist()
    at.target.page_owners = lambda pool: owners  # type: ignore[assignment, method-assign, return-value]
    assert refused(at, "target_prepare", BATCH).owner == 7


def test_idle_batch_is_an_ordinary_batch() -> None:
    """Dummies alone, and padded rows behind them, run through both caches."""
    at = build("deepseek_v4")
    at.round_trip(IDLE)
    assert at.fsm.batch(TARGET) is IDLE


# What padded rows hold, whatever the batch before them was.

ALL = (*REQUESTS, 11, 13)
LONGEST = Batch(ALL, (6,) * 5, (3,) * 5, num_contexts=2)

SMALLER = st.integers(0, 5).flatmap(
    lambda live: st.builds(
        Batch,
        st.permutations(ALL).map(lambda order: order[:live]),
        st.lists(st.integers(3, 6), min_size=live, max_size=live),
        st.lists(st.integers(1, 3), min_size=live, max_size=live),
        st.integers(0, live),
        padded=st.integers(live, 5),
    )
)


def behind(resource: Buffer, contents: torch.Tensor, batch: Batch) -> torch.Tensor:
    """What stands in the entries of no request."""
    entries = {"S": len(batch), "T": batch.num_tokens, "S*C": len(batch) * (1 + SIZES.max_draft_len)}
    for axis, name in enumerate(resource.shape):
        if name in entries:
            return contents.narrow(axis, entries[name], contents.shape[axis] - entries[name])  # type: ignore[index]  # a name
    return contents[:0]


def require_sentinels(at: World, domain: Domain) -> int:
    """Every buffer that follows rows, host halves included, holds its sentinel behind the batch; how many there are."""
    binding = at.fsm.bindings[domain]
    batch, checked = at.fsm.batch(domain), 0
    assert batch is not None
    for place, resource in enumerate(at.fsm.backend.resources):
        if isinstance(resource, Buffer) and resource.follows_rows and domain in resource.domains:
            for contents in filter(lambda each: each is not None, (binding.values[place], binding.hosts.get(place))):
                assert tuple(contents.shape) == shape_in(resource, binding.view.axes)
                assert (behind(resource, contents, batch) == resource.sentinel).all(), f"{resource.name} [{domain}]"
            checked += 1
    return checked


@pytest.mark.parametrize("order", RowOrder)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "toy"])
@given(batch=SMALLER, last=SMALLER)
@settings(max_examples=15, deadline=None, phases=[Stage.reuse, Stage.generate])  # to shrink a failure takes minutes
def test_padded_rows_hold_the_sentinel_in_one_launch(backend: str, order: RowOrder, batch: Batch, last: Batch) -> None:
    """A batch shrinks: rows that were full a phase ago are nobody's, in every table, by the very launch that writes the
    live ones. The views of what the phase is run with have the padded size."""
    at = world(backend, order=order, contracts=[])
    for held in (at.target, at.draft):
        for request in ALL:
            held.allocate(request, 0 if request in REQUESTS else 3)
    at.round_trip(LONGEST)
    tables = 0
    for each in (batch, last):
        for event, domain in (("target_prepare", TARGET), ("draft_forward", DRAFT), ("draft_step", DRAFT)):
            masks: list[int] = at.fsm.bindings[domain].launch.masks  # type: ignore[union-attr]  # the toys' launch
            masks.clear()
            getattr(at.fsm, event)(*(() if event == "draft_step" else (each,)))
            assert len(masks) <= 1
            tables += require_sentinels(at, domain)
            assert at.metadata.kv_lens_cuda_runtime.shape == (each.rows,)
        at.fsm.restore()
        require_sentinels(at, TARGET)
    assert tables >= 2 * 3 * 4
