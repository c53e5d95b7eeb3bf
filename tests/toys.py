"""What the suites share: a small KV manager, a backend with all seven kinds, and worlds to fire events in.

A suite is written once and runs over every backend in `BACKENDS`; a new backend joins with one line there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import attrs
import pytest
import torch
from attrs import define, field, frozen

from specfsm.backends.backend import Backend, Sizes
from specfsm.backends.deepseek_v4 import DeepSeekV4
from specfsm.backends.dsa import DSA
from specfsm.backends.flash_mla import FlashMLA
from specfsm.backends.resource import (
    Alias,
    Buffer,
    Cache,
    DomainView,
    Plan,
    Pointer,
    Resource,
    Shared,
    Staged,
    Table,
)
from specfsm.backends.trtllm import Trtllm
from specfsm.domain import INPUTS, NOBODY, AddressSpace, Batch, Domain, Geometry, RowOrder, Unit
from specfsm.errors import IllegalTransition
from specfsm.kernels.recipes import GatherTable
from specfsm.orchestrator import Orchestrator
from specfsm.states.phase import PHASE
from specfsm.states.table import Table as StateTable

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT
SIZES = Sizes(max_sequences=5, max_tokens=16, max_draft_len=3)

# The manager.


class Manager:
    """A KV manager over a host table: allocates slots in order, and says where each request's row lies.

    It has a sliding window too: one type, in pool 0, a page of each plane in each layer.
    """

    def __init__(self, geometry: Geometry, rows: int = 6, base_address: int = 0x1000) -> None:
        self.geometry = geometry
        self.generation = 1
        self.blocks_version = 1
        shape = (geometry.num_pools, rows, geometry.kv_factor, geometry.max_blocks_per_seq)
        self.host_block_offsets = torch.full(shape, -1, dtype=torch.int32)
        self.pool_pointers = tuple(base_address + pool for pool in range(geometry.num_pools))
        self.slots: dict[int, list[int]] = {}
        self.row_of: dict[int, int] = {}
        self.free = list(range(geometry.blocks_in_primary_pool))
        layers = range(geometry.num_layers)
        self.sliding_pools = [[0] for _ in layers]
        self.sliding_scales = [[geometry.pages_per_slot] for _ in layers]
        self.sliding_offsets = [layer * geometry.kv_factor for layer in layers]
        self.sparse_pointers = {1: base_address, 4: base_address + 0x400}
        self.window_pointers = {layer: base_address + layer for layer in layers}
        self.compressed_pointers = {layer: base_address + 0x400 + layer for layer in layers}
        self.sliding_base = torch.full(shape, -1, dtype=torch.int32)

    def compute_sliding_base(self, request_ids: Sequence[int]) -> torch.Tensor:
        self.arrange(request_ids)
        slots = self.host_block_offsets.div(self.geometry.index_scale, rounding_mode="floor")
        return self.sliding_base.copy_(slots.clamp(min=-1))

    def allocate(self, request: int, blocks: int = 1) -> None:
        """Give a request more blocks, and note it in the table."""
        taken = [self.free.pop(0) for _ in range(blocks)]
        self.slots.setdefault(request, []).extend(taken)
        if self.geometry.row_order is RowOrder.SLOT:
            row = self.row_of.setdefault(request, self.host_block_offsets.shape[1] - 1 - len(self.row_of))
            self._write(row, request)
        self.blocks_version += 1

    def swap(self) -> None:
        """Exchange the last blocks of the first two requests: the assignment moves, nothing else does."""
        first, second = list(self.slots)[:2]
        self.slots[first][-1], self.slots[second][-1] = self.slots[second][-1], self.slots[first][-1]
        for request in (first, second):
            if request in self.row_of:
                self._write(self.row_of[request], request)
        self.blocks_version += 1

    def arrange(self, request_ids: Sequence[int]) -> Sequence[int]:
        if self.geometry.row_order is RowOrder.SLOT:
            return [self.row_of[request] for request in request_ids]
        self.host_block_offsets.fill_(-1)
        for row, request in enumerate(request_ids):
            self._write(row, request)
        return range(len(request_ids))

    def page_owners(self, pool: str) -> torch.Tensor:
        owners = torch.full((self.geometry.blocks_in_primary_pool,), NOBODY)
        for request, slots in self.slots.items():
            owners[slots] = request
        return owners

    def _write(self, row: int, request: int) -> None:
        slots = torch.tensor(self.slots[request], dtype=torch.int32)
        planes = torch.arange(self.geometry.kv_factor, dtype=torch.int32)
        self.host_block_offsets[:, row, :, len(slots) :] = -1
        self.host_block_offsets[:, row, :, : len(slots)] = slots * self.geometry.index_scale + planes[:, None]


REQUESTS = (7, 3, 9)


def geometry(domain: Domain, order: RowOrder = RowOrder.BATCH, kv_factor: int = 2) -> Geometry:
    """Target and draft differ in everything."""
    layers = 3 if domain is TARGET else 1
    return Geometry(
        tokens_per_block=4 if domain is TARGET else 2,
        blocks_in_primary_pool=40 if domain is TARGET else 23,
        max_blocks_per_seq=7 if domain is TARGET else 5,
        num_layers=layers,
        kv_factor=kv_factor,
        index_scale=layers * kv_factor,
        row_order=order,
    )


def manager(domain: Domain, order: RowOrder = RowOrder.BATCH, kv_factor: int = 2) -> Manager:
    """A manager in which the requests have their blocks, interleaved."""
    made = Manager(geometry(domain, order, kv_factor), base_address=0x1000 << domain)
    for _ in range(3):
        for request in REQUESTS:
            made.allocate(request)
    return made


BATCH = Batch(REQUESTS, kv_lens=(8, 8, 8), tokens=(2, 2, 2), num_contexts=1)
"""Equal lengths, so that one input can move without another."""

OTHER = {
    "batch": attrs.evolve(BATCH, request_ids=REQUESTS[::-1]),
    "lengths": attrs.evolve(BATCH, kv_lens=(9, 8, 8)),
    "layout": attrs.evolve(BATCH, tokens=(1, 2, 2)),
}
"""Batches that differ from `BATCH` in one input."""


# The backend: ten resources, all seven kinds.


def _pad(host: torch.Tensor, live: Iterable[int], sentinel: int) -> torch.Tensor:
    values = torch.tensor(tuple(live), dtype=host.dtype)
    host.fill_(sentinel)
    host[: len(values)] = values
    return host


def fill_base(view: DomainView, host: torch.Tensor) -> torch.Tensor:
    view.rows()
    return host.copy_(view.manager.host_block_offsets)


def fill_rows(view: DomainView, host: torch.Tensor) -> torch.Tensor:
    return _pad(host, view.rows(), -1)


def refresh_first_slots(view: DomainView, buffer: torch.Tensor) -> torch.Tensor:
    """What only the device knows: it reads a table that the launch has just written."""
    lens = view.batch.kv_lens if view.batch is not None else ()
    buffer.fill_(len(lens))
    return buffer


def refresh_counters(view: DomainView, buffer: torch.Tensor) -> torch.Tensor:
    return _pad(buffer, view.batch.tokens if view.batch is not None else (), 0)


def refresh_scratch(view: DomainView, buffer: torch.Tensor) -> torch.Tensor:
    return buffer.fill_(sum(view.batch.kv_lens) + 100 * view.domain if view.batch is not None else 0)


def load_scratch(buffer: torch.Tensor, saved: list[int]) -> None:
    buffer.copy_(torch.tensor(saved, dtype=buffer.dtype))


SLOTS = AddressSpace("kv", Unit.SLOT)

RESOURCES: tuple[Resource, ...] = (
    Pointer("manager_ref", reads=("manager",), of=lambda view: view.manager),
    Staged(
        "base",
        reads=("manager", "blocks", "batch"),
        attribute=None,
        dtype="int32",
        shape=("P", "R", "Q", "B"),
        space=AddressSpace("kv", Unit.ENTRY),
        sentinel=-1,
        fill=fill_base,
    ),
    Staged(
        "rows",
        reads=("manager", "blocks", "batch"),
        dtype="int32",
        shape=("S",),
        space=AddressSpace("kv", Unit.ROW),
        sentinel=-1,
        fill=fill_rows,
        host_attribute="host_rows",
    ),
    Alias("live_rows", of="rows", reads=("batch",), derive=lambda rows, view: rows[: len(view.batch or ())]),
    Table(
        "block_table",
        reads=("base", "rows"),
        dtype="int32",
        shape=("S", "B"),
        space=SLOTS,
        recipe=GatherTable(base="base", rows="rows", unit=Unit.SLOT),
    ),
    Table(
        "first_slots",
        reads=("block_table", "lengths", "adapter"),
        dtype="int64",
        shape=("S*C",),
        sentinel=0,
        refresh=refresh_first_slots,
    ),
    Plan("plan", reads=("manager", "batch", "lengths", "layout")),
    Cache("layouts", reads=("manager",)),
    Shared("counters", reads=("batch", "layout"), dtype="int32", shape=("S",), sentinel=0, refresh=refresh_counters),
    Shared(
        "scratch",
        reads=("batch", "lengths"),
        dtype="int64",
        shape=(2,),
        refresh=refresh_scratch,
        save=lambda buffer: buffer.tolist(),
        load=load_scratch,
    ),
)


class Toy(Backend):
    """Ten resources, all seven kinds, and an input of its own."""

    def __init__(self) -> None:
        super().__init__("toy", RESOURCES, {"adapter": "the adapter that the requests run with"})


@frozen
class Flavour:
    """A backend, and what its cache looks like."""

    make: Callable[[], Backend]
    kv_factor: int = 2


BACKENDS: dict[str, Flavour] = {
    "toy": Flavour(Toy),
    "trtllm": Flavour(Trtllm),
    "flash_mla": Flavour(FlashMLA, kv_factor=1),
    "dsa": Flavour(DSA),
    "deepseek_v4": Flavour(DeepSeekV4),
}
"""Every suite that takes a backend runs over these."""


# Fault injection: every single action passes a fuse, which counts, and can be told to blow.


class Injected(Exception):
    """What a blown fuse raises."""


@define(slots=False)
class Fuse:
    """Passed by every action.

    Args:
        at: the action that fails, counted from 0 or by name (its first time); None lets all pass.
        error: what it raises.
        late: whether the action has already been done when it fails.
        stuck: whether every later action fails as well.
    """

    at: int | str | None = None
    error: type[BaseException] = Injected
    late: bool = False
    stuck: bool = False
    armed: bool = False
    passed: list[str] = field(factory=list)
    blown: list[BaseException] = field(factory=list)

    def arm(
        self, at: int | str | None, error: type[BaseException] = Injected, *, late: bool = False, stuck: bool = False
    ) -> None:
        self.at, self.error, self.late, self.stuck = at, error, late, stuck
        self.passed, self.blown, self.armed = [], [], True

    def disarm(self) -> None:
        self.armed = False

    @contextmanager
    def around(self, action: str) -> Iterator[None]:
        if not self.armed:
            yield
            return
        first = not self.blown and self.at in (action, len(self.passed))
        self.passed.append(action)
        blows = first or (self.stuck and bool(self.blown))
        if blows and not self.late:
            self.blow(action)
        yield
        if blows:
            self.blow(action)

    def blow(self, action: str) -> None:
        error = self.error(f"injected into: {action}")
        self.blown.append(error)
        raise error

    def wrap(self, action: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def fused(*arguments: Any) -> Any:
            with self.around(action):
                return function(*arguments)

        return fused


class Metadata:
    """What the engine's attention metadata is to the machine: attributes. Each set passes the fuse."""

    def __init__(self, fuse: Fuse) -> None:
        vars(self)["_fuse"] = fuse

    def __setattr__(self, name: str, value: Any) -> None:
        with vars(self)["_fuse"].around(f"set {name}"):
            vars(self)[name] = value


FUNCTIONS = ("of", "derive", "fill", "refresh", "save", "load")


def fused(backend: Backend, fuse: Fuse) -> Backend:
    """The same declaration; every function in it passes the fuse."""
    resources = []
    for resource in backend.resources:
        functions = {
            name: fuse.wrap(f"{name} {resource.name}", function)
            for name in FUNCTIONS
            if callable(function := getattr(resource, name, None))
        }
        resources.append(attrs.evolve(resource, **functions))
    own = {name: why for name, why in backend.inputs.items() if name not in INPUTS}
    return Backend(backend.name, tuple(resources), own, backend.unified)


@define
class Admission:
    """A contract that lets everything pass, and remembers what it was asked."""

    fuse: Fuse
    events: tuple[str, ...] = PHASE.events
    asked: list[str] = field(factory=list)

    def admit(self, fsm: Orchestrator, event: str, batch: Batch | None) -> None:
        with self.fuse.around(f"admit {event}"):
            self.asked.append(event)


def recorder(table: StateTable, note: Callable[[str], object]) -> Any:
    """An observer with every hook that `table` knows; each tells its name to `note`."""
    names = [f"{hook}_{state.value}" for state in table.states for hook in ("on_enter", "on_exit")]
    names += [f"{hook}_{event}" for event in table.events for hook in ("before", "after")]

    def hook(name: str) -> Callable[[Any], None]:
        def told(_: Any) -> None:
            note(name)

        return told

    return type("Recorder", (), {name: hook(name) for name in names})()


# Worlds.


@define
class World:
    """An orchestrator over toy managers, with everything a test may want to push."""

    fsm: Orchestrator
    metadata: Any
    target: Manager
    draft: Manager
    fuse: Fuse
    calls: list[str]

    def prepare(self, batch: Batch = BATCH) -> None:
        self.fsm.target_prepare(batch)

    def moves(self) -> Iterator[Batch]:
        """Steps in which all moves that may: batch, lengths, pages of each cache, a binding. The target is prepared."""
        for batch in (BATCH, OTHER["batch"], OTHER["lengths"], BATCH):
            self.round_trip(batch)
            self.target.swap()
            self.draft.swap()
            name = next(each.name for each in self.fsm.backend.resources if isinstance(each, Buffer) and each.recipe)
            self.fsm.bind(name, self.fsm.value(name).clone())
            self.prepare(batch)
            yield batch

    def round_trip(self, batch: Batch = BATCH) -> None:
        """One whole step: every (resource, domain) is fresh afterwards, plans and caches published."""
        self.fsm.target_prepare(batch)
        self.make_plans()
        with self.fsm.draft_forward(batch):
            self.make_plans()
            self.fsm.draft_step()

    def make_plans(self) -> None:
        """Whoever runs first makes the plans, fills the caches, and says so."""
        for resource in self.fsm.backend.resources:
            if resource.lazy:
                self.fsm.publish(resource.name, {"made": "up"} if isinstance(resource, Cache) else object())

    def move(self, source: str, domain: Domain) -> Batch | None:
        """Move one input of a domain, and nothing else; the batch to fire the next event with, if that moves it."""
        held = self.target if domain is TARGET else self.draft
        if source in OTHER:
            return other_batch(self.fsm.bindings[domain].batch, source)
        if source == "manager":
            held.generation += 1
        elif source == "blocks":
            held.swap()
        else:
            self.fsm.moved(source, domain)
        return None


def other_batch(batch: Batch | None, source: str) -> Batch:
    """A batch that differs from this one in one input."""
    assert batch is not None
    if source == "batch":
        return attrs.evolve(batch, request_ids=batch.request_ids[::-1])
    if source == "lengths":
        return attrs.evolve(batch, kv_lens=tuple(length + 1 for length in batch.kv_lens))
    return attrs.evolve(batch, tokens=tuple(3 - tokens for tokens in batch.tokens))


def world(
    backend: str | Backend = "toy",
    *,
    order: RowOrder = RowOrder.BATCH,
    draft_order: RowOrder | None = None,
    draft: Any = None,
    observe: bool = False,
    contracts: Sequence[Any] | None = None,
    **options: Any,
) -> World:
    """A bound orchestrator in IDLE. `backend` is a key of `BACKENDS` or a backend of the test's own."""
    fuse = Fuse()
    flavour = BACKENDS[backend] if isinstance(backend, str) else Flavour(lambda: backend)
    declared = fused(flavour.make(), fuse)
    target = manager(TARGET, order, flavour.kv_factor)
    own = manager(DRAFT, order if draft_order is None else draft_order, flavour.kv_factor)
    metadata = Metadata(fuse)
    declared.allocate(metadata, target, own, SIZES, "cpu")
    calls: list[str] = []

    def note(name: str) -> None:
        with fuse.around(f"call {name}"):
            calls.append(name)

    fsm = Orchestrator(
        metadata,
        backend=declared,
        target=target,
        draft=own if draft is None else draft,
        observer=recorder(PHASE, note) if observe else None,
        contracts=[Admission(fuse)] if contracts is None else contracts,
        **options,
    )
    for binding in dict.fromkeys(fsm.bindings):
        if binding.launch is not None:
            binding.launch = _FusedLaunch(binding.launch, fuse)  # type: ignore[assignment]  # stands in for it
    return World(fsm, metadata, target, own, fuse, calls)


class _FusedLaunch:
    """The launch, behind the fuse."""

    def __init__(self, launch: Any, fuse: Fuse) -> None:
        self.launch, self.fuse = launch, fuse
        self.masks: list[int] = []

    def __call__(self, mask: int) -> None:
        self.masks.append(mask)
        with self.fuse.around("launch"):
            self.launch(mask)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.launch, name)


# What a refusal must leave alone.

Error = TypeVar("Error", bound=IllegalTransition)


@frozen
class Snapshot:
    """Everything of an orchestrator that a refused event may not change: fact → value, or the object itself."""

    facts: dict[str, Any]
    contents: dict[str, Any]
    objects: dict[str, Any]

    def differences(self, now: Snapshot) -> list[str]:
        """What is not as it was; empty where everything is."""
        lines = [f"{name}: {was!r} → {now.facts[name]!r}" for name, was in self.facts.items() if was != now.facts[name]]
        lines += [f"{name} is another object" for name in self.objects.keys() ^ now.objects.keys()]
        common = self.objects.keys() & now.objects.keys()
        lines += [f"{name} is another object" for name in sorted(common) if self.objects[name] is not now.objects[name]]
        lines += [f"{name} has other contents" for name in self.contents if self.changed(name, now)]
        return lines

    def changed(self, name: str, now: Snapshot) -> bool:
        return name not in now.contents or not torch.equal(self.contents[name], now.contents[name])


def snapshot(fsm: Orchestrator) -> Snapshot:
    """State, domain, ledger (versions, stamps, masks), every attribute by identity, every owned buffer's contents."""
    ledger = fsm.ledger
    facts: dict[str, Any] = {
        "state": fsm.state,
        "serves": fsm.domain,
        "declined": list(fsm.declined),
        "mutated": fsm._mutated,
        "bound": [int(mask) for mask in ledger.bound],
        "stale": [int(mask) for mask in ledger.stale],
        "entered": fsm.switch.originals is not None,
    }
    objects: dict[str, Any] = {f"metadata.{name}": value for name, value in vars(fsm.metadata).items()}
    contents: dict[str, Any] = {}
    for binding in dict.fromkeys(fsm.bindings):
        domain = binding.domain
        names = (*ledger.inputs, *ledger.names)
        facts |= {f"version of {n} [{domain}]": v for n, v in zip(names, ledger.versions[domain], strict=True)}
        facts |= {f"stamp of {n} [{domain}]": s for n, s in zip(ledger.names, ledger.stamps[domain], strict=True)}
        objects[f"batch [{domain}]"] = binding.batch
        for place, (name, value) in enumerate(zip(ledger.names, binding.values, strict=True)):
            objects[f"{name} [{domain}]"] = value
            lent = domain is TARGET and place in fsm.switch.shared  # the draft's contents; the target's are saved
            if isinstance(fsm.backend.resources[place], Buffer) and binding.present[place] and not lent:
                contents[f"{name} [{domain}]"] = value.clone()
    objects |= {f"saved {ledger.names[place]}": saved for place, saved in fsm.switch.shared.items()}
    for index, original in enumerate(fsm.switch.originals or ()):
        objects[f"original {index}"] = original
    for place, host in ((place, host) for binding in fsm.bindings for place, host in binding.hosts.items()):
        attribute = getattr(fsm.backend.resources[place], "host_attribute", None)
        if attribute is not None and getattr(fsm.metadata, attribute) is host:
            contents[f"host half of {ledger.names[place]} [{fsm.domain}]"] = host.clone()
    return Snapshot(facts, contents, objects)


def buffers(fsm: Orchestrator, domain: Domain) -> dict[str, torch.Tensor]:
    """Contents of every buffer of a domain, by resource."""
    binding = fsm.bindings[domain]
    return {
        resource.name: value.clone()
        for resource, value in zip(fsm.backend.resources, binding.values, strict=True)
        if isinstance(resource, Buffer) and domain in resource.domains
    }


def refused(fsm: Orchestrator, kind: type[Error], event: Callable[[], object]) -> Error:
    """What `event` is refused with. It changes nothing; what the managers did before is noted first."""
    fsm.explain()
    before = snapshot(fsm)
    with pytest.raises(kind) as caught:
        event()
    assert before.differences(snapshot(fsm)) == []
    assert caught.value.state is fsm.state
    return caught.value


def halves(fsm: Orchestrator, name: str, domain: Domain) -> list[torch.Tensor]:
    """The host half of a staged resource on either side of the ring."""
    slot = fsm.refresher.slots[domain, fsm.ledger.index[name]]
    return [buffer.tensors[slot] for buffer in fsm.refresher.ring.buffers]


class Tape:
    """Stands in for a device's recorder: a replay runs what was recorded."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.busy = self.refuses = False

    def capturing(self) -> bool:
        return self.busy

    def record(self, issue: Callable[[], None]) -> Callable[[], None]:
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            issue()

        return replay
