"""The words of the field: domains, batches and what moves between them, geometry, managers."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specfsm.domain import (
    INPUTS,
    AddressSpace,
    Batch,
    Domain,
    Geometry,
    KVManager,
    OwningKVManager,
    RowOrder,
    UnifiedCache,
    Unit,
)
from tests.toys import BATCH, OTHER, geometry, manager


def test_domains() -> None:
    """The value indexes every per-domain list."""
    assert [str(domain) for domain in Domain] == ["target", "draft"]
    assert [domain.other for domain in Domain] == [Domain.DRAFT, Domain.TARGET]
    assert ["a", "b"][Domain.DRAFT] == "b"


BAD_BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "uneven fields": ({"kv_lens": (1, 2)}, "one entry a request in each field"),
    "fewer tokens": ({"tokens": (1, 1)}, "one entry a request in each field"),
    "a request twice": ({"request_ids": (1, 2, 1)}, "a request stands twice in the batch"),
    "no tokens": ({"tokens": (1, 0, 1)}, "request 2 has 0 tokens in this phase, but a KV length of 3"),
    "more tokens than cache": ({"tokens": (1, 1, 4)}, "request 3 has 4 tokens"),
    "more contexts than requests": ({"num_contexts": 4}, "4 contexts in a batch of 3 requests"),
    "negative contexts": ({"num_contexts": -1}, "num_contexts"),
    "fewer rows than requests": ({"padded": 2}, "a batch of 3 requests cannot be run with 2 rows"),
    "a dummy that is no request": ({"dummies": {2, 4}}, r"the dummies \[4\] are no requests of the batch"),
}


@pytest.mark.parametrize("fault", BAD_BATCHES)
def test_impossible_batch_is_refused(fault: str) -> None:
    change, message = BAD_BATCHES[fault]
    with pytest.raises(ValueError, match=message):
        Batch(**{"request_ids": (1, 2, 3), "kv_lens": (3, 3, 3), "tokens": (1, 1, 1), **change})


def test_batch_takes_any_sequence() -> None:
    batch = Batch(range(2), [5, 6], iter((1, 2)))
    assert (len(batch), batch.num_tokens) == (2, 3)
    assert batch == Batch((0, 1), (5, 6), (1, 2))


@pytest.mark.parametrize("source", OTHER)
def test_batch_moves_exactly_what_differs(source: str) -> None:
    assert OTHER[source].moved(BATCH) == (source,)


def test_moves_of_batches() -> None:
    """The first moves everything it feeds, the same moves nothing, a change of contexts is a change of the batch."""
    assert BATCH.moved(None) == ("batch", "lengths", "layout")
    assert BATCH.moved(BATCH) == BATCH.moved(attrs.evolve(BATCH)) == ()
    assert attrs.evolve(BATCH, num_contexts=2).moved(BATCH) == ("batch",)
    assert set(BATCH.moved(None)) < set(INPUTS)


def test_padding_is_part_of_the_batch() -> None:
    """Who is nobody, and how many rows there are, is an input; to say what is so anyway moves nothing."""
    assert attrs.evolve(BATCH, padded=4).moved(BATCH) == BATCH.moved(attrs.evolve(BATCH, padded=4)) == ("batch",)
    assert attrs.evolve(BATCH, dummies={9}).moved(BATCH) == ("batch",)
    assert attrs.evolve(BATCH, padded=len(BATCH)).moved(BATCH) == ()


def test_rows_are_live_dummies_or_padded() -> None:
    batch = Batch((7, -1, 9), (8, 4, 8), (2, 2, 2), 1, padded=5, dummies=[-1])
    assert (len(batch), batch.rows, batch.live_rows, batch.dummy_rows) == (3, 5, (0, 2), (1,))
    assert (BATCH.rows, BATCH.live_rows, BATCH.dummy_rows) == (3, (0, 1, 2), ())
    after = batch.next_step()
    assert after.request_ids == (-1, 9, 7)
    assert (after.rows, after.live_rows, after.dummy_rows) == (5, (1, 2), (0,))


BATCHES = st.integers(0, 6).flatmap(
    lambda n: st.builds(
        Batch,
        st.permutations(range(n)),
        st.lists(st.integers(3, 50), min_size=n, max_size=n),
        st.lists(st.integers(1, 3), min_size=n, max_size=n),
        st.integers(0, n),
    )
)


@given(BATCHES)
def test_next_step_is_one_token_each_generations_first(batch: Batch) -> None:
    """(generation rows, context rows), each one token longer; then every row generates."""
    after = batch.next_step()
    cut = batch.num_contexts
    assert after.request_ids == batch.request_ids[cut:] + batch.request_ids[:cut]
    assert dict(zip(after.request_ids, after.kv_lens, strict=True)) == {
        request: length + 1 for request, length in zip(batch.request_ids, batch.kv_lens, strict=True)
    }
    assert set(after.tokens) <= {1}
    assert after.num_contexts == 0
    assert after.next_step().request_ids == after.request_ids


@pytest.mark.parametrize(
    "name", [field.name for field in attrs.fields(Geometry) if field.name not in ("row_order", "dtype")]
)
def test_geometry_has_no_empty_axis(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        attrs.evolve(geometry(Domain.TARGET), **{name: 0})


def test_geometry_counts() -> None:
    made = geometry(Domain.TARGET)
    assert (made.pages_per_slot, made.max_tokens_per_seq) == (6, 28)
    assert [made.scale(unit) for unit in (Unit.SLOT, Unit.PAGE, Unit.TOKEN)] == [1, 6, 4]
    assert [made.blocks(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
    with pytest.raises(KeyError):
        made.scale(Unit.BLOCK)  # a name, not a place: nothing multiplies it


@pytest.mark.parametrize("order", RowOrder)
def test_toy_manager_is_one(order: RowOrder) -> None:
    """What the suites run on is what the protocol asks for."""
    assert isinstance(manager(Domain.TARGET, order), KVManager)
    assert isinstance(manager(Domain.TARGET, order), OwningKVManager)
    assert not isinstance(object(), KVManager)


def test_address_space_reads_as_pool_and_unit() -> None:
    assert str(AddressSpace("kv", Unit.PAGE)) == "kv/page"


@pytest.mark.parametrize("reason", ["", " \n"])
def test_unified_cache_needs_a_reason(reason: str) -> None:
    with pytest.raises(ValueError, match="needs the reason"):
        UnifiedCache(reason)
