"""A step of dummies alone: it runs through both caches as any batch does, and no live page is another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specfsm.decode.cache import PagedKVCache
from specfsm.decode.loop import DecodeLoop
from specfsm.decode.verify import Sampler
from specfsm.domain import Domain, RowOrder
from specfsm.errors import PaddingViolated
from tests.decode.conftest import draft, prompt, reference, settings, target
from tests.decode.test_loop import BACKENDS, MODES

ORDERS = tuple(RowOrder)
IDLES = {
    "eager": {"idles": True},
    **MODES,
    "overlap": {"overlap": True, "idles": True},
    "unified": {"idles": True, "unified": "one pool for all"},
}


def others(cache: PagedKVCache, dummies: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Every page of a cache that is no dummy's, free ones too, bit by bit: a former request's may be wanted again."""
    mine = torch.isin(cache.page_owners("kv"), torch.tensor(dummies))
    pools = {"kv": cache.pool.transpose(0, 1), **cache.extra}
    return {name: pool[:, ~mine].contiguous().view(torch.uint8).clone() for name, pool in pools.items()}


def idle(loop: DecodeLoop, rows: int = 1) -> None:
    """An idle step, which changes no page but the dummies', and those in both caches."""
    before = [others(cache, loop.dummies) for cache in loop.caches]
    pools = [cache.pool.clone() for cache in loop.caches]
    loop.idle(rows)
    for cache, was in zip(loop.caches, before, strict=True):
        now = others(cache, loop.dummies)
        assert all(torch.equal(now[name], pages) for name, pages in was.items())
    assert not any(torch.equal(cache.pool, was) for cache, was in zip(loop.caches, pools, strict=True))


@pytest.mark.parametrize("mode", IDLES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_idle_steps_touch_no_live_page(backend: str, mode: str) -> None:
    """Before the first request, between the steps of two, and when they have left. Not a token is another."""
    order = ORDERS[len(mode) % 2]
    loop = DecodeLoop(target(), draft("early-exit"), settings(backend, order, **IDLES[mode]))
    prompts = [prompt(60, 5), prompt(61, 9)]
    scribble(loop)
    idle(loop)
    outputs: dict[int, list[int]] = {loop.submit(each, 12): [] for each in prompts}
    while loop.running or loop.waiting or loop.pending or loop._unreported:
        for emission in loop.step():
            outputs[emission.request] += emission.tokens
        scribble(loop)
        idle(loop, len(loop.running) or 2)
    assert [*outputs.values()] == [reference(each, 12) for each in prompts]
    for _ in range(3):
        scribble(loop)
        idle(loop)
    batch = loop.fsm.batch(Domain.DRAFT)
    assert batch is not None
    assert batch.live_rows == ()
    assert len(batch.dummies) == batch.rows == loop.settings.padded(1)
    assert (loop.replays > 0) == (loop.settings.graphs != "off")


def scribble(loop: DecodeLoop) -> None:
    """What an idle step writes is seen: its own pages hold something else before."""
    for cache in loop.caches:
        for dummy in loop.dummies:
            rows = [cache._slot_of[block] for block in cache.block_ids(dummy)]
            cache.pool[rows] = 0.5


@pytest.mark.parametrize("kind", ["early-exit", "head"])
@pytest.mark.parametrize("options", [{"idles": True}, {"graphs": "whole", "overlap": True}], ids=["eager", "whole"])
def test_drawn_tokens_survive_an_idle_step(options: dict[str, Any], kind: str) -> None:
    """What a request's next step needs of its last one is not in the buffers that the dummies run in."""
    outputs = []
    for idles in (False, True):
        loop = DecodeLoop(target(), draft(kind), settings(**options), sampler=Sampler(0.8, seed=5))
        loop.submit(prompt(62, 6), 14)
        written: list[int] = []
        while loop.running or loop.waiting or loop.pending or loop._unreported:
            written += [token for emission in loop.step() for token in emission.tokens]
            if idles:
                loop._unreported += loop._drain()
                state = loop.sampler.generator.get_state()
                loop.idle()
                loop.sampler.generator.set_state(state)
            else:
                loop._unreported += loop._drain()
        outputs.append(written)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 14


def test_idle_without_draft_and_with_draft_length_zero() -> None:
    alone = DecodeLoop(target(), None, settings(idles=True))
    idle(alone, rows=3)
    loop = DecodeLoop(target(), draft("early-exit"), settings(idles=True))
    loop.draft_len = 0
    loop.idle()
    assert loop.fsm.batch(Domain.DRAFT) is None
    assert loop.fsm.batch(Domain.TARGET) is not None


@pytest.mark.parametrize(("options", "rows"), [({}, 1), ({"idles": True}, 4), ({"idles": True}, 0)])
def test_idle_needs_dummies(options: dict[str, Any], rows: int) -> None:
    loop = DecodeLoop(target(), draft("early-exit"), settings(**options))
    with pytest.raises(
        ValueError, match=rf"an idle step of {rows} rows needs as many dummies, and there are {3 * bool(options)}"
    ):
        loop.idle(rows)


@pytest.mark.parametrize("domain", Domain)
def test_dummy_that_lost_its_pages_is_refused(domain: Domain) -> None:
    """A planted fault: the dummy's first page was given to a request. The idle step is refused, the request goes on."""
    loop = DecodeLoop(target(), draft("early-exit"), settings(order=RowOrder.SLOT, idles=True))
    request = loop.submit(prompt(63, 6), 8)
    written = [token for emission in loop.step() for token in emission.tokens]
    cache, dummy = loop.caches[domain], loop.dummies[0]
    block = cache.block_ids(request)[0]
    own = cache._owned[dummy].blocks[0]
    cache._owned[dummy].blocks[0] = block
    cache._changed(dummy)
    with pytest.raises(PaddingViolated) as caught:
        loop.idle()
    assert (caught.value.domain, caught.value.request, caught.value.owner) == (domain, dummy, request)
    cache._owned[dummy].blocks[0] = own
    cache._changed(dummy)
    scribble(loop)
    idle(loop)
    while loop.running:
        written += [token for emission in loop.step() for token in emission.tokens]
    assert written == reference(prompt(63, 6), 8)
