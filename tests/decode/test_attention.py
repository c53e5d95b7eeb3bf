"""Each backend's pass equals plain dense attention over all tokens a request has, and reads nothing but its tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attrs import define, field

from specfsm.decode.attention import FLAVOURS, latent_outputs, latent_queries, latent_rows
from specfsm.decode.cache import PagedKVCache
from specfsm.decode.loop import DecodeLoop
from specfsm.decode.model import Model
from specfsm.domain import Batch, RowOrder
from tests.decode.conftest import exchange, llama, settings

BACKENDS = tuple(FLAVOURS)
SHAPES = [(4, 2, 16), (3, 3, 8), (6, 1, 32)]
"""(heads, KV heads, width of a head): grouped, one each, and all for one."""
TOLERANCE = {"float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-2)}
SCALE = 0.3


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last t of n tokens, in float64: query [t, H, D], key and value [n, G, D] → [t, H, D]."""
    tokens, length, groups = query.shape[0], key.shape[0], query.shape[1] // key.shape[1]
    key, value = (each.double().repeat_interleave(groups, dim=1) for each in (key, value))
    scores = torch.einsum("thd,nhd->htn", query.double(), key) * SCALE
    seen = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
    return torch.einsum("htn,nhd->thd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)


@define
class World:
    """A target's machine and cache, and every key and value that was ever written: request → [n, layers, 2, G, D]."""

    loop: DecodeLoop
    shape: tuple[int, int, int]
    generator: torch.Generator
    history: dict[int, torch.Tensor] = field(factory=dict)

    @property
    def cache(self) -> PagedKVCache:
        return self.loop.cache

    def prepare(self, rows: Sequence[tuple[int, int]]) -> Batch:
        """Ready the metadata for a batch of (request, new tokens); requests that are new are contexts."""
        new = [row for row in rows if row[0] not in self.history]
        rows = [*new, *(row for row in rows if row not in new)]
        for request, _ in new:
            self.loop.lifetime.begin(request)
            self.cache.add(request)
            self.history[request] = torch.zeros(0, self.cache.geometry.num_layers, 2, *self.shape[1:])
        lens = [len(self.history[request]) + tokens for request, tokens in rows]
        for (request, _), length in zip(rows, lens, strict=True):
            self.cache.reserve(request, length)
        batch = Batch([request for request, _ in rows], lens, [tokens for _, tokens in rows], len(new))
        self.loop.fsm.target_prepare(batch)
        return batch

    def leave(self, request: int) -> None:
        """The request ends, and its pages are others'."""
        self.loop.lifetime.retire((request,))
        assert self.loop.lifetime.fence() == (request,)
        self.cache.free(request)

    def attend(self, batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run every layer on fresh random numbers: (what the pass gives, what dense attention gives)."""
        layers, (heads, groups, dim) = self.cache.geometry.num_layers, self.shape
        dtype = getattr(torch, self.cache.geometry.dtype)
        new = torch.randn(batch.num_tokens, layers, 2, groups, dim, generator=self.generator).to(dtype)
        query = torch.randn(batch.num_tokens, layers, heads, dim, generator=self.generator).to(dtype)
        parts = torch.split(new, list(batch.tokens))
        for request, part in zip(batch.request_ids, parts, strict=True):
            self.history[request] = torch.cat((self.history[request], part))
        forward_pass = FLAVOURS[self.loop.settings.backend].forward_pass(
            self.loop.metadata, batch, self.loop.fsm.publish
        )
        pairs = []
        for layer in range(layers):
            found = forward_pass.attend(layer, query[:, layer], new[:, layer, 0], new[:, layer, 1], SCALE)
            queries = torch.split(query[:, layer], list(batch.tokens))
            expected = [
                dense(each, *self.history[request][:, layer].unbind(1))
                for each, request in zip(queries, batch.request_ids, strict=True)
            ]
            pairs.append((found, torch.cat(expected).to(dtype)))
        return pairs

    def step(self, *rows: tuple[int, int]) -> None:
        """Prepare, attend, compare."""
        for found, expected in self.attend(self.prepare(rows)):
            atol, rtol = TOLERANCE[self.cache.geometry.dtype]
            torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


def world(
    backend: str,
    shape: tuple[int, int, int] = SHAPES[0],
    order: RowOrder = RowOrder.BATCH,
    dtype: str = "float32",
    blocks: int | None = None,
) -> World:
    """A machine without a draft over two layers of this shape."""
    heads, groups, dim = shape
    sizes = {"hidden_size": heads * dim, "num_attention_heads": heads, "num_key_value_heads": groups}
    lm = llama(0, num_hidden_layers=2, intermediate_size=8, **sizes)
    loop = DecodeLoop(Model(lm), None, settings(backend, order, max_requests=4, dtype=dtype, blocks=blocks))
    return World(loop, shape, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", RowOrder)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ragged_batches_equal_dense_attention(
    backend: str, order: RowOrder, shape: tuple[int, int, int], dtype: str
) -> None:
    """Contexts alone, contexts beside generations of one or more tokens, generations alone; on and off page edges."""
    made = world(backend, shape, order, dtype)
    made.step((1, 9), (2, 1))
    made.step((1, 1), (3, 4), (2, 3))
    made.step((3, 1), (2, 1), (1, 1))
    made.leave(2)
    made.step((4, 17), (1, 5), (5, 8))
    made.step((1, 4), (4, 4))
    made.leave(3)
    made.step((6, 6), (1, 1), (4, 2), (5, 1))


@pytest.mark.parametrize("order", RowOrder)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_are_found_wherever_they_lie(backend: str, order: RowOrder) -> None:
    """After pages were away and their slots taken, what was written before is still read."""
    made = world(backend, order=order)
    made.step((1, 9), (2, 6), (3, 12))
    for victim, other in ((1, 2), (2, 3), (3, 1)):
        exchange(made.cache, victim, other)
        made.step((1, 1), (3, 2), (2, 1))


def cached_tables(made: World) -> dict[str, torch.Tensor]:
    """Every table on the metadata that points at pages, by name."""
    named = {
        resource.name: getattr(made.loop.metadata, resource.name)
        for resource in made.loop.fsm.backend.resources
        if resource.attribute and "block" in resource.name and "host" not in resource.name
    }
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


TABLES = [(backend, name) for backend in BACKENDS for name in cached_tables(world(backend))]


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("backend", "name"), TABLES)
def test_stale_table_gives_other_results(backend: str, name: str) -> None:
    """The pass reads the table that the metadata carries: put the entries from before a move back, and it differs.

    A request has one query, or two: a table may be for either.
    """
    assert any(differs_when_stale(backend, name, tokens) for tokens in (1, 2))


def differs_when_stale(backend: str, name: str, tokens: int) -> bool:
    right, stale = (moved_under(backend, name, tokens, put_back=put_back) for put_back in (False, True))
    return not all(torch.allclose(one, other, atol=1e-3) for one, other in zip(right, stale, strict=True))


def moved_under(backend: str, name: str, tokens: int, *, put_back: bool) -> list[torch.Tensor]:
    """What the pass gives after every page moved, with the table of before or of after."""
    made = world(backend, blocks=5)
    made.attend(made.prepare(((1, 9), (2, 5))))
    made.attend(made.prepare(((1, 1), (2, 1))))
    table = cached_tables(made)[name]
    before = table.clone()
    for request, pages in ((1, 3), (2, 2)):
        for page in range(pages):
            made.cache.offload(request, page)
    for request in (2, 1):  # the pool is full: each takes slots that the other had
        made.cache.load_back(request)
    batch = made.prepare(((1, tokens), (2, tokens)))
    assert not torch.equal(table, before), f"{name} does not follow the pages"
    if put_back:
        table.copy_(before)
    return [found for found, _ in made.attend(batch)]


@pytest.mark.parametrize("name", ["kv_lens_cuda_runtime", "_seq_lens_cuda_runtime"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_stale_lengths_give_other_results(backend: str, name: str) -> None:
    """Lengths are read off the metadata too, never off the host's batch."""
    made = world(backend)
    made.step((1, 9), (2, 6))
    batch = made.prepare(((1, 2), (2, 2)))
    stale: Callable[[], Any] = {
        "kv_lens_cuda_runtime": lambda: torch.tensor([9, 6], dtype=torch.int32),
        "_seq_lens_cuda_runtime": lambda: torch.tensor([3, 1], dtype=torch.int32),
    }[name]
    setattr(made.loop.metadata, name, stale())
    assert not all(torch.allclose(*pair, atol=1e-3) for pair in made.attend(batch))


PLANS = {"flash_mla": ("flash_mla_tile_scheduler_metadata", "flash_mla_num_splits")}


def test_stale_plan_gives_other_results() -> None:
    """A schedule made for shorter requests leaves their newest block out."""
    made = world("flash_mla")
    made.step((1, 8), (2, 7))
    made.step((2, 1), (1, 1))
    plans = {name: getattr(made.loop.metadata, name) for name in PLANS["flash_mla"]}
    batch = made.prepare(((2, 9), (1, 9)))
    assert all(getattr(made.loop.metadata, name) is None for name in plans), "lengths moved: the plan was dropped"
    for name, plan in plans.items():
        setattr(made.loop.metadata, name, plan)
    assert not all(torch.allclose(*pair, atol=1e-3) for pair in made.attend(batch))


def test_plan_is_made_once_and_published() -> None:
    """The first layer that finds none makes it; the machine then knows it, and keeps it while nothing moves."""
    made = world("flash_mla")
    made.step((1, 8), (2, 7))
    made.step((2, 1), (1, 1))
    plans = [made.loop.fsm.value(name) for name in PLANS["flash_mla"]]
    assert all(isinstance(plan, torch.Tensor) for plan in plans)
    made.loop.fsm.target_prepare()
    assert [getattr(made.loop.metadata, name) for name in PLANS["flash_mla"]] == plans


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_its_own_pages_are_written(backend: str) -> None:
    """A pass writes the new tokens' places, and nothing of anybody else's."""
    made = world(backend)
    made.step((1, 9), (2, 6), (3, 5))
    before = made.cache.pool.clone()
    made.step((2, 1))
    changed = (made.cache.pool != before).flatten(1).any(1).nonzero().flatten().tolist()
    page = made.cache.geometry.tokens_per_block
    [row] = made.cache.arrange([2])
    assert changed == [int(made.cache.host_block_offsets[0, row, 0, 6 // page]) // made.cache.geometry.index_scale]


# The latent rows.


@pytest.mark.parametrize(("heads", "groups", "dim"), SHAPES)
def test_latent_rows_are_exact(heads: int, groups: int, dim: int) -> None:
    """A wide query times a latent row is its own group's product to the bit; its output is its own group's value."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randint(-8, 8, (5, count, dim), generator=generator).float() for count in (heads, groups, groups)
    )
    rows, wide = latent_rows(key, value), latent_queries(query, groups)
    assert rows.shape == (5, 576)
    assert wide.shape == (5, heads, 576)
    group = torch.arange(heads) // (heads // groups)
    products = torch.einsum("thw,nw->thn", wide, rows)
    assert torch.equal(products, torch.einsum("thd,nhd->thn", query, key[:, group]))
    whole = rows[:, None, :512].expand(-1, heads, -1)
    assert torch.equal(latent_outputs(whole, groups, dim), value[:, group])
    assert not rows[:, 2 * groups * dim :].any()


def test_too_wide_for_latent_rows() -> None:
    """A model whose keys and values do not fit is refused when the loop is built, in one line."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}
    lm = llama(0, num_hidden_layers=1, intermediate_size=8, **sizes)
    with pytest.raises(ValueError, match="8 KV heads of 64 need 1024 elements of FlashMLA's 512: use --backend trtllm"):
        DecodeLoop(Model(lm), None, settings("flash_mla"))
