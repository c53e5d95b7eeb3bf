"""Tiny random Llamas, drafts of every kind, and a batch in which requests come, go, and have their pages moved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from attrs import define, evolve, field, frozen
from transformers import LlamaConfig, LlamaForCausalLM

from specfsm.decode.attention import ATTENTION, FLAVOURS
from specfsm.decode.cache import PagedKVCache
from specfsm.decode.head import MTPHead
from specfsm.decode.loop import DecodeLoop, Emission, Settings
from specfsm.decode.model import Draft, HeadDraft, Model, early_exit
from specfsm.domain import RowOrder

VOCABULARY = 97
SECONDARY = -(2**31)
CHECK = "contents"
"""The strictest check level there is: what runs under anything that may happen are held to it."""


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse attention that leaves most tokens out, so that what picks them, or stands for them, shows."""
    for name in SPARSE:
        flavour = FLAVOURS[name]
        made = type("Narrow", (flavour.forward_pass,), {"top_k": 4, "window": 4})
        monkeypatch.setitem(FLAVOURS, name, evolve(flavour, forward_pass=made))


SPARSE = ("dsa", "deepseek_v4")


# Models.


def llama(seed: int, *, damped: int = 0, **sizes: Any) -> Any:
    """A random Llama whose next token depends on all it has read.

    Args:
        damped: how many of its last layers add little, so that the layers before them guess well.
    """
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "initializer_range": 0.3,
            "eos_token_id": None,
            "bos_token_id": None,
            **sizes,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm: Any = LlamaForCausalLM(config)
    for layer in lm.model.layers[len(lm.model.layers) - damped :]:
        layer.self_attn.o_proj.weight.data *= 0.3
        layer.mlp.down_proj.weight.data *= 0.3
    return lm.train(False).requires_grad_(False)


@cache
def plain() -> Any:
    """The target as transformers runs it, with attention of its own and no cache."""
    return llama(1, damped=2)


@cache
def target() -> Model:
    """The same weights, under the paged attention."""
    return Model(copy.deepcopy(plain()))


def head_draft() -> HeadDraft:
    """A head that nobody trained."""
    torch.manual_seed(2)
    head = MTPHead(target().config, attn_implementation=ATTENTION).start_from(target().lm)
    return HeadDraft(head.train(False).requires_grad_(False), target())


def other_model() -> Model:
    """A model that shares nothing with the target but its vocabulary."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3}
    return Model(llama(3, **sizes))


DRAFTS: dict[str, Callable[[], Draft]] = {
    "self": target,
    "early-exit": lambda: early_exit(target(), 2),
    "other": other_model,
    "head": head_draft,
}


@cache
def draft(kind: str) -> Draft:
    return DRAFTS[kind]()


@cache
@torch.no_grad()
def _reference(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(plain()(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def reference(prompt: Sequence[int], count: int) -> list[int]:
    """What the target writes greedily, by transformers alone: no paged attention, no cache, no batch."""
    return list(_reference(tuple(prompt), count))


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
    return tokens


# Loops.

PAGE, DRAFT_PAGE = 4, 8


def settings(backend: str = "trtllm", order: RowOrder = RowOrder.BATCH, **changes: Any) -> Settings:
    """A target's cache of 4-token pages, and a draft's of 8-token pages: requests have many, and never the same."""
    sizes = {"max_requests": 3, "max_tokens": 40, "tokens_per_block": PAGE, "draft_tokens_per_block": DRAFT_PAGE}
    return Settings(backend=backend, row_order=order, **{**sizes, **changes})


def places(pages: PagedKVCache, request: int) -> list[int]:
    """Slot of each of a request's pages, read off the table as a kernel would; -1 for one in the host pool."""
    geometry = pages.geometry
    [row] = pages.arrange([request])
    entries = pages.host_block_offsets[0, row, 0, : len(pages.block_ids(request))].tolist()
    return [-1 if entry < 0 else entry // geometry.index_scale for entry in entries]


def exchange(pages: PagedKVCache, victim: int, other: int) -> None:
    """Offload a page of `victim`, let a page of `other` take its very slot, and bring the page back elsewhere."""
    slot = places(pages, victim)[0]
    pages.offload(victim, 0)
    while places(pages, other)[0] != slot:
        pages.offload(other, 0)
        pages.load_back(other)
    pages.load_back(victim)
    assert places(pages, victim)[0] != slot


# The batch in which everything happens.


@frozen
class Arrival:
    """A request: when it is submitted, and when it is aborted."""

    step: int
    prompt: list[int]
    new: int
    abort: int | None = None


ARRIVALS = (
    Arrival(0, prompt(10, 9), 12),
    Arrival(0, prompt(11, 3), 17),
    Arrival(1, prompt(12, 14), 20, abort=4),  # joins running ones, and goes half-way
    Arrival(1, prompt(13, 5), 8, abort=2),  # goes before it runs
    Arrival(2, prompt(14, 1), 9),  # waits until a row is free
    Arrival(3, prompt(15, 6), 1),  # a single token: nothing to draft
    Arrival(12, prompt(16, 4), 18),  # two that run on their own,
    Arrival(12, prompt(17, 2), 18),
    Arrival(15, prompt(18, 2), 1),  # are joined for one step, and run on as before
)


@define
class Churn:
    """What became of `ARRIVALS`.

    Args:
        outputs: tokens of each, in order.
        moved: how often a page came back to another slot.
        mixed: steps that ran contexts beside generations.
        ahead: steps that were still in flight when the call that began them returned.
        crash: what ended it early, with the checks off.
    """

    outputs: list[list[int]]
    proposed: int = 0
    accepted: int = 0
    moved: int = 0
    mixed: int = 0
    held_back: int = 0
    ahead: int = 0
    crash: str = ""
    emissions: list[Emission] = field(factory=list)

    @property
    def rate(self) -> float:
        return self.accepted / self.proposed if self.proposed else 0.0


def churn(loop: DecodeLoop, arrivals: Sequence[Arrival] = ARRIVALS, *, unchecked: bool = False) -> Churn:
    """Decode them. After each step pages move: two running requests exchange one, in every cache."""
    result = Churn([[] for _ in arrivals])
    ids: dict[int, int] = {}
    free = [pages.free_blocks for pages in loop.caches]
    step = 0
    while len(ids) < len(arrivals) or loop.running or loop.waiting or loop.pending:
        for number, arrival in enumerate(arrivals):
            if arrival.step == step:
                ids[number] = loop.submit(arrival.prompt, arrival.new)
            elif arrival.abort == step:
                loop.abort(ids[number])
        before = len(loop.running)
        waiting = len(loop.waiting)
        try:
            emissions = loop.step()
        except Exception as error:
            if not unchecked:
                raise
            result.crash = repr(error)
            return result
        step += 1
        result.ahead += loop.pending is not None
        admitted = waiting - len(loop.waiting)
        result.mixed += 0 < admitted < before + admitted
        result.held_back += bool(loop.waiting) and before + admitted < loop.settings.max_requests
        numbers = {request: number for number, request in ids.items()}
        for emission in emissions:
            result.outputs[numbers[emission.request]] += emission.tokens
            result.proposed += emission.proposed
            result.accepted += emission.accepted
            result.emissions.append(emission)
        result.moved += move_pages(loop)
        assert step < 100, "the loop does not come to an end"
    loop.fsm.finish()
    assert [pages.free_blocks for pages in loop.caches] == free, "pages were lost"
    return result


def move_pages(loop: DecodeLoop) -> int:
    """Let two running requests exchange a page in every cache in which both hold one; how often."""
    moved = 0
    for pages in loop.caches:
        holders = [request.id for request in loop.running if pages.block_ids(request.id)]
        if len(holders) > 1:
            exchange(pages, holders[0], holders[-1])
            moved += 1
    return moved


def lossless(result: Churn, arrivals: Sequence[Arrival] = ARRIVALS) -> None:
    """Every request got the target's own tokens: all of them, or up to where it was aborted."""
    for arrival, output in zip(arrivals, result.outputs, strict=True):
        expected = reference(arrival.prompt, arrival.new)
        assert output == expected[: len(output)]
        assert arrival.abort is not None or len(output) == arrival.new
