"""The draft in the target's cache, in layers of its own: nothing is switched, and the tokens are the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from specfsm.decode.attention import FLAVOURS
from specfsm.decode.loop import DecodeLoop
from specfsm.domain import Domain, RowOrder
from specfsm.errors import StaleResource
from tests.decode.conftest import Churn, churn, draft, lossless, settings, target

BACKENDS = tuple(FLAVOURS)
REASON = "the draft is one more layer of the checkpoint"


def unified(backend: str = "trtllm", kind: str = "early-exit", **options: Any) -> DecodeLoop:
    order = tuple(RowOrder)[options.get("draft_len", 3) % 2]
    return DecodeLoop(target(), draft(kind), settings(backend, order, unified=REASON, **options))


@pytest.mark.parametrize(
    ("graphs", "overlap", "kind"),
    [("off", True, "head"), ("whole", False, "early-exit"), ("whole", True, "head"), ("draft", True, "early-exit")],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_draft_in_the_targets_cache_changes_no_token(backend: str, graphs: str, overlap: bool, kind: str) -> None:
    """Requests join, finish and abort, pages move: every token is transformers' own."""
    loop = unified(backend, kind, graphs=graphs, overlap=overlap, draft_len=2 if kind == "head" else 3)
    result = churn(loop)
    lossless(result)
    assert (loop.replays > 0) == (graphs != "off")
    assert (result.ahead > 0) == overlap
    assert min(result.moved, result.mixed) > 0
    assert kind == "head" or 0 < result.accepted < result.proposed


@cache
def separate(backend: str, kind: str) -> Churn:
    return churn(DecodeLoop(target(), draft(kind), settings(backend, tokens_per_block=8)))


@pytest.mark.parametrize(
    ("backend", "kind"), [("trtllm", "head"), ("trtllm", "self"), ("flash_mla", "early-exit"), ("dsa", "head")]
)
def test_draft_guesses_as_well_as_in_a_cache_of_its_own(backend: str, kind: str) -> None:
    """Step by step the same tokens are proposed and accepted: it reads its own layers, and all of its own rows. (In
    deepseek_v4 the target's cache gives it compressed entries beside its window, so that it reads more.)"""
    shared = churn(unified(backend, kind, tokens_per_block=8))
    assert shared.emissions == separate(backend, kind).emissions
    assert shared.rate == 1.0 if kind == "self" else shared.rate < 1.0


def test_one_cache_of_all_layers_serves_both() -> None:
    """Declared with its reason, never switched, and counted once at admission."""
    loop = unified()
    model = loop.draft
    assert model is not None
    assert [each.geometry.num_layers for each in loop.caches] == [target().layers + model.layers]
    assert loop.fsm.unified is not None
    assert loop.fsm.unified.reason == REASON
    assert REASON in str(loop.fsm.explain())
    seen = set()
    forward = loop.forward_pass

    class Seen(forward):  # type: ignore[valid-type, misc]  # a class that is chosen when it runs
        def __init__(self, *args: Any, first_layer: int = 0) -> None:
            super().__init__(*args, first_layer=first_layer)
            seen.add((first_layer, loop.fsm.domain, id(self.metadata.kv_cache_manager)))

    loop.forward_pass = Seen
    churn(loop)
    assert seen == {(first, Domain.TARGET, id(loop.cache)) for first in (0, target().layers)}


@pytest.mark.parametrize("graphs", ["off", "whole", "draft"])
def test_missed_refresh_is_refused_in_a_unified_cache_too(graphs: str) -> None:
    """There is no switch to forget, but lengths move between target and draft as ever."""
    loop = DecodeLoop(
        target(), draft("self"), settings(unified=REASON, graphs=graphs), drop=[("kv_lens_cuda", Domain.DRAFT)]
    )
    loop.submit([1, 2, 3], 8)
    with pytest.raises(StaleResource, match=r"kv_lens_cuda \[target\]"):
        loop.run()


def test_pages_of_two_kinds_do_not_fit_one_cache() -> None:
    """One line with both sizes, before anything is allocated."""
    with pytest.raises(
        ValueError, match="the target's tokens take 2 x 16 elements and the draft's 3 x 8: give"
    ) as caught:
        unified(kind="other")
    assert "\n" not in str(caught.value)


def test_unified_cache_needs_its_reason() -> None:
    with pytest.raises(ValueError, match="needs the reason why the draft shares the target's cache"):
        DecodeLoop(target(), draft("self"), settings(unified=" "))


def test_target_alone_has_no_draft_layers() -> None:
    loop = DecodeLoop(target(), None, settings(unified=REASON))
    assert loop.cache.geometry.num_layers == target().layers
