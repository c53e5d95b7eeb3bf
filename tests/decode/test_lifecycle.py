"""Prompts in chunks, prompts from a prefix, and tokens taken back: rows of both caches stay right, so tokens do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specfsm.decode.attention import FLAVOURS
from specfsm.decode.loop import DecodeLoop, Emission
from specfsm.domain import Domain
from tests.decode.conftest import CHECK, churn, draft, lossless, prompt, reference, settings, target
from tests.decode.test_loop import MODES

ALIKE = prompt(80, 17)
"""Four whole pages of the target's cache, two of the draft's."""


def decode(loop: DecodeLoop, tokens: Sequence[int], new: int) -> list[Emission]:
    """One request from its beginning to its end; its tokens are the target's."""
    loop.submit(tokens, new)
    emissions: list[Emission] = []
    loop.run(emissions.append)
    assert [token for each in emissions for token in each.tokens] == reference(tokens, new)
    return emissions


def believed(emissions: Sequence[Emission]) -> bool:
    """Whether a draft that is the target itself was accepted throughout: it reads no rubbish."""
    return all(each.accepted == each.proposed for each in emissions if not each.finished)


# Chunks.


@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.parametrize("kind", ["self", "head"])
@pytest.mark.parametrize("backend", FLAVOURS)
def test_prompt_in_chunks(backend: str, kind: str, chunk: int) -> None:
    """Each step reads a chunk, in both caches; the draft's rows end where the chunk does."""
    loop = DecodeLoop(target(), draft(kind), settings(backend, chunk=chunk), check=CHECK)
    request = loop.submit(ALIKE, 9)
    emissions = []
    for number in range(1, -(-len(ALIKE) // chunk)):
        assert loop.step() == []
        assert loop.running[0].target_rows == chunk * number
        assert loop.content.rows(request) == chunk * number + 1 - loop.shift
    loop.run(emissions.append)
    assert [token for each in emissions for token in each.tokens] == reference(ALIKE, 9)
    assert kind == "head" or believed(emissions)


@pytest.mark.parametrize("mode", ["eager", *MODES])
def test_chunks_beside_running_requests(mode: str) -> None:
    """Some requests generate while others are not through their prompts."""
    result = churn(DecodeLoop(target(), draft("early-exit"), settings(chunk=4, **MODES.get(mode, {}))))
    lossless(result)
    assert result.mixed


def test_target_alone_reads_chunks() -> None:
    """A request that is not through its prompt does not generate."""
    loop = DecodeLoop(target(), None, settings(chunk=4))
    decode(loop, ALIKE, 5)
    assert loop.forwards == 5 + 4


# Prefixes.


@pytest.mark.parametrize("kind", ["self", "head"])
@pytest.mark.parametrize("backend", FLAVOURS)
def test_prompt_from_a_prefix(backend: str, kind: str) -> None:
    """The second request begins with the first one's pages, in both caches, and is decoded alike."""
    loop = DecodeLoop(target(), draft(kind), settings(backend, prefix_cache=True), check=CHECK)
    decode(loop, ALIKE, 6)
    loop.submit([*ALIKE, 5], 6)
    loop._admit()
    [second] = loop.running
    assert (second.target_rows, loop.content.rows(second.id)) == (16, 16)
    emissions: list[Emission] = []
    loop.run(emissions.append)
    assert [token for each in emissions for token in each.tokens] == reference([*ALIKE, 5], 6)
    assert kind == "head" or believed(emissions)


@pytest.mark.parametrize("kind", ["self", "head"])
@pytest.mark.parametrize("mode", ["eager", *MODES])
def test_prefix_that_the_draft_lacks(mode: str, kind: str) -> None:
    """SGLang #19897: a prefix is cached for the target alone, as nothing was drafted. The draft's rows are made."""
    options = {"max_requests": 2, "graph_sizes": (2,), **MODES.get(mode, {})}
    loop = DecodeLoop(target(), draft(kind), settings(prefix_cache=True, **options))
    loop.draft_len = 0
    decode(loop, ALIKE, 4)
    loop.draft_len = 3
    loop.submit([*ALIKE, 5], 12)
    loop._admit()
    [second] = loop.running
    rows = 0 if kind == "head" else 16  # a draft that reads the target's states has the target make them
    assert (second.target_rows, loop.content.rows(second.id)) == (rows, 0)
    emissions: list[Emission] = []
    loop.run(emissions.append)
    assert [token for each in emissions for token in each.tokens] == reference([*ALIKE, 5], 12)
    assert kind == "head" or believed(emissions)
    assert any(each.proposed for each in emissions)


def test_draft_pages_are_published_when_it_has_written_them() -> None:
    """vLLM #35158: not between the target's phase and the draft's; the target's are, at once."""
    loop = DecodeLoop(target(), draft("self"), settings(prefix_cache=True))
    assert loop.draft_cache is not None
    published = []
    publish = loop.draft_cache.publish
    loop.draft_cache.publish = lambda *each, **more: (published.append(loop.fsm.domain), publish(*each, **more))  # type: ignore[method-assign]
    loop.submit(ALIKE, 6)
    loop._admit()
    loop._verify()
    assert published == []
    loop._propose(loop.running)
    assert published == [Domain.TARGET]
    assert loop.run()


@pytest.mark.parametrize("kind", ["self", "head"])
def test_two_that_run_share_pages(kind: str) -> None:
    """They write behind what they share; one is preempted and takes its own pages up again."""
    loop = DecodeLoop(target(), draft(kind), settings(prefix_cache=True))
    first = loop.submit(ALIKE, 12)
    written = {first: [token for each in loop.step() for token in each.tokens]}
    second = loop.submit(ALIKE, 12)
    loop._admit()
    assert loop.cache.block_ids(first)[:4] == loop.cache.block_ids(second)[:4]
    loop.preempt(first)
    for request, tokens in loop.run().items():
        written.setdefault(request, []).extend(tokens)
    assert written == {request: reference(ALIKE, 12) for request in (first, second)}


@pytest.mark.parametrize("kind", ["self", "head"])
def test_unified_prefix_has_the_drafts_layers_too(kind: str) -> None:
    """Pages that both share are published when both have written them."""
    options: dict[str, Any] = {"prefix_cache": True, "unified": "for the test"}
    loop = DecodeLoop(target(), draft(kind), settings(**options))
    decode(loop, ALIKE, 6)
    loop.submit([*ALIKE, 5], 6)
    loop._admit()
    [second] = loop.running
    assert (second.target_rows, loop.content.rows(second.id)) == (16, 16)
    assert loop.run() == {second.id: reference([*ALIKE, 5], 6)}


# Tokens that are taken back.


@pytest.mark.parametrize("kind", ["self", "head"])
@pytest.mark.parametrize("mode", ["eager", *MODES])
def test_tokens_taken_back_are_written_again(mode: str, kind: str) -> None:
    loop = DecodeLoop(target(), draft(kind), settings(**MODES.get(mode, {})))
    request = loop.submit(prompt(81, 6), 20)
    emissions = [each for _ in range(4) for each in loop.step()]
    with pytest.raises(ValueError, match="cannot be taken back"):
        loop.roll_back(request, 19)
    loop.roll_back(request, 2)
    assert loop.content.rows(request) == len(loop.running[0].tokens) - loop.shift
    later: list[Emission] = []
    loop.run(later.append)
    output = [token for each in emissions + later for token in each.tokens]
    expected = reference(prompt(81, 6), 20)
    cut = len(output) - len(expected)
    assert cut == 2, "what was taken back is written again"
    assert output[-4:] == expected[-4:]
    assert kind == "head" or believed(later)
