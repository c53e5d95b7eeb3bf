"""What a decode loop holds: the machine that drives (or guards) the switch between two KV caches.

The protocol of every transition, in order: 1. look the row up; 2. admission; 3. activate; 4. refresh what is stale,
all tables in one launch; 5. verify that all the row requires is fresh; 6. commit and trace. An exception in 3 to 6
undoes them in reverse and is raised again, so the engine is where it was. Only a failed undo is worse: FAULTED.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Protocol

import torch
from attrs import define, evolve

from specfsm.backends.backend import Backend, backend_for, infer_sizes
from specfsm.backends.binding import Binding
from specfsm.backends.refresher import Masks, Refresher, only
from specfsm.backends.resource import Alias, Buffer, DomainView, Path, Pointer, Shared, Table
from specfsm.backends.script import Script
from specfsm.backends.staging import Event
from specfsm.domain import Batch, Domain, KVManager, UnifiedCache
from specfsm.errors import (
    ContentsViolated,
    IllegalTransition,
    NestedEvent,
    NestedPhase,
    RestoreFailed,
    UnknownMetadata,
    WrongThread,
)
from specfsm.explain import Explanation, explain
from specfsm.graph import Graph
from specfsm.poison import Poison
from specfsm.states.graph import Graph as GraphState
from specfsm.states.machine import Arc, Callback, Compiled, build, compile_machine
from specfsm.states.phase import PHASE, Phase
from specfsm.states.resource import Saved, bits
from specfsm.states.table import Move, Requirement
from specfsm.switch import Carried, Switch
from specfsm.trace import Trace, Work
from specfsm.validation import Mode, Validation
from specfsm.verify import Check, mutation, no_recording, require_contract, require_untampered, staleness

__all__ = ["Contract", "DraftWindow", "Orchestrator"]

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT
DRAFT_PHASES = (Phase.DRAFT_FORWARD, Phase.DRAFT_REPLAY)
# Looking an enum's member up takes 0.2 µs.
EAGER, RECORDING, REPLAY, RESTORE = Path.EAGER, Path.RECORDING, Path.REPLAY, Path.RESTORE
STAMPS, TENSORS, CONTENTS = Check.STAMPS, Check.TENSORS, Check.CONTENTS
PATHS = {
    "target_prepare": Path.PREPARE,
    "draft_forward": Path.EAGER,
    "draft_step": Path.PREPARE,
    "draft_replay": Path.REPLAY,
    "restore": Path.RESTORE,
}


class Contract(Protocol):
    """An admission rule, of an engine or of `specfsm.contracts`. It is asked before anything changes."""

    @property
    def events(self) -> Iterable[str]:
        """The events it is asked for."""

    def admit(self, fsm: Orchestrator, event: str, batch: Batch | None) -> None:
        """Raise an `IllegalTransition` to refuse `event`."""


@define
class _Row:
    """One row of the phase table, compiled, callbacks included, so that an event looks one thing up.

    Args:
        path: on which path the resources meet it; None where they do not.
        refreshes: whether it refreshes anything, and so needs a batch.
        activates: whether the metadata may have to be exchanged.
        intact: whether the target must not have been written meanwhile.
    """

    source: Phase
    move: Move
    event: str
    to: Phase
    before: tuple[Callback, ...]
    after: tuple[Callback, ...]
    path: Path | None
    refreshes: bool
    activates: bool
    intact: bool


_Ahead = tuple[Batch, Graph | None]
"""What the draft's next phase will run, and the graph that it will be replayed from."""
_Before = tuple[Saved, Carried]
"""What a transition found, should it have to be undone: the ledger, and what the metadata carried."""
_Held = tuple[tuple[DomainView, ...], tuple[list[Any], ...], list[int]]
"""For each domain its view, its values, and what had declined."""

FIRING = 0
"""Whose turn it is while an event is under way: no thread's."""
NO_WORK: Work = (None, 0, 0, 0)


class DraftWindow:
    """The draft phase as a ``with`` block: left by return or by exception, the target is restored.

    Args:
        opened: whether it was this block that entered the draft phase; one inside another leaves it open.
    """

    __slots__ = ("fsm", "opened")

    def __init__(self, fsm: Orchestrator, opened: bool) -> None:
        self.fsm = fsm
        self.opened = opened

    def __enter__(self) -> Orchestrator:
        return self.fsm

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        fsm, found = self.fsm, None
        while self.opened and fsm.machine.state in DRAFT_PHASES:
            try:
                fsm._fire("restore", fsm.switch.target)
            except ContentsViolated as violation:  # each domain reports one, once; the block is left nevertheless
                found = found or violation
        if found is not None:
            raise found


class Orchestrator:
    """Drives the phase machine over one attention-metadata object that serves two KV caches in turn.

    Args:
        metadata: carries the device buffers under the attributes that the backend declares, draft twins included.
        backend: what the metadata holds; by default the one registered for its type.
        target: the target's KV manager.
        draft: the draft's, or a `UnifiedCache` that says why it shares the target's.
        check: "off", "stamps", "tensors" or "contents"; by default ``SPECFSM_CHECK``, else "stamps".
        mode: what a violation does that level "contents" finds: "raise" refuses the transition that observes it, "log"
            warns of it once.
        poison: whether buffers that go stale are filled with what no kernel can use, see `specfsm.poison`.
        contracts: admission rules, asked in this order before anything changes, for the events of the phase table and
            for "record".
        observer: has ``on_enter_<phase>``, ``on_exit_<phase>``, ``before_<event>``, ``after_<event>`` methods. One that
            raises undoes the transition.
        guard: the engine switches and refreshes by itself and reports with `publish`; the machine only judges.
        drop: resources (or (resource, domain) pairs) whose refresh is left out: fault injection, for tests and demos.
        trace: where transitions are noted; by default a ring of the last 4096.
        event: makes the events that guard staging copies; for tests.

    Raises:
        UnknownMetadata: nothing is registered for the metadata's type, or a buffer or twin is missing or misshapen.

    Attributes:
        asked: while contracts are asked, the graph that is about to be recorded or replayed.

    One thread drives it: the one that made it, or whichever calls `adopt` in IDLE.
    """

    def __init__(
        self,
        metadata: Any,
        *,
        backend: Backend | None = None,
        target: KVManager,
        draft: KVManager | UnifiedCache,
        check: str | Check | None = None,
        mode: Mode = "raise",
        poison: bool = False,
        contracts: Sequence[Contract] = (),
        observer: object = None,
        guard: bool = False,
        drop: Iterable[str | tuple[str, Domain]] = (),
        trace: Trace | None = None,
        event: Callable[[], Event] | None = None,
    ) -> None:
        self.metadata = metadata
        self.backend = backend or backend_for(metadata)
        self.check = Check.named(check if check is not None else os.environ.get("SPECFSM_CHECK", "stamps"))
        self._looks = self.check > STAMPS
        self.guard = guard
        self.unified = draft if isinstance(draft, UnifiedCache) else self.backend.unified
        self.ledger = self.backend.ledger()
        self.bindings = self._bind(target, target if self.unified else draft, event)
        self.switch = Switch(metadata, *self.bindings, self._masks(drop))
        self.machine = Compiled(PHASE, compile_machine(build(PHASE, observer), PHASE))
        asked = (*PHASE.events, "record")
        self.contracts = {name: tuple(each for each in contracts if name in each.events) for name in asked}
        self._driven = {pair: _row(pair[0], arc) for pair, arc in self.machine.arcs.items()}
        self._recorded = {pair: _recorded(row) for pair, row in self._driven.items() if row.path is not Path.REPLAY}
        self._rows = self._driven
        self.asked: Graph | None = None
        self.trace = trace if trace is not None else Trace()
        self.trace.names = self.ledger.names
        resources = self.backend.resources
        self.carried = tuple(resource.attribute for resource in resources if resource.attribute)
        self.seen = tuple([-1] * len(resources) for _ in Domain)
        self.declined = [0 for _ in Domain]
        self._lazy = self.ledger.mask(each.name for each in resources if each.lazy)
        self._made = self._lazy | self.ledger.mask(
            each.name for each in resources if isinstance(each, Pointer | Alias) or len(each.attributes) > 1
        )
        self._pointers = self.ledger.mask(
            each.name for each in resources if isinstance(each, Pointer) and {*each.reads} <= {*self.backend.inputs}
        )
        self._kept = self.ledger.mask(each.name for each in resources if each.attribute is None)
        self._buffers = self.ledger.mask(each.name for each in resources if isinstance(each, Buffer))
        self._own = self.ledger.mask(each.name for each in resources if not isinstance(each, Shared))
        self._windows = (DraftWindow(self, False), DraftWindow(self, True))
        self._mutated = 0
        self._before: _Before | None = None
        self._held: _Held | None = None
        self._attempted = [0, 0]
        self.recording: Graph | None = None
        self.validation = Validation(self, mode, event) if self.check >= CONTENTS else None
        self.poison = Poison(self) if poison else None
        self._watched = self.validation is not None or poison
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.adopt()

    def _bind(self, target: Any, draft: Any, event: Callable[[], Event] | None) -> tuple[Binding, Binding]:
        _require_manager("target", target)
        _require_manager("draft", draft)
        sizes, device = infer_sizes(self.backend, self.metadata)
        bindings = [Binding(self.backend, TARGET, self.metadata, target, sizes.axes(target), device)]
        if draft is not target:
            bindings.append(Binding(self.backend, DRAFT, self.metadata, draft, sizes.axes(draft), device))
        if not self.guard:
            _require_own_buffers(self.backend, self.metadata, bindings)
        self.refresher = Refresher(bindings, device, event)
        for binding in bindings:
            self._bind_all(binding)
        return bindings[0], bindings[-1]

    def _bind_all(self, binding: Binding) -> None:
        """Everything in this domain is bound, and nothing is known of its contents."""
        self.refresher.forget()
        for place, resource in enumerate(self.backend.resources):
            if binding.present[place] and not resource.lazy:
                self.ledger.bind(binding.domain, place)

    def _masks(self, drop: Iterable[str | tuple[str, Domain]]) -> tuple[int, int]:
        masks = [0, 0]
        for item in drop:
            name, domains = (item, tuple(Domain)) if isinstance(item, str) else (item[0], (item[1],))
            self.backend.resource(name)
            for domain in domains:
                masks[self.bindings[domain].domain] |= self.ledger.mask([name])  # a unified draft is the target's
        return masks[0], masks[1]

    # The events.

    @property
    def state(self) -> Phase:
        """The phase the machine is in."""
        state: Phase = self.machine.state
        return state

    @property
    def domain(self) -> Domain:
        """The cache that the metadata serves now."""
        return self.switch.active.domain

    def target_prepare(
        self, batch: Batch | None = None, *, draft: Batch | None = None, graph: Graph | None = None
    ) -> None:
        """Make the metadata the target's, fresh for `batch` (by default the same as last time).

        Args:
            draft: what the draft's next phase will run, where that is known by now: what is stale in its cache is
                refreshed along with the target's, in one submission to the stream that is current, and the switch finds
                it done. What moves in between is refreshed by the switch, as ever.
            graph: the one from which that phase will be replayed, if it will: what it refreshes itself is left to it.
        """
        if graph is not None and draft is None:
            raise TypeError("target_prepare: graph says how the draft's batch will run, so it needs draft=")
        target = self.switch.target
        ahead = None if draft is None else (draft, graph)
        self._fire("target_prepare", target, target.view.batch if batch is None else batch, None, ahead)

    def draft_forward(self, batch: Batch | None = None) -> DraftWindow:
        """Switch to the draft's cache. Use it as a ``with`` block, or call `restore` when the draft is done.

        Args:
            batch: what the draft's first pass runs; by default the target's batch.
        """
        switch = self.switch
        self._fire("draft_forward", switch.draft, switch.target.view.batch if batch is None else batch)
        return self._windows[True]

    def draft_step(self, batch: Batch | None = None) -> None:
        """The next draft token: re-derive what reads lengths or layout.

        Args:
            batch: by default the last one's `Batch.next_step`: one more token each.
        """
        if batch is None and self.switch.draft.batch is not None:
            batch = self.switch.draft.batch.next_step()
        self._fire("draft_step", self.switch.draft, batch)

    def draft_replay(self, graph: Graph, batch: Batch | None = None) -> DraftWindow:
        """Make ready for one replay of a captured graph: everything it reads and does not refresh itself is fresh.

        Args:
            graph: from `record`; its contract must hold.
            batch: what the draft's phases in it run; by default the one that is current in the draft phase, else the
                target's.

        Raises:
            GraphContractBroken: an address, a shape or a bound differs from the recording.
            StaleResource: something that it reads is stale, in either domain.
        """
        if not isinstance(graph, Graph):
            raise TypeError(f"draft_replay needs a graph that `record` made, not {graph!r}")
        if self.recording is not None and get_ident() == self._thread:
            raise no_recording(self, "draft_replay", graph.key)
        opened = self.machine.state not in DRAFT_PHASES
        current = self.switch.target.batch if opened else self.switch.draft.batch
        self._fire("draft_replay", self.switch.draft, current if batch is None else batch, graph)
        return self._windows[opened]

    @contextmanager
    def record(self, key: Hashable, *, max_len: int | None = None, graph: Graph | None = None) -> Iterator[Graph]:
        """Record phases: inside the ``with`` block every event activates and refreshes nothing from the host.

        Nothing becomes fresh by it. What a graph refreshes itself (``refreshed_by="graph"``) is recorded. When the
        block ends the machine and the metadata are where they were; an exception leaves no graph behind.

        Args:
            key: names the graph in errors: (padded batch size, draft length), say.
            max_len: longest KV length it may be replayed with; by default what its tables hold.
            graph: one to record again.

        Raises:
            IllegalTransition: a draft phase is active, or another graph is being recorded.
            StaleResource: from an event in the block, when a value that would be baked in is stale: warm up first.
        """
        if self.recording is not None or self.machine.state in DRAFT_PHASES:
            raise no_recording(self, "record", key)
        graph = graph or Graph(key, max_len=max_len)
        self._ask("record", self.switch.target.batch, graph)
        graph.record()
        self._before = self._held = None
        self._hold()
        before, held, state = self._remember(), self._held, self.machine.state
        self.recording, self._rows = graph, self._recorded
        try:
            yield graph
        except BaseException:
            graph.abandon()
            raise
        finally:
            self.recording, self._rows = None, self._driven
            self._put_back(before, held)
            self.machine.state = state
        graph.seal(self.bindings)
        self.graphs.add(graph)

    def restore(self) -> None:
        """Give the target its own values back. Nothing is refilled: the target kept its own buffers."""
        self._fire("restore", self.switch.target)

    def finish(self) -> None:
        """The loop ends or pauses."""
        self._fire("finish", self.switch.target)

    def settle(self) -> None:
        """Wait for every validation that was enqueued (check level "contents") and report what it found.

        Raises:
            ContentsViolated: in mode "raise".
        """
        if self.validation is not None:
            self.validation.observe("settle", wait=True)

    @property
    def violations(self) -> tuple[ContentsViolated, ...]:
        """What check level "contents" has found so far."""
        return () if self.validation is None else tuple(self.validation.violations)

    def reset(self) -> None:
        """Leave FAULTED: the target's values are bound again, and everything is stale in both domains."""
        if (self.machine.state, "reset") not in self._rows or get_ident() != self._thread:
            raise self._refusal("reset")
        self.switch.reset()
        for binding in self.refresher.bindings:
            self._bind_all(binding)
            self.ledger.unbind(binding.domain, self._lazy)
        self._mutated = 0
        self.machine.fire("reset")

    def adopt(self) -> None:
        """Let the calling thread drive from now on. Only in IDLE: elsewhere a phase is half way."""
        if self.machine.state is not Phase.IDLE:
            raise IllegalTransition(
                self.machine.state,
                "adopt",
                legal=PHASE.legal(self.machine.state),
                why=f"the phase {self.machine.state.name} is half way, and thread {self._owner.name!r} drives it",
                mend="let that thread come to IDLE first (restore, finish), then adopt",
            )
        self._owner: threading.Thread = threading.current_thread()
        self._thread = get_ident()

    # What the engine reports.

    def publish(self, resource: str, value: Any, domain: Domain | None = None) -> None:
        """Report that `resource` was written: the one primitive that stamps.

        Args:
            resource: its name.
            value: what was written: the bound buffer itself, or the new plan, reference or view. None says that the
                refresh declined, and stamps nothing.
            domain: in which cache; by default the one that is served now.

        Raises:
            ValueError: a buffer other than the bound one was written; `bind` it first.
        """
        binding, place = self._place(resource, domain)
        kind = self.backend.resources[place]
        if self.recording is not None:
            self.recording.wrote(binding.domain, 1 << place & ~self._lazy)
        else:
            self._pull(binding)
        if self.validation is not None:
            self.validation.written[binding.domain] &= ~(1 << place)
        if value is None:
            self.declined[binding.domain] |= self.ledger.stale[binding.domain] & 1 << place
            return
        if isinstance(kind, Buffer):
            _require_bound(resource, binding, place, value)
            self._note_overwrite(binding, place)
            binding.doubt()
        else:
            if isinstance(kind, Pointer):
                binding.keep(place, value)
            else:
                binding.values[place] = value
            self.switch.carry(binding, 1 << place)
        if kind.lazy:
            self.ledger.bind(binding.domain, place)
        self._stamp(binding, 1 << place)

    def announce(self, batch: Batch, domain: Domain | None = None) -> None:
        """Say what the next phase of a domain runs, before it begins: an engine that refreshes by itself (``guard``)
        announces, writes, publishes, and only then fires the event with the same batch."""
        binding = self.switch.active if domain is None else self.bindings[domain]
        _require_room("announce", batch, binding)
        if self.recording is None:
            self._pull(binding)
        self._see(binding, batch)

    def dirty(self, resource: str, domain: Domain | None = None) -> None:
        """Declare an in-place edit: the resource, and what is derived from it, is stale until refreshed."""
        binding, place = self._place(resource, domain)
        self.refresher.forget()
        self.ledger.move(binding.domain, resource)
        self._note_versions(binding, 1 << place)
        if binding is self.switch.target:
            self._mutated &= ~(1 << place)

    def moved(self, source: str, domain: Domain | None = None) -> None:
        """Report that an input moved that the machine cannot see: a backend's own, say. Both domains by default."""
        if source not in self.backend.inputs:
            raise KeyError(f"{self.backend.name} has no input {source!r}; it has {', '.join(self.backend.inputs)}")
        self.refresher.forget()
        for binding in self.refresher.bindings if domain is None else (self.bindings[domain],):
            self.ledger.move(binding.domain, source)

    def invalidate(self, resource: str) -> None:
        """Drop a plan or cache in both domains: whoever needs it makes it again."""
        place = self.ledger.index[self.backend.resource(resource).name]
        kind = self.backend.resources[place]
        if not kind.lazy:
            raise TypeError(
                f"{resource} is a {kind.kind}; only a Plan or a Cache can be invalidated: "
                f"call dirty({resource!r}) to have it refreshed"
            )
        for each in self.bindings:
            each.values[place] = None
            self.ledger.unbind(each.domain, 1 << place)
        self.switch.carry(self.switch.active, 1 << place)

    def bind(self, resource: str, tensor: torch.Tensor, domain: Domain | None = None) -> None:
        """Take another buffer for `resource` from now on. It is stale until refreshed.

        Raises:
            IllegalTransition: a graph is being recorded: what it captured so far has the old address.
        """
        binding, place = self._place(resource, domain)
        if self.recording is not None:
            raise IllegalTransition(
                self.machine.state,
                "bind",
                subject=f"{resource} [{binding.domain}]",
                why=f"a graph is being recorded ({self.recording.key}), and has the old address already",
                mend="bind it before the recording, and let it live as long as the graph",
            )
        # A shared buffer is one: whichever domain binds it, both hold the new one.
        shared = isinstance(self.backend.resources[place], Shared)
        for each in self.refresher.bindings if shared else (binding,):
            self.refresher.rebind(each, place, tensor)
            self.ledger.bind(each.domain, place)
            self.switch.carry(each, 1 << place)
            for graph in self.graphs:
                if graph.reads[each.domain] >> place & 1:
                    graph.invalidate(f"{resource} [{each.domain}] was bound to another buffer")

    def value(self, resource: str, domain: Domain | None = None) -> Any:
        """What `resource` is in a domain: its buffer, reference, view or plan."""
        binding, place = self._place(resource, domain)
        return binding.values[place]

    def batch(self, domain: Domain | None = None) -> Batch | None:
        """The batch that a domain's resources are derived from; by default the domain that is served now."""
        return (self.switch.active if domain is None else self.bindings[domain]).batch

    def explain(self) -> Explanation:
        """Every resource in both domains: state, stamp, verdict. Prints as a table."""
        for binding in self.refresher.bindings:
            self._pull(binding)
        unowned = () if self.validation is None else self.validation.unowned
        return explain(self.backend, self.ledger, self.bindings, self.state, self.domain, self.unified, unowned)

    def _place(self, resource: str, domain: Domain | None) -> tuple[Binding, int]:
        declared = self.backend.resource(resource)
        binding = self.switch.active if domain is None else self.bindings[domain]
        if binding.domain not in declared.domains:
            declared_in = ", ".join(str(each) for each in declared.domains)
            raise KeyError(
                f"{resource} does not exist in the {binding.domain}'s cache: it is declared for {declared_in}"
            )
        return binding, self.ledger.index[resource]

    # The protocol.

    def _refusal(self, event: str) -> IllegalTransition:
        state = self.machine.state
        if get_ident() != self._owner.ident:
            return WrongThread(state, event, owner=self._owner.name, caller=threading.current_thread().name)
        if self._thread == FIRING:
            return NestedEvent(state, event)
        legal = tuple(name for name in PHASE.legal(state) if name != "fault")
        nested = event == "draft_forward" and state in DRAFT_PHASES
        return (NestedPhase if nested else IllegalTransition)(state, event, legal=legal)

    def _fire(
        self,
        event: str,
        binding: Binding,
        batch: Batch | None = None,
        graph: Graph | None = None,
        ahead: _Ahead | None = None,
    ) -> None:
        """The six steps. What is not needed when nothing moved is behind an ``if``: this runs thrice a decode step."""
        started = perf_counter_ns()
        machine, switch, view, side = self.machine, self.switch, binding.view, binding.side
        # 1. The row.
        row = self._rows.get((machine.state, event))
        caller = get_ident()
        if row is None or caller != self._thread:
            raise self._refusal(event)
        self._thread, self._before, self._held, work = FIRING, None, None, NO_WORK
        try:
            # 2. Admission: whatever can be known before anything changes.
            if row.refreshes:
                if batch is not view.batch or batch is None:
                    _require_room(event, batch, binding)
                manager = view.manager
                moved = manager.blocks_version != binding.blocks_version or manager.generation != binding.generation
                if moved and row.path is not RECORDING:
                    self._pull(binding)
            if ahead is not None:
                self._foresee(row, ahead[0])
            if self.contracts[event] or graph is not None or self._looks:
                self._admit(row, binding, batch, graph)
            if row.before:
                _call(row.before)
            if row.path is not None:
                # 3. Activate.
                steps = switch.scripts[row.path][side]
                if batch is not view.batch and batch is not None:
                    self._see(binding, batch)
                entered = row.activates and binding is not switch.active
                if entered:
                    self._activate(binding, row.path, steps)
                # 4. Refresh what is stale.
                if row.path is RECORDING:
                    work = self._record(row.move, binding, steps)
                else:
                    stale = self.ledger.stale[side]
                    if row.refreshes:
                        work, due = steps.idle, stale & steps.refreshable
                        also = 0 if ahead is None else self._due_ahead(*ahead)
                        if (due or also) and not self.guard:
                            work = self._refresh(row.move, binding, due, steps, graph, also)
                            stale = self.ledger.stale[side]
                    # 5. Verify.
                    doubts = self._mutated if row.intact else stale & steps.required
                    if (doubts or (entered and steps.missing) or graph is not None or self.guard) and self.check:
                        self._verify(row, binding, steps, entered, graph)
                    if self.validation is not None and row.refreshes:
                        self.validation.validate(event, binding, steps, graph)
                    if graph is not None:
                        self._replayed(graph)
            # 6. Commit.
            machine.state = row.to
            if row.after:
                _call(row.after)
            if self._watched:
                self._watch(graph)
        except BaseException as error:
            self._undo(row, error)
            raise
        finally:
            self._thread = caller
        self.trace.append((event, row.to, started, perf_counter_ns(), work))

    def _watch(self, graph: Graph | None) -> None:
        """A transition is through: what was enqueued to validate it counts, and what it made stale is poisoned."""
        if self.validation is not None:
            self.validation.commit()
        if self.poison is not None:
            self.poison.fill(graph)

    def _admit(self, row: _Row, binding: Binding, batch: Batch | None, graph: Graph | None) -> None:
        """Step 2, what not every engine asks for: contracts, a graph's contract, and the tensors themselves."""
        if self.validation is not None:
            self.validation.observe(row.event, row.to, wait=row.to is Phase.IDLE)
        if graph is not None and self.check:
            require_contract(self, row.move, graph, batch)
            if binding is not self.switch.target:
                self._require_target_of(graph, row.move)
        if self.check >= TENSORS and row.path is not None and not self.guard and self.recording is None:
            require_untampered(self, row.move, binding)
        self._ask(row.event, batch, graph)

    def _ask(self, event: str, batch: Batch | None, graph: Graph | None) -> None:
        """The contracts, last: one of them may be a vote, and whoever voted is expected to act."""
        self.asked = graph
        try:
            for contract in self.contracts[event]:
                contract.admit(self, event, batch)
        finally:
            self.asked = None

    def _pull(self, binding: Binding) -> None:
        """Note what moved in the domain's manager since it was last looked at."""
        manager = binding.view.manager
        generation, blocks_version = manager.generation, manager.blocks_version
        if (generation, blocks_version) != (binding.generation, binding.blocks_version):
            _require_geometry(binding)
            if generation != binding.generation:
                self.ledger.move(binding.domain, "manager")
            if blocks_version != binding.blocks_version:
                self.ledger.move(binding.domain, "blocks")
            binding.generation, binding.blocks_version = generation, blocks_version

    def _record(self, move: Move, binding: Binding, steps: Script) -> Work:
        """Instead of steps 4 and 5 while a graph is recorded: record what it refreshes itself, derive views.

        The first phase of a domain finds at every replay what the host refreshed before it, so all but the Python
        values that are baked in is taken as fresh. What goes stale later, inside the graph, only the graph can mend.
        """
        graph, domain, ledger = self.recording, binding.domain, self.ledger
        assert graph is not None
        assert binding.batch is not None
        self._hold()
        due = steps.recorded
        if graph.batches[domain] is None:
            ledger.assume(domain, ~steps.baked)
            due |= self._lazy
        graph.note(binding, steps, binding.batch)
        mask = (ledger.stale[domain] | due) & (steps.refreshable | steps.recorded)
        written, _ = self.refresher.refresh(only(binding, mask), ledger)
        self._take(binding, written[domain])
        stale = ledger.stale[domain] & steps.required
        if self.check and (stale or steps.refused):
            raise staleness(self, move, binding, stale, steps.refused)
        return domain, 0, 0, 0

    def _replayed(self, graph: Graph) -> None:
        """What a graph writes is stale for everyone else."""
        self._remember()
        if graph.state is GraphState.READY:  # an unchecked replay runs whatever there is
            graph.machine.fire("replay")
        for binding in self.refresher.bindings:
            self.ledger.edit(binding.domain, graph.writes[binding.domain])

    def _foresee(self, row: _Row, batch: Batch) -> None:
        """Admission of what the draft's next phase will run."""
        draft = self.switch.draft
        _require_room(row.event, batch, draft)
        if row.path is not RECORDING:
            self._pull(draft)

    def _due_ahead(self, batch: Batch, graph: Graph | None) -> int:
        """Of the draft's, what is stale for its next phase and may be refreshed before it: its own buffers and values.
        What both caches share waits for the switch."""
        draft = self.switch.draft
        if draft is self.switch.target:
            return 0
        self._see(draft, batch)
        mask = self.switch.scripts[EAGER if graph is None else REPLAY][DRAFT].refreshable & self._own
        return self.ledger.stale[DRAFT] & (mask if graph is None else mask & ~graph.made[DRAFT])

    def _see(self, binding: Binding, batch: Batch) -> None:
        """Take `batch` as the domain's, and move the inputs in which it differs from the last one."""
        self._hold()
        if batch is not binding.batch:
            for moved in batch.moved(binding.batch):
                self.ledger.move(binding.domain, moved)
            binding.see(batch)

    def _activate(self, binding: Binding, path: Path, steps: Script) -> None:
        """Step 3: the metadata takes the values of `binding`."""
        carried = (self._before or self._remember())[1]
        switch = self.switch
        if self.guard:
            switch.active = binding
            return
        if path is RESTORE:
            switch.to_target(steps)
            if steps.shared:
                self._give_back(steps)
        else:
            self._mutated = 0
            switch.to_draft(path, steps, carried)
        if steps.cleared:
            bound, stale = self.ledger.bound, self.ledger.stale
            if steps.cleared & (bound[0] | bound[1] | stale[0] | stale[1]):
                self._forget(steps.clears, steps.cleared)

    def _forget(self, clears: Iterable[tuple[str, int, Any]], cleared: int) -> None:
        """Plans and caches were dropped: no domain has one."""
        self._hold()
        for binding in self.bindings:
            for _, place, _ in clears:
                binding.values[place] = None
            self.ledger.unbind(binding.domain, cleared)

    def _give_back(self, steps: Script) -> None:
        """The shared buffers hold the target's contents again, so the draft's are gone."""
        mask = sum(1 << place for place in steps.shared)
        self.ledger.edit(DRAFT, mask)
        self._note_versions(self.switch.target, mask)

    def _refresh(
        self, move: Move, binding: Binding, stale: int, steps: Script, graph: Graph | None, ahead: int
    ) -> Work:
        """Step 4, and what is due `ahead` in the draft's cache. Before a replay, values first: one that the graph baked
        in, and that is another now, refuses it before any buffer is written."""
        side, written = binding.side, 0
        if graph is not None:
            mine = steps.refreshable & ~graph.made[side]
            if stale & mine & self._pointers:
                written = self._write(only(binding, stale & mine & self._pointers))[side]
                if self.check:
                    require_contract(self, move, graph, binding.batch)
            stale = self.ledger.stale[side] & mine
        also = 0
        if stale or ahead:
            more = self._write((stale, ahead) if ahead else only(binding, stale))
            written |= more[side]
            also = more[DRAFT] if ahead else 0
        if not written and not also:
            return steps.idle
        return binding.domain, written & ~self._lazy, steps.idle[2] & ~written, also & ~self._lazy

    def _write(self, masks: Masks) -> list[int]:
        """Producers before consumers, all tables of a domain in one launch; for each domain the mask of what was
        written."""
        self._hold()
        attempted = self._attempted
        self._attempted = [attempted[0] | masks[0], attempted[1] | masks[1]]
        written, declined = self.refresher.refresh(masks, self.ledger)
        for each, mask in enumerate(written):
            if mask or declined[each]:
                self.declined[each] |= declined[each]
                self._take(self.bindings[each], mask)
                if self.validation is not None:
                    self.validation.written[each] |= mask
        return written

    def _take(self, binding: Binding, written: int) -> None:
        """These were refreshed: what is lazy is gone until somebody makes it, the rest is stamped and carried."""
        self.ledger.unbind(binding.domain, written & self._lazy)
        self._stamp(binding, written & ~self._lazy)
        if written & self._made:
            self.switch.carry(binding, written & self._made)

    def _verify(self, row: _Row, binding: Binding, steps: Script, entered: bool, graph: Graph | None) -> None:
        """Step 5: every requirement of the row."""
        missing = steps.missing if entered else 0
        if row.intact:
            if self._mutated:
                raise mutation(self, row.move, next(bits(self._mutated)))
            stale = 0
        else:
            domain = binding.domain
            stale = self.ledger.stale[domain] & steps.required
            if graph is not None:
                stale &= graph.needs(domain)
            if self.guard:
                stale &= ~self._kept
                if binding is not self.switch.target:
                    missing |= self.ledger.bound[TARGET] & self._lazy & ~self.ledger.bound[DRAFT]
        if stale or missing:
            raise staleness(self, row.move, binding, stale, missing)

    def _require_target_of(self, graph: Graph, move: Move) -> None:
        """A graph that holds the target's forward too reads both caches, and a replay refreshes the draft's only."""
        if graph.reads[TARGET]:
            self._pull(self.switch.target)
        excused = self._lazy | (self._kept if self.guard else 0)
        stale = self.ledger.stale[TARGET] & graph.needs(TARGET) & ~excused
        if stale:
            raise staleness(self, move, self.switch.target, stale, 0)

    def _stamp(self, binding: Binding, mask: int) -> None:
        self.ledger.publish(binding.domain, mask)
        self.declined[binding.domain] &= ~mask
        self._note_versions(binding, mask)
        if binding is self.switch.target:
            self._mutated &= ~mask

    def _note_overwrite(self, binding: Binding, place: int) -> None:
        """One address that serves both caches: what is written for one is lost for the other, unless it was saved."""
        other = self.bindings[binding.domain.other]
        if (
            place not in self.switch.shared
            and other is not binding
            and _one_buffer(binding.values[place], other.values[place])
        ):
            self.ledger.move(other.domain, self.ledger.names[place])
            if other is self.switch.target and self.switch.active is not other:
                self._mutated |= 1 << place

    def _note_versions(self, binding: Binding, mask: int) -> None:
        """Level "tensors": what the in-place counters are now that the machine knows of the write."""
        if self.check >= Check.TENSORS:
            for place in bits(mask):
                if isinstance(self.backend.resources[place], Buffer):
                    self.seen[binding.domain][place] = binding.values[place]._version

    # Undo.

    def _remember(self) -> _Before:
        """What is there before anything changes. Whoever changes something asks first; only the first looks."""
        before = self._before
        if before is None:
            self._attempted = [0, 0]
            ledger = self.ledger
            self._before = before = (ledger.saved or ledger.save(), self.switch.remember())
        return before

    def _hold(self) -> None:
        """The same, for whoever changes what the domains hold."""
        self._remember()
        if self._held is None:
            target, draft = self.bindings
            self._held = (target.view, draft.view), (target.values[:], draft.values[:]), self.declined[:]

    def _undo(self, row: _Row, error: BaseException) -> None:
        """Put everything back in reverse; if that fails, FAULTED."""
        self.machine.state = row.source
        if self._before is None:
            return
        try:
            self._put_back(self._before, self._held)
        except BaseException as worse:
            self._fault(row.event, error, worse)
        self._distrust()

    def _put_back(self, before: _Before, held: _Held | None) -> None:
        ledger, carried = before
        if held is not None:
            views, values, declined = held
            for binding, view, own in zip(self.bindings, views, values, strict=True):
                binding.put_back(view, own)
            self.declined[:] = declined
        self.ledger.load(ledger)
        written = self.switch.put_back(carried)
        self._note_versions(self.switch.active, written)

    def _distrust(self) -> None:
        """Buffers were refreshed in place. One that was fresh before may hold what the undone event derived."""
        for domain in Domain:
            self.ledger.edit(domain, self._attempted[domain] & self._buffers & ~self.ledger.stale[domain])

    def _fault(self, event: str, error: BaseException, worse: BaseException) -> None:
        """The undo failed too. Observers are told; what they raise joins the group."""
        fault = self.machine.find("fault")
        self.machine.state = fault.move.to
        errors = [error, worse]
        for callback in (*fault.before, *fault.after):
            try:
                callback()
            except BaseException as another:
                errors.append(another)
        if all(isinstance(each, Exception) for each in errors):
            raise RestoreFailed(event, [each for each in errors if isinstance(each, Exception)]) from None
        error.add_note(f"undoing {event} failed too: {worse!r}; the machine is FAULTED")


def _call(callbacks: Iterable[Callback]) -> None:
    for callback in callbacks:
        callback()


def _row(source: Any, arc: Arc) -> _Row:
    move = arc.move
    to: Any = move.to
    return _Row(
        source,
        move,
        move.event,
        to,
        arc.before,
        arc.after,
        PATHS.get(move.event),
        refreshes=bool(move.refreshes),
        activates=move.activates is not None,
        intact=Requirement.TARGET_INTACT in move.requires,
    )


def _recorded(row: _Row) -> _Row:
    """The same row while a graph is recorded: whatever refreshes only activates."""
    return evolve(row, path=RECORDING) if row.refreshes else row


MANAGER_NEEDS = ("geometry", "generation", "blocks_version", "host_block_offsets", "pool_pointers", "arrange")


def _require_manager(role: str, manager: Any) -> None:
    if isinstance(manager, KVManager):
        return
    lacking = [name for name in MANAGER_NEEDS if not hasattr(manager, name)]
    declare = ", or declare UnifiedCache(reason) if the draft shares the target's cache" if role == "draft" else ""
    raise UnknownMetadata(
        f"the {role} manager {type(manager).__qualname__} cannot serve a cache domain",
        (f"it lacks {', '.join(lacking)}",),
        f"give it what specfsm.KVManager names{declare}",
    )


def _require_own_buffers(backend: Backend, metadata: Any, bindings: Sequence[Binding]) -> None:
    """A twin at the target's address would have the draft's refresh overwrite what the target reads."""
    target, draft = bindings[0].values, bindings[-1].values
    offenders = tuple(
        f"{resource.twin} [draft] is the target's own buffer, {resource.attribute}"
        for place, resource in enumerate(backend.resources)
        if isinstance(resource, Table) and draft is not target and _one_buffer(target[place], draft[place])
    )
    if offenders:
        raise UnknownMetadata(
            f"{type(metadata).__qualname__} cannot be switched by {backend.name}",
            offenders,
            "give the draft a buffer of its own, or declare the resource Shared",
        )


def _one_buffer(one: Any, other: Any) -> bool:
    """Whether both are there, at one address. (An empty tensor has none.)"""
    return one is not None and other is not None and 0 != one.data_ptr() == other.data_ptr()


def _require_geometry(binding: Binding) -> None:
    """Every buffer and recipe was built for one geometry; a cache of another shape needs another orchestrator."""
    now = binding.manager.geometry
    if now is not binding.view.geometry and now != binding.view.geometry:
        raise UnknownMetadata(
            f"the geometry of the {binding.domain}'s manager changed",
            (f"bound: {binding.view.geometry}", f"now: {now}"),
            "allocate buffers for the new geometry and build another Orchestrator over them",
        )


def _require_room(event: str, batch: Batch | None, binding: Binding) -> None:
    if batch is None:
        raise ValueError(f"{event} needs a batch: there was none before it, so pass the one that the phase runs")
    limit = binding.view.axes["S"]
    if batch.rows > limit:
        raise ValueError(
            f"{event}: a batch of {batch.rows} rows does not fit the {limit} rows of the buffers: split it, "
            "or allocate them for more (Sizes.max_sequences) and build another Orchestrator"
        )
    most = binding.most_tokens
    if most is not None and batch.num_tokens > most:
        raise ValueError(
            f"{event}: a batch of {batch.num_tokens} tokens does not fit the {most} tokens of the buffers: split it, "
            "or allocate them for more (Sizes.max_tokens) and build another Orchestrator"
        )


def _require_bound(resource: str, binding: Binding, place: int, value: Any) -> None:
    bound = binding.values[place]
    same = isinstance(value, torch.Tensor) and value.data_ptr() == bound.data_ptr() and value.shape == bound.shape
    if not same:
        raise ValueError(
            f"{resource} [{binding.domain}] was published with another tensor than the bound one: "
            f"write the bound buffer (fsm.value({resource!r})), or fsm.bind the new one first"
        )
