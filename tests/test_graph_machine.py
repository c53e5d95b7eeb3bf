"""Captured graphs in a busy engine: a replay reads what plain Python says is right, or is refused and changes nothing.

The device is `RecordedEngine` with the semantics of a CUDA graph, and a clock by which copies land late. The captured
phases copy every table that they find on the metadata, as kernels would read it. What the tables must hold is derived
here from the managers' own lists, with none of the library's decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from operator import is_
from typing import Any

import pytest
import torch
from attrs import define, evolve, field
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specfsm.backends.backend import Sizes
from specfsm.backends.resource import Buffer, Pointer, Table
from specfsm.backends.staging import StagingBuffer
from specfsm.decode.attention import FLAVOURS
from specfsm.decode.cache import PagedKVCache
from specfsm.decode.dsa import DATA_BYTES, SCALE_BYTES
from specfsm.decode.engines import RecordedEngine
from specfsm.decode.sliding import RATIO
from specfsm.domain import Batch, Domain, Geometry, RowOrder
from specfsm.errors import GraphContractBroken, IllegalTransition, PendingTransfer, StaleResource
from specfsm.graph import Graph
from specfsm.orchestrator import Orchestrator
from specfsm.states.graph import Graph as GraphState
from specfsm.states.phase import Phase
from specfsm.states.resource import bits
from specfsm.states.transfer import Transfer
from tests.toys import snapshot

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT
ROWS, TOKENS = 3, 2
"""What graphs are captured for: rows, dummies included, and tokens of each in the first pass."""
SIZES = Sizes(max_sequences=ROWS + 1, max_tokens=12, max_draft_len=TOKENS)
WIDTH = 24
"""Tokens that the narrower of both caches' tables has columns for."""
LONGEST = 20
"""KV length that graphs are captured for."""
DUMMIES = (-1, -2, -3)
KINDS = ((False, False), (False, True), (True, False), (True, True))
"""Of graphs: whether the target's phase is in it, and whether it corrects the host's lengths."""


# What is right, in plain Python.


def slots(cache: PagedKVCache, request: int) -> list[int]:
    """Where the pages of a request lie."""
    return [cache._slot_of[block] for block in cache._owned[request].blocks]


def padded(values: Any, size: int, sentinel: Any) -> list[Any]:
    listed = list(values)
    return listed + [sentinel] * (size - len(listed))


@define
class Truth:
    """One pass over one cache.

    Args:
        lens: KV length of each request, this pass included.
        tokens: tokens of each request.
    """

    cache: PagedKVCache
    ids: tuple[int, ...]
    lens: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def geometry(self) -> Geometry:
        return self.cache.geometry

    def blocks(self, sentinel: int, value: Callable[[int], int] = int, *, clipped: bool = False) -> list[list[int]]:
        """[S, B]: each request's slots, as `value` counts them."""
        width, page, rows = self.geometry.max_blocks_per_seq, self.geometry.tokens_per_block, []
        for request, length in zip(self.ids, self.lens, strict=True):
            own = slots(self.cache, request)[: -(-length // page) if clipped else None]
            rows.append(padded((value(slot) for slot in own), width, sentinel))
        return padded(rows, SIZES.max_sequences, [sentinel] * width)

    def places(self) -> list[tuple[int, int]]:
        """Slot of each token's page, and its place in it."""
        page, found = self.geometry.tokens_per_block, []
        for request, length, new in zip(self.ids, self.lens, self.tokens, strict=True):
            own = slots(self.cache, request)
            found += [(own[at // page], at % page) for at in range(length - new, length)]
        return found

    def tables(self) -> dict[str, Any]:
        """Every table of every backend, by the attribute that carries it."""
        g, page = self.geometry, self.geometry.tokens_per_block
        planes = [self.blocks(0, lambda slot, p=plane: slot * g.pages_per_slot + p) for plane in range(g.kv_factor)]
        key = page * (DATA_BYTES + SCALE_BYTES)
        clipped = self.blocks(-1, clipped=True)
        owners = [row for row, new in enumerate(self.tokens) for _ in range(new)]
        return {
            "kv_lens_cuda": padded(self.lens, SIZES.max_sequences, 0),
            "_seq_lens_cuda": padded(self.tokens, SIZES.max_sequences, 0),
            "kv_cache_block_offsets": [[list(row) for row in zip(*planes, strict=True)]],
            "kv_block_ids_per_seq": self.blocks(0),
            "block_ids_per_seq": self.blocks(0),
            "indexer_k_cache_block_offsets": self.blocks(0),
            "block_table": clipped,
            "block_table_expanded": [row for row in clipped for _ in range(1 + SIZES.max_draft_len)],
            "req_idx_per_token": padded(owners, SIZES.max_tokens, -1),
            "slot_mapping_fp8": padded(
                (slot * key + at * DATA_BYTES for slot, at in self.places()), SIZES.max_tokens, -1
            ),
            "slot_mapping_scale": padded(
                (slot * key + page * DATA_BYTES + at * SCALE_BYTES for slot, at in self.places()), SIZES.max_tokens, -1
            ),
            "sliding_block_tables": [
                [self.blocks(-1, lambda slot, n=layer: slot * g.pages_per_slot + n * g.kv_factor)]
                for layer in range(g.num_layers)
            ],
            f"compress_block_tables{RATIO}": self.blocks(-1),
        }


# The device.


@define(eq=False)
class Landing:
    """The event behind the copies of one refresh: they land when the clock has moved on, or when somebody waits for it.

    Args:
        now: the clock.
        copies: how often it was armed.
    """

    now: Callable[[], int]
    due: int = 0
    copies: int = 0

    def record(self) -> None:
        assert self.query(), "it was armed again before its copies had landed"
        self.due = self.now() + 1
        self.copies += 1

    def query(self) -> bool:
        return self.now() >= self.due

    def synchronize(self) -> None:
        self.due = 0


@define(eq=False)
class Captured:
    """A graph, and what its replay copied out of the tables: (domain, pass, attribute) → contents.

    Args:
        whole: it holds the target's phase too.
        corrects: its first operation writes the true lengths over the host's provisional ones.
        dead: an address in it is no longer the engine's.
    """

    graph: Graph
    engine: RecordedEngine
    whole: bool
    corrects: bool
    seen: dict[tuple[Domain, int, str], torch.Tensor] = field(factory=dict)
    dead: bool = False

    def reads(self, domain: Domain) -> bool:
        return self.whole or domain is DRAFT


WHICH = st.integers(0, len(KINDS) - 1)


Event = tuple[str, Domain, int]
EVENT = st.tuples(
    st.sampled_from(["joins", "finishes or is aborted", "a page moves", "storage is allocated anew"]),
    st.sampled_from(Domain),
    st.integers(1, 9),
)


class Engine(RuleBasedStateMachine):
    """An engine with two caches, up to three requests in rows that dummies pad, and a few graphs."""

    backend = ""

    @initialize(order=st.sampled_from(RowOrder), check=st.sampled_from(["stamps", "tensors"]))
    def build(self, order: RowOrder, check: str) -> None:
        flavour = FLAVOURS[self.backend]
        declared, self.metadata = flavour.backend(), flavour.metadata()
        self.caches = [self.cache(domain, order) for domain in Domain]
        self.time = 0
        declared.allocate(self.metadata, *self.caches, SIZES, "cpu")
        self.fsm = Orchestrator(
            self.metadata,
            backend=declared,
            target=self.caches[TARGET],
            draft=self.caches[DRAFT],
            check=check,
            event=self.event,
        )
        self.ids = count(1)
        self.known: dict[int, int] = {}
        for length in (2, 9):
            self.join(length)
        self.lens = torch.zeros(ROWS, dtype=torch.int32)
        self.prepared: tuple[Any, ...] = ()
        self.in_flight: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.carried = {
            each.name: set(each.domains)
            for each in declared.resources
            if isinstance(each, Buffer) and each.attribute is not None
        }
        self.former: list[torch.Tensor] = []
        self.graphs: dict[int, Captured] = {}
        self.ring = self.fsm.refresher.ring
        self.epochs: dict[int, list[Any]] = {}

    def event(self) -> Landing:
        return Landing(lambda: self.time)

    def cache(self, domain: Domain, order: RowOrder) -> PagedKVCache:
        """Target and draft differ in pages, layers and table width."""
        flavour = FLAVOURS[self.backend]
        page, layers = ((4, 3), (8, 1))[domain]
        heads, dim = flavour.page(1, 2)
        geometry = Geometry(
            tokens_per_block=page,
            blocks_in_primary_pool=8 * WIDTH // page,
            max_blocks_per_seq=WIDTH // page + 1 - domain,
            num_layers=layers,
            kv_factor=flavour.planes,
            num_kv_heads=heads,
            head_dim=dim,
            index_scale=layers * flavour.planes if order is RowOrder.BATCH else 1,
            row_order=order,
        )
        made = flavour.caches[domain](geometry, max_requests=8, host_blocks=4)
        for request in DUMMIES:
            made.add(request)
            made.reserve(request, page)
        return made

    # What the host knows.

    @property
    def rows(self) -> tuple[int, ...]:
        return (*self.known, *DUMMIES[: ROWS - len(self.known)])

    @property
    def true_lens(self) -> tuple[int, ...]:
        return tuple(self.known.get(request, 0) + TOKENS for request in self.rows)

    def batch(self, ahead: int = 0) -> Batch:
        """Every row with its new tokens; `ahead` of what the host knows, where it does not know how many were kept."""
        return Batch(self.rows, [length + ahead for length in self.true_lens], [TOKENS] * ROWS)

    def facts(self) -> tuple[Any, ...]:
        """What the target's tables are derived from. (Its lengths do not change without a phase in between.)"""
        cache = self.caches[TARGET]
        where = tuple(tuple(slots(cache, request)) for request in self.rows)
        return cache.generation, self.rows, where

    # Requests and pages.

    @rule(event=EVENT)
    def happens(self, event: Event) -> None:
        """To the first request, or a new one of this length; in one cache, where it is about pages."""
        what, domain, length = event
        cache = self.caches[domain]
        if what == "joins" and len(self.known) < ROWS:
            self.join(length)
        elif what == "finishes or is aborted" and self.known:
            request = next(iter(self.known))
            del self.known[request]
            for each in self.caches:
                each.free(request)
        elif what == "a page moves" and self.known:
            self.move_a_page(domain)
        elif what == "storage is allocated anew":
            self.former.append(cache.pool)  # so that its address is not given out again
            cache.pool = cache.pool.clone()
            cache.generation += 1
            for captured in self.graphs.values():
                captured.dead |= captured.reads(domain)

    def join(self, length: int) -> None:
        request = next(self.ids)
        self.known[request] = length
        for cache in self.caches:
            cache.add(request)
        self.reserve()

    def move_a_page(self, domain: Domain) -> None:
        """To the host and back, into another slot."""
        request = next(iter(self.known))
        self.caches[domain].offload(request, 0)
        self.caches[domain].load_back(request)

    def reserve(self) -> None:
        for request, length in self.known.items():
            for cache in self.caches:
                cache.reserve(request, min(length + 2 * TOKENS, WIDTH))

    # Graphs.

    def prepare_target(self, batch: Batch, **ahead: Any) -> None:
        self.fsm.target_prepare(batch, **ahead)
        self.prepared = self.facts()

    def record(self, whole: bool, corrects: bool) -> Captured:
        """Warmed up first: what is baked in must be true."""
        batch = self.batch()
        self.prepare_target(batch)
        with self.fsm.draft_forward(batch):
            pass
        self.prepare_target(batch)
        was, engine = snapshot(self.fsm), RecordedEngine()
        with self.fsm.record((ROWS, TOKENS), max_len=LONGEST) as graph, engine.capture():
            captured = Captured(graph, engine, whole, corrects)
            if whole:
                self.correct(captured, TARGET, batch)
                self.fsm.target_prepare(batch)
                self.read(captured, TARGET, 0)
            self.correct(captured, DRAFT, batch)
            with self.fsm.draft_forward(batch):
                self.read(captured, DRAFT, 0)
                self.advance(batch)
                self.read(captured, DRAFT, 1)
        assert graph.state is GraphState.READY
        assert was.differences(snapshot(self.fsm)) == [], "recording executes nothing"
        return captured

    def graph(self, which: int) -> Captured:
        """One of each kind, recorded when it is first used."""
        if which not in self.graphs:
            self.graphs[which] = self.record(*KINDS[which])
        return self.graphs[which]

    def drop_the_dead(self) -> None:
        """They are recorded again on their next use."""
        self.graphs = {which: each for which, each in self.graphs.items() if not each.dead}

    def correct(self, captured: Captured, domain: Domain, batch: Batch) -> None:
        if captured.corrects:
            self.fsm.announce(batch, domain)
            lens = self.fsm.value("kv_lens_cuda", domain)
            lens[:ROWS] = self.lens
            self.fsm.publish("kv_lens_cuda", lens, domain)

    def advance(self, batch: Batch) -> None:
        """The next draft token, by the graph itself."""
        after = evolve(batch, kv_lens=[length + 1 for length in batch.kv_lens], tokens=[1] * ROWS)
        self.fsm.announce(after)
        lens, tokens = self.fsm.value("kv_lens_cuda"), self.fsm.value("_seq_lens_cuda")
        lens[:ROWS] += 1
        tokens[:ROWS] = 1
        self.fsm.publish("kv_lens_cuda", lens)
        self.fsm.publish("_seq_lens_cuda", tokens)
        self.fsm.draft_step(after)

    def read(self, captured: Captured, domain: Domain, step: int) -> None:
        """What a kernel does: the addresses that the metadata carries now."""
        for name, domains in self.carried.items():
            if domain in domains:
                found = getattr(self.metadata, name)
                captured.seen[domain, step, name] = out = torch.empty_like(found)
                out.copy_(found)

    @rule(
        which=WHICH,
        kept=st.integers(1, TOKENS),
        behind=st.booleans(),
        before=st.lists(EVENT, max_size=2),
        prepares=st.sampled_from([True, True, True, False]),
        meanwhile=st.lists(EVENT, max_size=1),
        lands=st.booleans(),
        foresees=st.sampled_from(["nothing", "an eager draft", "this replay"]),
    )
    def step(
        self,
        which: int,
        kept: int,
        behind: bool,
        before: list[Event],
        prepares: bool,
        meanwhile: list[Event],
        lands: bool,
        foresees: str,
    ) -> None:
        """As an engine does it. Something may happen before it, and between the target's phase and the replay; it may
        run behind the host's back, so that the host's lengths are provisional; its copies may take longer than it; the
        target's phase may be told of the draft's."""
        captured = self.graph(which)
        self.time += lands
        for event in before:
            self.happens(event)
        ahead = TOKENS if behind and captured.corrects else 0
        if prepares:
            draft = None if foresees == "nothing" else self.batch(ahead)
            graph = captured.graph if foresees == "this replay" else None
            self.prepare_target(self.batch(ahead), draft=draft, graph=graph)
        for event in meanwhile:
            self.happens(event)
        self.replay(captured, self.batch(ahead), kept)
        self.drop_the_dead()

    def replay(self, captured: Captured, batch: Batch, kept: int) -> None:
        stale = captured.whole and self.prepared != self.facts()
        if self.fsm.state is not Phase.TARGET_PREPARE:
            self.refused(captured, batch, IllegalTransition)
            return
        if captured.dead or stale or max(batch.kv_lens) > LONGEST:
            self.refused(captured, batch, GraphContractBroken, StaleResource)
            return
        self.lens.copy_(torch.tensor(self.true_lens))
        with self.fsm.draft_replay(captured.graph, batch):
            captured.engine.replay()
        self.compare(captured)
        if captured.whole:
            self.prepared = ()
        for request in self.known:
            self.known[request] = min(self.known[request] + kept, WIDTH - TOKENS - 1)
        self.reserve()

    def compare(self, captured: Captured) -> None:
        lens = self.true_lens
        passes = [(TARGET, 0, lens, TOKENS)] if captured.whole else []
        passes += [(DRAFT, 0, lens, TOKENS), (DRAFT, 1, tuple(length + 1 for length in lens), 1)]
        checked = 0
        for domain, step, lengths, new in passes:
            truth = Truth(self.caches[domain], self.rows, lengths, (new,) * ROWS).tables()
            for name, domains in self.carried.items():
                if domain in domains and name in truth:
                    assert captured.seen[domain, step, name].tolist() == truth[name], (name, domain, step)
                    checked += 1
        assert checked >= 3 * len(passes)

    def refused(self, captured: Captured, batch: Batch, *kinds: type[IllegalTransition]) -> None:
        """By name, and with nothing changed: state, metadata, contents, stamps. Twice: the first time the machine may
        note what moved in the managers, which nothing else has looked at."""
        self.refused_once(captured, batch, kinds)
        was = snapshot(self.fsm)
        self.refused_once(captured, batch, kinds)
        assert was.differences(snapshot(self.fsm)) == []

    def refused_once(self, captured: Captured, batch: Batch, kinds: tuple[type[IllegalTransition], ...]) -> None:
        written, contents = self.contents()
        with pytest.raises(kinds) as caught:
            self.fsm.draft_replay(captured.graph, batch)
        assert type(caught.value) in kinds
        assert all(map(torch.equal, written, contents)), "a buffer was written"

    def contents(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Every buffer, and what it holds."""
        resources, bindings = self.fsm.backend.resources, self.fsm.bindings
        values = [pair for each in bindings for pair in zip(resources, each.values, each.present, strict=True)]
        held = [value for resource, value, there in values if there and isinstance(resource, Buffer)]
        return held, [each.clone() for each in held]

    @rule(
        which=WHICH,
        beyond=st.sampled_from(["fewer rows", "more rows", "more tokens", "a context", "longer"]),
    )
    def exceed(self, which: int, beyond: str) -> None:
        """Beyond what was captured, whoever asks."""
        batch = self.batch()
        resized = {
            "fewer rows": Batch(batch.request_ids[:2], batch.kv_lens[:2], batch.tokens[:2]),
            "more rows": Batch((*batch.request_ids, 99), (*batch.kv_lens, 1), (*batch.tokens, 1)),
            "more tokens": Batch(batch.request_ids, [length + 1 for length in batch.kv_lens], [TOKENS + 1] * ROWS),
            "a context": evolve(batch, num_contexts=1),
            "longer": evolve(batch, kv_lens=[LONGEST + 1] * ROWS),
        }[beyond]
        captured = self.graph(which)
        self.prepare_target(self.batch())
        self.refused(captured, resized, GraphContractBroken)

    @rule(data=st.data(), domain=st.sampled_from(Domain))
    def rebind(self, data: st.DataObject, domain: Domain) -> None:
        """A buffer is allocated anew: graphs that read it are dead at once, the others are not."""
        name = data.draw(st.sampled_from([each for each, domains in self.carried.items() if domain in domains]))
        self.fsm.bind(name, self.fsm.value(name, domain).clone(), domain)
        for captured in self.graphs.values():
            if captured.reads(domain):
                captured.dead = True
                assert captured.graph.state is GraphState.INVALID
        if domain is TARGET:
            self.prepared = ()

    @precondition(lambda self: any(not each.dead for each in self.graphs.values()) and self.known)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """One of the tables that the host refreshes is left out, while a page moves."""
        made = [each for each in self.fsm.backend.resources if isinstance(each, Table) and each.refreshed_by == "host"]
        sources = self.fsm.ledger.sources
        reads_pages = [each.name for each in made if DRAFT in each.domains and "blocks" in sources[each.name]]
        name = data.draw(st.sampled_from(reads_pages))
        captured = next(each for each in self.graphs.values() if not each.dead)
        batch = self.batch()
        if max(batch.kv_lens) > LONGEST:
            return
        self.prepare_target(self.batch())
        self.move_a_page(DRAFT)
        self.fsm.announce(batch, DRAFT)
        self.fsm.switch.leave_out((0, self.fsm.ledger.mask([name])))
        self.fsm.explain()  # looks at the managers
        was = snapshot(self.fsm)
        with pytest.raises(StaleResource) as caught:
            self.fsm.draft_replay(captured.graph, batch)
        self.fsm.switch.leave_out((0, 0))
        assert (caught.value.resource, caught.value.domain) == (name, DRAFT)
        # The tables beside it were refreshed where they stand; they were stale before, and count as stale still.
        ledger = self.fsm.ledger
        stale = [f"{ledger.names[each]} [draft] has other contents" for each in bits(ledger.stale[DRAFT])]
        assert [line for line in was.differences(snapshot(self.fsm)) if line not in stale] == []

    @rule()
    def draft_eagerly(self) -> None:
        """Between two replays."""
        self.prepare_target(self.batch())
        with self.fsm.draft_forward(self.batch()):
            self.fsm.draft_step()

    # Copies on their way.

    def waiting(self) -> list[StagingBuffer]:
        return [each for each in self.ring.buffers if not each.poll()]

    @precondition(lambda self: hasattr(self, "ring"))
    @invariant()
    def what_a_copy_still_reads_is_not_rewritten(self) -> None:
        """Neither by the machine, nor by whoever asks for the buffer early."""
        for staged in self.waiting():
            event: Any = staged.event
            now = [each.clone() for each in staged.tensors]
            sent = self.in_flight.setdefault((id(staged), event.copies), now)
            with pytest.raises(PendingTransfer):
                staged.fill()
            assert staged.machine.state is Transfer.IN_FLIGHT
            assert all(map(torch.equal, sent, now))

    @precondition(lambda self: hasattr(self, "ring"))
    @invariant()
    def an_epoch_has_one_set_of_values(self) -> None:
        """What a graph bakes in, by identity: a contract that was found to hold holds until the next epoch."""
        resources = self.fsm.backend.resources
        for binding in self.fsm.bindings:
            values = zip(resources, binding.values, strict=True)
            held = [value for resource, value in values if isinstance(resource, Buffer | Pointer)]
            assert all(map(is_, held, self.epochs.setdefault(binding.epoch, held)))


@pytest.mark.parametrize("backend", FLAVOURS)
def test_every_accepted_replay_reads_what_is_right(backend: str) -> None:
    """Whatever is interleaved; and each wrong one is refused and leaves everything as it was."""
    machine = type(f"Engine_{backend}", (Engine,), {"backend": backend})
    budget = settings(max_examples=30, stateful_step_count=20, deadline=None, derandomize=True)
    machine.TestCase.settings = budget
    machine.TestCase("runTest").runTest()
