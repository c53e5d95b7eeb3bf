"""The loop: speculation changes nothing but the speed, whatever happens to requests, pages and pools meanwhile."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specfsm.decode.attention import FLAVOURS
from specfsm.decode.cache import PoolExhausted
from specfsm.decode.loop import DecodeLoop
from specfsm.domain import Batch, Domain, RowOrder
from specfsm.errors import ContentsViolated, IllegalTransition, RetiredRequest, StaleResource, WindowOverflow
from specfsm.orchestrator import Orchestrator
from tests.decode.conftest import (
    ARRIVALS,
    DRAFT_PAGE,
    DRAFTS,
    PAGE,
    SPARSE,
    Arrival,
    Churn,
    churn,
    draft,
    exchange,
    lossless,
    places,
    plain,
    prompt,
    reference,
    settings,
    target,
)

BACKENDS = tuple(FLAVOURS)
ORDERS = tuple(RowOrder)
TIGHT = {"draft_blocks": 8}
"""A draft's pool that holds fewer of the arrivals than the target's."""


# Losslessness.


@pytest.mark.parametrize("draft_len", [1, 2, 3, 5])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_speculation_changes_no_token(backend: str, order: RowOrder, draft_len: int) -> None:
    """Requests join, finish and abort, pages move between steps, the draft's pool is the smaller one: every token is
    transformers' own."""
    loop = DecodeLoop(target(), draft("early-exit"), settings(backend, order, draft_len=draft_len, **TIGHT))
    result = churn(loop)
    lossless(result)
    assert 0 < result.accepted < result.proposed, "neither acceptance nor rejection was met"
    assert min(result.moved, result.mixed, result.held_back) > 0, "the batch was too calm"


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_draft_is_lossless(backend: str, kind: str) -> None:
    """A draft may be the target itself, of another shape, or a head that reads the target's states."""
    result = churn(DecodeLoop(target(), draft(kind), settings(backend, ORDERS[len(kind) % 2])))
    lossless(result)
    assert result.rate == 1.0 if kind == "self" else result.accepted < result.proposed


MODES = {
    "overlap": {"overlap": True},
    "whole": {"graphs": "whole"},
    "draft": {"graphs": "draft"},
    "whole, overlap": {"graphs": "whole", "overlap": True},
    "draft, overlap": {"graphs": "draft", "overlap": True},
    "padded": {"graphs": "whole", "graph_sizes": (3,)},
}


@pytest.mark.parametrize("draft_len", [1, 2, 3])
@pytest.mark.parametrize("overlap", [False, True], ids=["in step", "overlap"])
@pytest.mark.parametrize("graphs", ["off", "whole", "draft"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_graphs_and_overlap_change_no_token(backend: str, graphs: str, overlap: bool, draft_len: int) -> None:
    """The same batch; its steps run eagerly, or are recorded and replayed, and are prepared while another one runs."""
    order, kind = ORDERS[draft_len % 2], "head" if draft_len == 2 else "early-exit"
    options = {"graphs": graphs, "overlap": overlap, "draft_len": draft_len}
    loop = DecodeLoop(target(), draft(kind), settings(backend, order, **options))
    result = churn(loop)
    lossless(result)
    recorded = [step.graph for step in loop.steps.values() if step.graph is not None]
    assert (loop.replays > 0, len(recorded) > 0) == (graphs != "off", graphs != "off")
    assert {bool(graph.reads[Domain.TARGET]) for graph in recorded} <= {graphs == "whole"}
    assert (result.ahead > 0) == overlap


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_rows_change_no_token(backend: str) -> None:
    """One graph for every batch: dummies fill its rows."""
    loop = DecodeLoop(target(), draft("early-exit"), settings(backend, **MODES["padded"]))
    lossless(churn(loop))
    assert loop.replays > 0
    assert list(loop.steps) == [(3, 3)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_target_alone_is_lossless(backend: str, order: RowOrder) -> None:
    """Without a draft the loop is plain greedy decoding, one token a request and step."""
    result = churn(DecodeLoop(target(), None, settings(backend, order)))
    lossless(result)
    assert (result.proposed, {len(emission.tokens) for emission in result.emissions}) == (0, {1})


@pytest.mark.parametrize("kind", ["early-exit", "head"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_request_at_a_time_and_all_at_once_agree(backend: str, kind: str) -> None:
    """Nothing of a request depends on who shares its batch, its pools and its tables."""
    prompts = [prompt(seed, 1 + 3 * seed) for seed in range(4)]
    outputs = []
    for rows in (1, 4):
        loop = DecodeLoop(target(), draft(kind), settings(backend, max_requests=rows))
        for each in prompts:
            loop.submit(each, 10)
        outputs.append(loop.run())
    assert outputs[0] == outputs[1] == {number + 1: reference(each, 10) for number, each in enumerate(prompts)}


def test_transformers_own_generation_agrees() -> None:
    """The reference that everything here is compared with is what `generate` writes."""
    tokens = torch.tensor([prompt(10, 9)])
    generated = plain().generate(tokens, max_new_tokens=12, do_sample=False, use_cache=True, pad_token_id=0)
    assert generated[0, 9:].tolist() == reference(prompt(10, 9), 12)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("mode", [{}, *MODES.values()], ids=["eager", *MODES])
@pytest.mark.parametrize("backend", SPARSE)
def test_sparse_attention_is_lossless(backend: str, mode: dict[str, Any]) -> None:
    """Where most tokens are left out, speculation still changes none: the target alone leaves out the same."""
    alone = churn(DecodeLoop(target(), None, settings(backend)))
    result = churn(DecodeLoop(target(), draft("early-exit"), settings(backend, **mode)))
    assert 0 < result.accepted < result.proposed
    for arrival, output, expected in zip(ARRIVALS, result.outputs, alone.outputs, strict=True):
        assert output == expected if arrival.abort is None else output[: len(expected)] == expected[: len(output)]
    dense = [reference(arrival.prompt, arrival.new) for arrival in ARRIVALS if arrival.abort is None]
    assert [out for out, each in zip(alone.outputs, ARRIVALS, strict=True) if each.abort is None] != dense


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"graphs": "whole"}], ids=["eager", "overlap", "graph"])
def test_rows_that_nobody_has_any_more_have_no_length(options: dict[str, Any]) -> None:
    """A batch that shrinks leaves no length of its former requests behind, in either cache."""
    loop = DecodeLoop(target(), draft("early-exit"), settings(draft_len=2, **options))
    for seed, new in ((1, 4), (2, 25)):
        loop.submit(prompt(seed, 5), new)
    while loop.running or loop.waiting or loop.pending:
        loop.step()
        rows = loop.settings.padded(len(loop.fsm.batch(Domain.TARGET) or ()))
        for domain in Domain:
            assert not loop.fsm.value("kv_lens_cuda", domain)[rows:].any()


# What is stale is read stale, and refused.


UNREAD = {
    "host_kv_cache_block_offsets",  # a kernel's launcher reads these two, not plain torch
    "host_kv_cache_pool_pointers",
    "flash_mla_num_splits",  # every request has the same number of pieces here, so only its length is read
}
UNREAD_IN = {
    "trtllm": {"num_contexts"},
    # Schedules are dropped by every draft step; see tests/decode/test_dsa.py.
    "dsa": {"scheduler_metadata_buffer", "scheduler_metadata_buffer_expanded"},
    "deepseek_v4": {"num_contexts"},
}
UNREAD_PAIRS = {
    ("deepseek_v4", "base_block_offsets", Domain.DRAFT),  # what only the target's compressed tables are derived from
    ("dsa", "indexer_k_cache_block_offsets", Domain.TARGET),  # for one query a request: the target verifies several
}
INTRUDES = {("dsa", "pool_view"), ("dsa", "kv_cache_manager")}
"""Left stale, it has the draft write into the target's own pool."""

DROPS = [
    (backend, resource.name, domain)
    for backend in BACKENDS
    for resource in FLAVOURS[backend].backend().resources
    for domain in resource.domains
]
READ = [
    (backend, name, domain)
    for backend, name, domain in DROPS
    if name not in UNREAD | UNREAD_IN.get(backend, set()) and (backend, name, domain) not in UNREAD_PAIRS
]
SHORT = (Arrival(0, prompt(20, 9), 9), Arrival(1, prompt(21, 6), 8))
"""Two requests; the second joins while the first generates, so that a batch is mixed."""


def short(backend: str, **machine: Any) -> Churn:
    loop = DecodeLoop(target(), draft("self"), settings(backend), **machine)
    return churn(loop, SHORT, unchecked=machine.get("check") == "off")


@pytest.mark.parametrize(("backend", "resource", "domain"), DROPS)
def test_dropped_refresh_is_refused(backend: str, resource: str, domain: Domain) -> None:
    """The error names the resource whose refresh was dropped, and the cache."""
    with pytest.raises(StaleResource) as caught:
        short(backend, drop=[(resource, domain)])
    assert (caught.value.resource, caught.value.domain) == (resource, domain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_short_batch_is_healthy(backend: str) -> None:
    """The batch that the drops below are compared with: lossless, mixed, and every draft accepted."""
    result = short(backend)
    lossless(result, SHORT)
    assert (result.rate, result.mixed) == (1.0, 1)


@cache
def undisturbed(backend: str) -> Churn:
    """The same batch in narrow attention, nothing dropped."""
    result = short(backend)
    assert backend in SPARSE or result.rate == 1.0
    return result


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("backend", "resource", "domain"), READ)
def test_what_is_stale_is_read_stale(backend: str, resource: str, domain: Domain) -> None:
    """With the checks off nothing stands in for the dropped refresh: tokens change, acceptance falls, or it crashes."""
    healthy, result = undisturbed(backend), short(backend, drop=[(resource, domain)], check="off")
    if domain is Domain.DRAFT and not result.crash and (backend, resource) not in INTRUDES:
        assert result.outputs == healthy.outputs, "a draft that reads rubbish is slow, not wrong"
        assert result.emissions != healthy.emissions
    else:
        assert result.crash or result.outputs != healthy.outputs or result.rate < healthy.rate


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_that_move_unnoticed_are_read_where_they_were(backend: str, order: RowOrder) -> None:
    """A manager that moves pages and keeps its version quiet gets other tokens: the move is real, and the version
    is all that tells of it."""
    moved, quiet = ([], [])
    for outputs, tells in ((moved, True), (quiet, False)):
        loop = DecodeLoop(target(), None, settings(backend, order, max_tokens=30))
        ids = [loop.submit(prompt(seed, 9), 5) for seed in (22, 23)]
        outputs += [loop.step()]
        version = loop.cache.blocks_version
        for request in ids:
            loop.cache.reserve(request, 24)  # so that no later growth tells of the move
        loop.step()
        version = loop.cache.blocks_version
        exchange(loop.cache, *ids)
        if not tells:
            loop.cache.blocks_version = version
        rest = loop.run()
        outputs[:] = [rest[request] for request in ids]
    assert moved == [reference(prompt(seed, 9), 5)[2:] for seed in (22, 23)]
    assert quiet != moved


# Requests.


@pytest.mark.parametrize(
    ("tokens", "new", "says"),
    [
        ([], 4, "the prompt is empty"),
        ([1, 2], 0, "max_new_tokens must be at least 1, not 0"),
        (prompt(1, 50), 4, "a prompt of 50 tokens and 4 new ones do not fit the target's cache, which holds 4. tokens"),
        (prompt(1, 29), 4, "a prompt of 29 tokens and 4 new ones do not fit the draft's cache, which holds 2. tokens"),
    ],
)
def test_what_cannot_be_decoded_is_refused_at_once(tokens: list[int], new: int, says: str) -> None:
    """One line that says why; nothing is queued, nothing is taken."""
    loop = DecodeLoop(target(), draft("self"), settings(max_tokens=40, draft_blocks=4))
    with pytest.raises(ValueError, match=says) as caught:
        loop.submit(tokens, new)
    assert "\n" not in str(caught.value)
    assert (loop.waiting, loop.step()) == ([], [])


def test_longest_request_that_is_taken_fits() -> None:
    """At the very limit of the smaller pool it decodes to its end."""
    loop = DecodeLoop(target(), draft("self"), settings(max_tokens=40, draft_blocks=4))
    longest = 4 * DRAFT_PAGE - loop.settings.window
    with pytest.raises(ValueError, match=f"which holds {longest} tokens"):
        loop.submit(prompt(24, longest - 4), 5)
    request = loop.submit(prompt(24, longest - 5), 5)
    assert loop.run() == {request: reference(prompt(24, longest - 5), 5)}


def test_unknown_backend_is_refused() -> None:
    """One line that lists the known ones."""
    with pytest.raises(ValueError, match=f"unknown backend 'flash-mla': it is one of {', '.join(FLAVOURS)}"):
        DecodeLoop(target(), None, settings("flash-mla"))


def test_unknown_resource_is_refused() -> None:
    """A drop that names nothing drops nothing in silence: the message lists what there is."""
    with pytest.raises(KeyError, match="trtllm has no resource 'nonesuch'; it has kv_cache_manager, "):
        DecodeLoop(target(), None, settings(), drop=["nonesuch"])


@pytest.mark.parametrize(("pool", "page"), [("blocks", PAGE), ("draft_blocks", DRAFT_PAGE)])
def test_admission_counts_both_pools(pool: str, page: int) -> None:
    """A request waits until each pool holds it at its longest, beside the running ones: none ever runs dry."""
    longest = 12 + 14 + settings().window
    loop = DecodeLoop(target(), draft("early-exit"), settings(**{pool: 2 * -(-longest // page)}))
    for seed in range(3):
        loop.submit(prompt(seed, 12), 14)
    running = []
    while loop.waiting or loop.running:
        loop.step()
        running.append(len(loop.running))
    assert max(running) == 2, "three rows are free, but pages only for two"


def test_rows_of_a_batch_are_counted_too() -> None:
    """With pages for all of them, requests beyond the last row wait."""
    loop = DecodeLoop(target(), None, settings(max_requests=2))
    for seed in range(3):
        loop.submit(prompt(seed, 3), 4)
    loop.step()
    assert (len(loop.running), len(loop.waiting)) == (2, 1)


def test_abort_gives_every_page_back() -> None:
    """Of a running request; a waiting one has none, and an unknown one is an error."""
    loop = DecodeLoop(target(), draft("self"), settings(max_requests=1))
    running, waiting = loop.submit(prompt(1, 9), 9), loop.submit(prompt(2, 9), 9)
    loop.step()
    loop.abort(waiting)
    loop.abort(running)
    assert (loop.running, loop.waiting) == ([], [])
    assert all(each.free_blocks == each.geometry.blocks_in_primary_pool for each in loop.caches)
    with pytest.raises(KeyError, match=f"no request {running} is waiting or running"):
        loop.abort(running)


@pytest.mark.parametrize("kind", ["self", "early-exit"])
@pytest.mark.parametrize("place", range(5))
def test_stop_token_ends_a_request(kind: str, place: int) -> None:
    """It is the last token written, wherever in a step it falls, drafted or not."""
    expected = reference(prompt(26, 6), 12)
    stop = expected[place]
    loop = DecodeLoop(target(), draft(kind), settings(), stop=[stop])
    loop.submit(prompt(26, 6), 12)
    emissions = []
    [output] = loop.run(emissions.append).values()
    assert output == expected[: expected.index(stop) + 1]
    assert [each.finished for each in emissions] == [*[False] * (len(emissions) - 1), True]
    assert all(each.accepted <= len(each.tokens) for each in emissions)


@pytest.mark.parametrize("new", range(1, 8))
def test_no_more_tokens_than_asked_for(new: int) -> None:
    """However many were drafted, and in as few forwards as the draft length allows."""
    loop = DecodeLoop(target(), draft("self"), settings(draft_len=3))
    loop.submit(prompt(27, 5), new)
    assert loop.run() == {1: reference(prompt(27, 5), new)}
    assert loop.forwards == 1 + -(-(new - 1) // 4)


def test_emissions_say_what_was_drafted() -> None:
    """With the target as its own draft: all of a step but its last token, none of the first step."""
    loop = DecodeLoop(target(), draft("self"), settings(draft_len=3))
    loop.submit(prompt(27, 5), 9)
    emissions = []
    loop.run(emissions.append)
    assert [(len(each.tokens), each.accepted, each.proposed) for each in emissions] == [(1, 0, 0), (4, 3, 3), (4, 3, 3)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rejected_rows_are_overwritten(backend: str) -> None:
    """What the target's cache holds of the tokens it knows is what it holds without any draft."""
    caches = []
    for kind in (None, "other"):
        loop = DecodeLoop(target(), draft(kind) if kind else None, settings(backend))
        request = loop.submit(prompt(28, 6), 15)
        loop.step()
        while loop.running[0].target_rows < 16:
            loop.step()
        pages = loop.cache.pool[places(loop.cache, request)]  # [blocks, layers, planes, tokens a block, heads, dim]
        caches.append(pages.permute(0, 3, 1, 2, 4, 5).flatten(0, 1)[:16])
    torch.testing.assert_close(caches[0], caches[1], atol=1e-4, rtol=1e-4)


# Refusals that the engine catches.


class Refuses:
    """A contract that refuses an event once, when it comes the n-th time."""

    def __init__(self, event: str, time: int) -> None:
        self.events, self.left = (event,), time

    def admit(self, fsm: Orchestrator, event: str, batch: Batch | None) -> None:
        self.left -= 1
        if self.left == 0:
            raise IllegalTransition(fsm.state, event)


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize(
    ("event", "time"), [("target_prepare", 1), ("target_prepare", 3), ("draft_forward", 1), ("draft_forward", 2),
                        ("draft_step", 1), ("draft_step", 4)]
)  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refused_step_is_decoded_without_speculation(backend: str, event: str, time: int, kind: str) -> None:
    """An engine that catches the refusal and goes on loses no token, and writes no other."""
    loop = DecodeLoop(target(), draft(kind), settings(backend), contracts=[Refuses(event, time)])
    for arrival in SHORT:
        loop.submit(arrival.prompt, arrival.new)
    outputs: dict[int, list[int]] = {1: [], 2: []}
    refused = 0
    while loop.running or loop.waiting:
        try:
            emissions = loop.step()
        except IllegalTransition:
            refused += 1
            assert loop.fsm.domain is Domain.TARGET
            continue
        for emission in emissions:
            outputs[emission.request] += emission.tokens
    assert refused == 1
    assert outputs == {number + 1: reference(each.prompt, each.new) for number, each in enumerate(SHORT)}


def test_a_dropped_refresh_leaves_the_target_to_decode_alone() -> None:
    """Even a draft that is refused every time costs speed only: each step decodes without speculation. (Behind the
    last token but one there is nothing to draft.)"""
    loop = DecodeLoop(target(), draft("self"), settings(), drop=[("kv_cache_block_offsets", Domain.DRAFT)])
    loop.submit(prompt(29, 6), 6)
    output: list[int] = []
    refused = 0
    while loop.running or loop.waiting:
        try:
            for emission in loop.step():
                output += emission.tokens
        except StaleResource:
            refused += 1
    assert (output, refused, loop.forwards) == (reference(prompt(29, 6), 6), 4, 6)


# Draft lengths.


@pytest.mark.parametrize("steps", range(2, 6))
@pytest.mark.parametrize("kind", ["self", "head"])
@pytest.mark.parametrize("mode", ["eager", *MODES])
def test_draft_length_may_change_between_steps(mode: str, kind: str, steps: int) -> None:
    """Down to none and up again. With overlap a step's provisional lengths may be those of the next one, which reads
    what that step wrote over them unless it is told."""
    loop = DecodeLoop(target(), draft(kind), settings(draft_len=2, max_tokens=50, **MODES.get(mode, {})))
    ids = [loop.submit(prompt(44 + each, 6), 24) for each in range(2)]
    outputs: dict[int, list[int]] = {each: [] for each in ids}
    proposed = []
    for number in range(60):
        if number % steps == 0:
            loop.draft_len = (1, 0, 2)[number // steps % 3]
        for emission in loop.step():
            outputs[emission.request] += emission.tokens
            proposed.append(emission.proposed)
        if not (loop.running or loop.pending):
            break
    assert outputs == {each: reference(prompt(44 + place, 6), 24) for place, each in enumerate(ids)}
    assert {0, 1} <= {*proposed}


def test_draft_length_has_bounds() -> None:
    """Buffers and pages are for the longest."""
    loop = DecodeLoop(target(), draft("self"), settings(draft_len=2))
    for length in (-1, 3):
        with pytest.raises(ValueError, match=rf"the draft length must be 0 to 2 .*, not {length}"):
            loop.draft_len = length
    assert loop.draft_len == 2


# Room.


@pytest.mark.parametrize("mode", MODES)
def test_dummy_rows_do_not_lend_their_pages(mode: str) -> None:
    """Graphs pad batches with dummies that hold pages: admission leaves these out, so that no pool runs dry."""
    options = settings(**MODES[mode])
    longest = -(-(9 + 14 + options.window) // DRAFT_PAGE)
    loop = DecodeLoop(target(), draft("early-exit"), settings(draft_blocks=2 * longest, **MODES[mode]))
    ids = [loop.submit(prompt(30 + each, 9), 14) for each in range(3)]
    running, outputs = [], {}
    while loop.running or loop.waiting or loop.pending:
        for emission in loop.step():
            outputs.setdefault(emission.request, []).extend(emission.tokens)
        running.append(len(loop.running))
    assert outputs == {each: reference(prompt(30 + place, 9), 14) for place, each in enumerate(ids)}
    assert max(running) == 2


@pytest.mark.parametrize(("pool", "domain"), [("cache", Domain.TARGET), ("draft_cache", Domain.DRAFT)])
def test_a_window_without_room_is_refused_before_a_forward(
    pool: str, domain: Domain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: one cache reserves less than it was asked for. The step is refused before a model runs."""
    loop = DecodeLoop(target(), draft("self"), settings())
    pages = getattr(loop, pool)
    reserve = pages.reserve
    monkeypatch.setattr(
        pages, "reserve", lambda request, tokens: reserve(request, tokens - loop.settings.window - PAGE)
    )
    loop.submit(prompt(31, 8), 8)
    with pytest.raises(WindowOverflow) as caught:
        loop.run()
    assert caught.value.domain is domain
    assert loop.fsm.domain is Domain.TARGET


# Lives.


@pytest.mark.parametrize("graphs", ["off", "whole"])
def test_pages_outlive_the_step_that_may_write_them(graphs: str) -> None:
    """With overlap a request is aborted while its step runs: its pages are kept until that step has landed, and its
    results are dropped."""
    loop = DecodeLoop(target(), draft("self"), settings(overlap=True, graphs=graphs))
    kept, gone = loop.submit(prompt(32, 6), 20), loop.submit(prompt(33, 6), 20)
    outputs: dict[int, list[int]] = {kept: [], gone: []}

    def step() -> None:
        for emission in loop.step():
            outputs[emission.request] += emission.tokens

    for _ in range(3):
        step()
    assert loop.pending is not None
    free = loop.cache.free_blocks
    loop.abort(gone)
    written = list(outputs[gone])
    assert loop.cache.free_blocks == free
    with pytest.raises(RetiredRequest, match="in flight may write to them"):
        loop.cache.free(gone)
    step()
    assert loop.cache.free_blocks > free
    while loop.running or loop.pending:
        step()
    assert outputs == {kept: reference(prompt(32, 6), 20), gone: written}


def test_pages_of_a_running_request_are_not_freed() -> None:
    """A planted fault: the cache is told to free what still runs."""
    loop = DecodeLoop(target(), draft("self"), settings())
    request = loop.submit(prompt(34, 6), 6)
    loop.step()
    for pages in loop.caches:
        with pytest.raises(RetiredRequest, match="it is live"):
            pages.free(request)
    assert loop.run()[request] == reference(prompt(34, 6), 6)[1:]


# What moves a request's pages.


COMES_BACK = {
    "preempted": lambda loop, request: loop.preempt(request),
    "offloaded": lambda loop, request: (loop.offload(request), loop.load_back(request)),
    "offloaded without the draft": lambda loop, request: (loop.offload(request, draft=False), loop.load_back(request)),
}


@pytest.mark.parametrize("how", COMES_BACK)
@pytest.mark.parametrize("kind", ["self", "head"])
@pytest.mark.parametrize("mode", ["eager", *MODES])
def test_request_that_comes_back_loses_nothing(mode: str, kind: str, how: str) -> None:
    """SGLang #19897, #32176: what the draft's cache lost is filled again. Every token is the target's, and the draft
    that is the target itself is believed as before."""
    options = MODES.get(mode, {})
    loop = DecodeLoop(target(), draft(kind), settings(host_blocks=24, **options))
    ids = [loop.submit(prompt(35 + place, 7), 20) for place in range(2)]
    outputs: dict[int, list[int]] = {request: [] for request in ids}
    emissions, step = [], 0
    while loop.running or loop.waiting or loop.pending:
        for emission in loop.step():
            outputs[emission.request] += emission.tokens
            emissions.append(emission)
        step += 1
        if step in (2, 4):
            COMES_BACK[how](loop, ids[step % 3 % 2])
    assert outputs == {request: reference(prompt(35 + place, 7), 20) for place, request in enumerate(ids)}
    assert all(each.proposed for each in emissions[-4:] if not each.finished), "it does not speculate any more"
    if kind == "self":
        assert all(each.accepted == each.proposed for each in emissions if not each.finished)
    assert [cache.free_blocks for cache in loop.caches] == free_at_start(loop)


def free_at_start(loop: DecodeLoop) -> list[int]:
    """Pages that nobody but the dummies holds."""
    return (
        [pages for _, pages in loop._pools().values()]
        if loop.settings.graphs == "off"
        else [
            cache.geometry.blocks_in_primary_pool - sum(len(cache.block_ids(each)) for each in loop.dummies)
            for cache in loop.caches
        ]
    )


@pytest.mark.parametrize("kind", ["self", "head"])
@pytest.mark.parametrize("mode", ["eager", *MODES])
def test_lost_rows_are_filled_again(mode: str, kind: str) -> None:
    """A planted fault: the draft's pages are wiped, and the contract is told. The loop re-fills them, and no proposal
    is made from what was wiped."""
    loop = DecodeLoop(target(), draft(kind), settings(**MODES.get(mode, {})))
    request = loop.submit(prompt(38, 7), 25)
    output: list[int] = []
    rates = []
    for step in range(30):
        for emission in loop.step():
            output += emission.tokens
            rates.append((emission.accepted, emission.proposed))
        if step == 3:
            assert loop.draft_cache is not None
            loop.draft_cache.pool[places(loop.draft_cache, request)] = 1e4
            loop.content.cut(request, 0)
        if not (loop.running or loop.pending):
            break
    assert output == reference(prompt(38, 7), 25)
    if kind == "self":
        assert all(accepted == proposed for accepted, proposed in rates[:-1])


def test_wiped_rows_would_be_seen() -> None:
    """The fault above is one: with nobody told, the draft guesses badly, and nothing else happens."""
    loop = DecodeLoop(target(), draft("self"), settings())
    request = loop.submit(prompt(38, 7), 25)
    rates = []
    while loop.running or loop.waiting:
        rates += [(emission.accepted, emission.proposed) for emission in loop.step()]
        if len(rates) == 4:
            assert loop.draft_cache is not None
            loop.draft_cache.pool[places(loop.draft_cache, request)] = 1e4
    assert any(accepted < proposed for accepted, proposed in rates[:-1])


def test_what_does_not_run_cannot_be_moved() -> None:
    """Each refusal says why, and moves nothing."""
    loop = DecodeLoop(target(), draft("self"), settings(host_blocks=7))
    short, long = loop.submit(prompt(40, 5), 15), loop.submit(prompt(41, 25), 8)
    with pytest.raises(KeyError, match=f"no request {short} is waiting or running"):
        loop.offload(short)
    loop.step()
    with pytest.raises(PoolExhausted, match="the host pool has no room for 8 more pages"):
        loop.offload(long)
    loop.offload(short)
    with pytest.raises(KeyError):
        loop.offload(short)
    loop.abort(short)
    with pytest.raises(KeyError):
        loop.load_back(short)
    assert loop.run()[long] == reference(prompt(41, 25), 8)[1:]


def test_load_back_waits_for_room() -> None:
    """An offloaded request is admitted like any other."""
    loop = DecodeLoop(target(), draft("self"), settings(max_requests=1, host_blocks=24))
    first, second = loop.submit(prompt(42, 5), 9), loop.submit(prompt(43, 5), 9)
    loop.step()
    loop.offload(first)
    loop.step()
    with pytest.raises(PoolExhausted, match=f"request {first} does not fit beside the running ones"):
        loop.load_back(first)
    with pytest.raises(PoolExhausted, match="1 requests are offloaded, and there are rows for no more"):
        loop.offload(second)
    assert loop.run()[second] == reference(prompt(43, 5), 9)[1:]
    loop.load_back(first)
    assert loop.run()[first] == reference(prompt(42, 5), 9)[1:]


class Traffic:
    """A loop to which anything may happen between two steps."""

    def __init__(self, mode: str, kind: str) -> None:
        changes = MODES.get(mode, {})
        self.loop = DecodeLoop(
            target(), draft(kind), settings(host_blocks=24, draft_blocks=12, **changes), check="tensors"
        )
        self.outputs: dict[int, list[int]] = {}
        self.prompts: dict[int, int] = {}
        self.aborted: set[int] = set()

    def run(self, actions: list[tuple[str, int]]) -> None:
        for action, which in actions:
            getattr(self, action)(which)
            self.step()
        while self.loop.running or self.loop.waiting or self.loop.pending or self.loop.parked:
            if not (self.loop.running or self.loop.waiting or self.loop.pending):
                self.load_back(0)
            self.step()

    def step(self) -> None:
        for emission in self.loop.step():
            self.outputs[emission.request] += emission.tokens

    def submit(self, which: int) -> None:
        request = self.loop.submit(prompt(50 + which, 3 + 2 * which), 9)
        self.outputs[request], self.prompts[request] = [], which

    def abort(self, which: int) -> None:
        for each in (self.loop.running + self.loop.parked + self.loop.waiting)[which:][:1]:
            self.loop.abort(each.id)
            self.aborted.add(each.id)

    def preempt(self, which: int) -> None:
        for each in (self.loop.running + self.loop.parked)[which:][:1]:
            self.loop.preempt(each.id)

    def park(self, which: int, draft: bool = True) -> None:
        for each in self.loop.running[which:][:1]:
            with suppress(PoolExhausted, KeyError):  # no room, or it finished in the step that was in flight
                self.loop.offload(each.id, draft)

    def park_target(self, which: int) -> None:
        self.park(which, draft=False)

    def load_back(self, which: int) -> None:
        for each in self.loop.parked[which:][:1]:
            with suppress(PoolExhausted):
                self.loop.load_back(each.id)

    def wait(self, which: int) -> None:
        """Nothing happens."""


ACTIONS = ("submit", "submit", "abort", "preempt", "park", "park_target", "load_back", "load_back", "wait")


@hypothesis.settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["eager", *MODES]),
    st.sampled_from(["self", "early-exit", "head"]),
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2)), max_size=25),
)
def test_any_traffic_is_lossless(mode: str, kind: str, actions: list[tuple[str, int]]) -> None:
    """Requests join, finish, abort, are preempted, offloaded with and without the draft's rows, and loaded back, in
    any order: every token is the target's own, and every page comes back."""
    traffic = Traffic(mode, kind)
    traffic.run(actions)
    for request, output in traffic.outputs.items():
        which = traffic.prompts[request]
        expected = reference(prompt(50 + which, 3 + 2 * which), 9)
        assert output == expected[: len(output)]
        assert request in traffic.aborted or output == expected
    assert [cache.free_blocks for cache in traffic.loop.caches] == free_at_start(traffic.loop)


def test_graph_of_one_draft_step_replays_after_a_prompt() -> None:
    """A window of one step leaves the draft's values at the prompt's batch; the recording is replayed all the same."""
    loop = DecodeLoop(target(), draft("self"), settings(draft_len=1, max_requests=1, graphs="whole", graph_sizes=(1,)))
    ids = [loop.submit(prompt(number, 5), 16) for number in range(2)]
    outputs = loop.run()
    assert [outputs[each] for each in ids] == [reference(prompt(number, 5), 16) for number in range(2)]
    assert loop.replays > 0


def test_target_alone_is_replayed_too() -> None:
    """Without a draft there is no draft content to ask for: after two warm-ups every step is a replay."""
    loop = DecodeLoop(target(), None, settings(graphs="whole", graph_sizes=(1,)))
    loop.submit(prompt(0, 4), 12)
    loop.run()
    assert (loop.eager, loop.replays) == (2, 9)


# Check level "contents", and poison.


@pytest.mark.parametrize("mode", [{}, *MODES.values()], ids=["eager", *MODES])
@pytest.mark.parametrize("backend", BACKENDS)
def test_contents_of_a_sound_loop_are_right(backend: str, mode: dict[str, Any]) -> None:
    """Requests come and go, pages move, lengths are corrected on the device: nothing is found, no token changes, with
    whatever is stale poisoned."""
    loop = DecodeLoop(target(), draft("head"), settings(backend, **mode), check="contents", poison=True)
    lossless(churn(loop))
    assert loop.fsm.violations == ()
    assert loop.fsm.validation is not None
    assert loop.fsm.validation.unowned == ()


@pytest.mark.parametrize("backend", BACKENDS)
def test_page_given_away_too_early_is_found(backend: str) -> None:
    """The cache gives a running request's page to another: the table is as the cache says, and every stamp fresh."""
    loop = DecodeLoop(target(), draft("early-exit"), settings(backend), check="contents")
    for seed in (10, 11):
        loop.submit(prompt(seed, 9), 12)
    for _ in range(2):
        loop.step()
    victim, thief = (request.id for request in loop.running)
    loop.cache._owners[places(loop.cache, victim)[0]] = thief
    with pytest.raises(ContentsViolated) as caught:
        loop.run()
    facts = (caught.value.domain, caught.value.failed, caught.value.request, caught.value.owner)
    assert facts == (Domain.TARGET, "owner", victim, thief)
    assert caught.value.found == caught.value.expected


@pytest.mark.parametrize(
    ("backend", "name"), [("trtllm", "kv_cache_block_offsets"), ("flash_mla", "block_ids_per_seq")]
)
def test_poison_makes_an_unchecked_miss_loud(backend: str, name: str) -> None:
    """Without it the draft reads page 0, and nobody is told; with it the first use raises."""
    crashes = []
    for poison in (False, True):
        drop = [(name, Domain.DRAFT)]
        loop = DecodeLoop(target(), draft("early-exit"), settings(backend), check="off", drop=drop, poison=poison)
        crashes.append(churn(loop, unchecked=True).crash)
    assert crashes[0] == ""
    assert "IndexError" in crashes[1]


def test_last_tokens_are_replayed_too() -> None:
    """A draft that nobody needs is cheaper in the graph than an eager forward without it."""
    loop = DecodeLoop(target(), draft("early-exit"), settings(graphs="whole", max_requests=1, graph_sizes=(1,)))
    eager = []
    for seed in (0, 1, 2, 3):
        loop.submit(prompt(seed, 9), 20)
        before = loop.forwards - loop.replays
        loop.run()
        eager.append(loop.forwards - loop.replays - before)
    assert eager[1:] == [1, 1, 1], "the prefill alone; the first request warms up"


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_that_were_guessed_are_not_taken_for_the_true_ones(backend: str) -> None:
    """Nothing is accepted, so the batch of the last forward, which is eager, equals the guess of the step before. The
    lengths on the device are that step's own."""
    loop = DecodeLoop(target(), draft("head"), settings(backend, overlap=True, draft_len=1), check="contents")
    expected = {loop.submit(prompt(seed, 9), 12): reference(prompt(seed, 9), 12) for seed in (4, 5)}
    assert loop.run() == expected
