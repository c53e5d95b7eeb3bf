"""Public reports of rows that were nobody's, as scenarios: the order that failed is refused, the mended one passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from specfsm import (
    DSA,
    Backend,
    Batch,
    Domain,
    IncompleteBackend,
    Orchestrator,
    Padding,
    PaddingViolated,
    Phase,
    RowOrder,
    Sizes,
    Staged,
    StaleResource,
    Table,
)
from tests.toys import Manager, manager

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT
SIZES = Sizes(max_sequences=5, max_tokens=16, max_draft_len=3)
FULL = Batch((7, 3, 9), (8, 8, 8), (2, 2, 2))
PADDED = evolve(FULL, padded=5)
"""The same requests, run with the five rows of a captured graph."""


class Metadata:
    """The engine's own."""


def engine(backend: Backend, order: RowOrder = RowOrder.BATCH, **options: Any) -> Orchestrator:
    """A machine over two caches in which requests 7, 3 and 9 have their pages."""
    metadata, target, draft = Metadata(), manager(TARGET, order), manager(DRAFT, order)
    backend.allocate(metadata, target, draft, SIZES, "cpu")
    return Orchestrator(metadata, backend=backend, target=target, draft=draft, **options)


def engines_own(view: Any, buffer: torch.Tensor) -> None:
    """The engine writes it, and reports that."""
    raise AssertionError("in guard mode nothing is refreshed")


# SGLang #26292.


POOL_INDICES = (
    Table("req_pool_indices", reads=("batch",), dtype="int32", shape=("S",), sentinel=0, refresh=engines_own),
    Table("seq_lens", reads=("batch", "lengths"), dtype="int32", shape=("S",), sentinel=1, refresh=engines_own),
)


def run_graph(fsm: Orchestrator, batch: Batch, domain: Domain, *, clears: bool = True) -> None:
    """One graph runner fills its buffers for a batch; one that `clears` sees to the indices of padded rows."""
    fsm.announce(batch, domain)
    lens, indices = fsm.value("seq_lens", domain), fsm.value("req_pool_indices", domain)
    lens.fill_(1)[: len(batch)] = torch.tensor(batch.kv_lens)
    fsm.publish("seq_lens", lens, domain)
    if clears:
        indices.zero_()[: len(batch)] = torch.tensor(batch.request_ids)
        fsm.publish("req_pool_indices", indices, domain)
    if domain is TARGET:
        fsm.target_prepare(batch)
    else:
        fsm.draft_forward(batch)


@pytest.mark.parametrize("domain", Domain)
def test_every_runner_clears_the_pool_indices_of_padded_rows(domain: Domain) -> None:
    """https://github.com/sgl-project/sglang/pull/26292

    A replay with five requests leaves their rows in the captured buffer. The next has two, padded to five: the runner
    pads the lengths, but not the index that says whose row of the pool each is, so that the padded rows read through
    what the earlier replay left. One of five runners had it right. Here all run by one declaration: what padding moves
    must be written on every path.
    """
    fsm = engine(Backend("runner", POOL_INDICES), guard=True)
    five = Batch((7, 3, 9, 4, 6), (8,) * 5, (2,) * 5)
    for each in Domain if domain is DRAFT else (TARGET,):
        run_graph(fsm, five, each)
    if domain is DRAFT:
        fsm.restore()
    two = Batch((7, 3), (8, 8), (2, 2), padded=5)
    if domain is DRAFT:
        run_graph(fsm, two, TARGET)
    with pytest.raises(StaleResource) as caught:
        run_graph(fsm, two, domain, clears=False)
    assert (caught.value.resource, caught.value.domain, [*caught.value.moved]) == (
        "req_pool_indices",
        domain,
        ["batch"],
    )
    assert fsm.value("req_pool_indices", domain).tolist() == [7, 3, 9, 4, 6], "the rows of the earlier replay"

    run_graph(fsm, two, domain)
    assert fsm.value("req_pool_indices", domain).tolist() == [7, 3, 0, 0, 0]


def test_padding_alone_moves_the_pool_indices() -> None:
    """The same requests and lengths, run with more rows, are another batch."""
    fsm = engine(Backend("runner", POOL_INDICES), guard=True)
    run_graph(fsm, FULL, TARGET)
    with pytest.raises(StaleResource) as caught:
        run_graph(fsm, PADDED, TARGET, clears=False)
    assert caught.value.resource == "req_pool_indices"


# SGLang #26880.


def fill_lens(view: Any, host: torch.Tensor) -> torch.Tensor:
    """Padded rows have a length of 1, as the kernels of this engine want it."""
    host.fill_(1)[: len(view.batch)] = torch.tensor(view.batch.kv_lens)
    return host


def sum_lens(view: Any, buffer: torch.Tensor) -> torch.Tensor:
    return torch.sum(view.value("seq_lens"), 0, keepdim=True, dtype=torch.int32, out=buffer)


def summed(*reads: str) -> Backend:
    """Lengths and their sum, which says how many entries the kernels' index list has."""
    total = Table("seq_lens_sum", reads=reads, dtype="int32", shape=(1,), refresh=sum_lens, on_device=True)
    lens = Staged("seq_lens", reads=("batch", "lengths"), dtype="int32", shape=("S",), sentinel=1, fill=fill_lens)
    return Backend("summed", (lens, total))


def test_sum_of_lengths_counts_padded_rows() -> None:
    """https://github.com/sgl-project/sglang/pull/26880

    The lengths are padded to the captured size, and padded rows count one token each; their sum is kept from the rows
    that are live, so that what is sized by it lacks the padded rows' entries. A sum that is derived from lengths alone
    cannot know of padding, and does not build; one derived from the padded buffer is stale when padding moves.
    """
    with pytest.raises(IncompleteBackend) as open_question:
        summed("lengths")
    assert open_question.value.offenders == (
        "seq_lens_sum follows lengths, but not batch: which rows are padded is the batch's",
    )

    kept = engine(summed("seq_lens"))
    kept.target_prepare(FULL)
    assert kept.value("seq_lens_sum").item() == 3 * 8 + 2 * 1
    forgetful = engine(summed("seq_lens"), drop=["seq_lens_sum"])
    with pytest.raises(StaleResource) as caught:
        forgetful.target_prepare(PADDED)
    assert caught.value.resource == "seq_lens_sum"

    kept.target_prepare(Batch((7,), (8,), (2,), padded=5))
    assert kept.value("seq_lens_sum").item() == 8 + 4 * 1


def test_sum_is_stale_when_only_padding_moved() -> None:
    """The engine that writes the sum itself, and sees no reason to: no live row is another."""
    fsm = engine(summed("seq_lens"), guard=True)
    for batch, writes in ((FULL, True), (PADDED, False)):
        fsm.announce(batch, TARGET)
        fsm.publish("seq_lens", fsm.value("seq_lens"))
        if writes:
            fsm.publish("seq_lens_sum", fsm.value("seq_lens_sum"))
            fsm.target_prepare(batch)
    with pytest.raises(StaleResource) as caught:
        fsm.target_prepare(PADDED)
    assert (caught.value.resource, [*caught.value.moved]) == ("seq_lens_sum", ["batch"])
    fsm.publish("seq_lens_sum", fsm.value("seq_lens_sum"))
    fsm.target_prepare(PADDED)


# vllm-ascend #15417.


SLOTS = (
    Table(
        "slot_mapping",
        reads=("blocks", "batch", "lengths", "layout"),
        dtype="int64",
        shape=("T",),
        sentinel=-1,
        refresh=engines_own,
    ),
    Table("indexer_slots", reads=("slot_mapping",), dtype="int64", shape=("T",), sentinel=-1, refresh=engines_own),
)
DUMMY = Batch((-1,), (2,), (2,), dummies=[-1])


def invalidate(fsm: Orchestrator) -> None:
    """What the dummy batch would write goes nowhere."""
    fsm.publish("slot_mapping", fsm.value("slot_mapping").fill_(-1))


def derive(fsm: Orchestrator) -> None:
    """The backend's own copy."""
    fsm.publish("indexer_slots", fsm.value("indexer_slots").copy_(fsm.value("slot_mapping")))


def test_slots_are_invalidated_before_copies_are_derived() -> None:
    """https://github.com/vllm-project/vllm-ascend/pull/15417

    A rank without requests runs a dummy batch. The general slots are made invalid, but only after the backend derived
    its own from them: the dummy's forward writes through the slots of a request that has left. Right action, wrong
    order: what is derived from a buffer that is written afterwards is stale.
    """
    fsm = engine(Backend("ascend", SLOTS), guard=True)
    left = Batch((7,), (8,), (8,))
    fsm.announce(left, TARGET)
    fsm.publish("slot_mapping", fsm.value("slot_mapping").copy_(torch.arange(1498, 1514)))
    derive(fsm)
    fsm.target_prepare(left)

    fsm.announce(DUMMY, TARGET)
    derive(fsm)
    invalidate(fsm)
    with pytest.raises(StaleResource) as caught:
        fsm.target_prepare(DUMMY)
    assert (caught.value.resource, caught.value.domain, [*caught.value.moved]) == (
        "indexer_slots",
        TARGET,
        ["slot_mapping"],
    )
    assert 1498 in fsm.value("indexer_slots").tolist(), "what the dummy would have written through"

    derive(fsm)  # after it, as it should be
    fsm.target_prepare(DUMMY)
    assert set(fsm.value("indexer_slots").tolist()) == {-1}


# vLLM #56734.


def former(draft: Manager, taken_by: int | None) -> int:
    """Request 9 leaves the draft's cache; its row stays as it is, and the dummy is looked up there. The page that the
    row names first, which `taken_by` holds now, or nobody."""
    pages = draft.slots.pop(9)
    draft.row_of[-1] = draft.row_of.pop(9)
    if taken_by is None:
        draft.free += pages
    else:
        draft.slots[taken_by] = pages
    draft.blocks_version += 1
    return pages[0]


@pytest.mark.parametrize("taken_by", [None, 21], ids=["kept by a prefix cache", "another request's"])
def test_idle_ranks_dummy_writes_through_no_former_row(taken_by: int | None) -> None:
    """https://github.com/vllm-project/vllm/pull/56734

    A rank without requests steps with dummies. For the target they are masked; the draft's own steps look their rows up
    in tables that persist, where a request that has left once stood, and write into its first page. Later requests find
    that page by their prefix: the target's rows in it are right, the draft's are rubbish, and not one drafted token is
    accepted until the caches are reset.
    """
    fsm = engine(DSA(), RowOrder.SLOT, contracts=[Padding()])
    target, draft = fsm.bindings[TARGET].manager, fsm.bindings[DRAFT].manager
    assert isinstance(target, Manager)
    assert isinstance(draft, Manager)
    target.allocate(-1, 2)
    page = former(draft, taken_by)

    fsm.target_prepare(DUMMY)
    with pytest.raises(PaddingViolated) as caught:
        fsm.draft_forward(DUMMY)
    error = caught.value
    assert (error.domain, error.row, error.request, error.page, error.owner) == (DRAFT, 0, -1, page, taken_by)
    assert fsm.state is Phase.TARGET_PREPARE

    del draft.row_of[-1]
    draft.allocate(-1, 2)
    with fsm.draft_forward(DUMMY):
        for _ in range(2):
            table = fsm.value("block_table", DRAFT)
            assert set(table[table >= 0].tolist()) <= set(draft.slots[-1])
            assert fsm.value("slot_mapping_fp8", DRAFT)[DUMMY.num_tokens :].eq(-1).all()
            fsm.draft_step()
    assert fsm.domain is TARGET
