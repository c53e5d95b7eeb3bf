"""One cache domain of a bound backend: its buffers and values, and how to refresh what is stale in it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from attrs import define, field, frozen

from specfsm.backends.backend import Backend, attribute_in, new_buffer, shape_in
from specfsm.backends.resource import Alias, Buffer, Cache, DomainView, Plan, Pointer, Resource, Shared, Staged, Table
from specfsm.backends.staging import Event, Flights, StagingBuffer, StagingRing, events
from specfsm.domain import Batch, Domain, KVManager
from specfsm.errors import UnknownMetadata
from specfsm.kernels.refresh import RefreshLaunch
from specfsm.states.resource import Ledger, bits

__all__ = ["Binding", "no_collection"]

EPOCHS = count(1)
"""One count for all bindings, so that none takes another's epoch for its own."""


class Binding:
    """A backend's resources in one domain.

    Args:
        backend: the declaration.
        domain: which of the two.
        metadata: carries the device buffers under the declared attributes.
        manager: the domain's KV manager.
        axes: extents of the symbolic axes in this domain.
        device: where buffers that the metadata does not carry are made.
        event: makes staging events; for tests.

    Attributes:
        values: by place, what a switch puts on the metadata: buffers, references, views; None where none is made yet.
        hosts: by place, the host half of a Staged that was filled last.
        recorder: records the device's part of a refresh; None where nothing is recorded.
        side: the domain as an index.
        turn: which side of the staging rings a refresh fills; the other one's copies may still be pending.
        generation, blocks_version: the manager's, when it was last looked at; -1 before.
        epoch: moves with whatever may have moved a buffer or replaced a pointer, and never returns to what it was.

    Raises:
        UnknownMetadata: an attribute is missing, or a buffer has not the declared dtype or shape.
    """

    def __init__(
        self,
        backend: Backend,
        domain: Domain,
        metadata: Any,
        manager: KVManager,
        axes: Mapping[str, int],
        device: torch.device,
        event: Callable[[], Event] | None = None,
    ) -> None:
        self.backend = backend
        self.domain = domain
        self.side = int(domain)
        self.places = {resource.name: place for place, resource in enumerate(backend.resources)}
        self.view = DomainView(domain, manager, manager.geometry, None, axes, self._value)
        self.present = [domain in resource.domains for resource in backend.resources]
        self.values: list[Any] = [None] * len(backend.resources)
        self.rings: dict[int, StagingRing] = {}
        self.hosts: dict[int, torch.Tensor] = {}
        self.generation = self.blocks_version = -1
        self.epoch = next(EPOCHS)
        self.turn = 0
        backend.require_manager(domain, manager)
        self.flights = Flights(event or events(device))
        offenders = self._bind_buffers(metadata, device)
        if offenders:
            raise UnknownMetadata(
                f"{type(metadata).__qualname__} cannot be switched by {backend.name}",
                tuple(offenders),
                "let backend.allocate(metadata, target, draft, sizes, device) make them, or correct the engine's",
            )
        self.tasks = self._tasks()
        self.launch = self._new_launch()
        self.before, self.launched, self.after = self._stages()
        self._sources = self._read_buffers(backend.ledger())
        self._plans: dict[int, tuple[_Stage, ...]] = {}
        compiled = self.launch is None or self.launch.engine == "triton"
        self.recorder = Recorder(device) if device.type == "cuda" and compiled else None

    @property
    def manager(self) -> KVManager:
        return self.view.manager

    @property
    def batch(self) -> Batch | None:
        return self.view.batch

    def _value(self, name: str) -> Any:
        return self.values[self.places[name]]

    def see(self, batch: Batch | None) -> None:
        """Take `batch` as the one that refreshes derive from."""
        view = self.view
        self.view = DomainView(view.domain, view.manager, view.geometry, batch, view.axes, view.value)

    def _bind_buffers(self, metadata: Any, device: torch.device) -> list[str]:
        offenders: list[str] = []
        for place, resource in enumerate(self.backend.resources):
            if not isinstance(resource, Buffer) or not self.present[place]:
                continue
            attribute = attribute_in(resource, self.domain)
            if attribute is None:
                self.values[place] = new_buffer(resource, self.view.axes, device)
            else:
                self.values[place] = getattr(metadata, attribute, None)
                offenders += misfits(resource, attribute, self.values[place], self.view.axes, self.domain)
            if isinstance(resource, Staged) and not offenders:
                buffer = self.values[place]
                self.rings[place] = StagingRing(resource.name, tuple(buffer.shape), buffer.dtype, buffer.device)
        return offenders

    def _tasks(self) -> dict[int, int]:
        """Place of each recipe resource → its bit in the launch's mask."""
        places = [
            place
            for place, resource in enumerate(self.backend.resources)
            if isinstance(resource, Buffer) and resource.recipe is not None and self.present[place]
        ]
        return {place: 1 << task for task, place in enumerate(places)}

    def _new_launch(self) -> RefreshLaunch | None:
        resources = self.backend.resources
        recipes = {resources[place].name: resources[place].recipe for place in self.tasks}  # type: ignore[attr-defined]  # _tasks holds Buffers
        tensors = {
            resource.name: value
            for resource, value in zip(resources, self.values, strict=True)
            if isinstance(value, torch.Tensor)
        }
        return RefreshLaunch(recipes, tensors, self.view.geometry) if recipes else None

    def _stages(self) -> tuple[int, int, int]:
        """Masks of what is refreshed before the launch, in it, and after it."""
        before = launched = after = 0
        behind: set[str] = set()
        for place, resource in enumerate(self.backend.resources):
            bit = 1 << place
            sources = {*resource.reads, *((resource.of,) if isinstance(resource, Alias) else ())}
            if place in self.tasks:
                launched |= bit
            elif sources & behind:
                after |= bit
            else:
                before |= bit
                continue
            behind.add(resource.name)
        return before, launched, after

    def _read_buffers(self, ledger: Ledger) -> list[int]:
        """For each resource, the buffers whose contents its refresh may read; what is only dropped reads none."""
        resources = self.backend.resources
        buffers = [resource.name for resource in resources if isinstance(resource, Buffer)]
        return [
            0 if each.lazy else ledger.mask(name for name in buffers if name in ledger.sources[each.name])
            for each in resources
        ]

    # The refresh.

    def refresh(self, mask: int, ledger: Ledger) -> tuple[int, int]:
        """Refresh these resources, producers first, all recipes in one launch.

        Returns:
            (what was written, what declined). A reader of something that declined is not refreshed at all.
        """
        written = declined = 0
        self.turn = (self.turn + 1) % StagingRing.DEPTH
        for stage in self._plans.get(mask) or self._plan(mask):
            more, refused = self._run(stage, ledger, declined)
            written |= more
            declined |= refused
        return written, declined

    def _plan(self, mask: int) -> tuple[_Stage, ...]:
        """The stages of a refresh of `mask`: a new one begins where the host may read what the device is to write."""
        stages, stage, pending = [], _Stage(), 0
        for step in self._steps(mask):
            if step.on_host and self._sources[step.place] & pending:
                stages.append(stage)
                stage, pending = _Stage(), 0
            stage.add(step)
            if step.on_device:
                pending |= step.mask
        stages.append(stage)
        for each in stages:
            each.recordable = all(self._recordable(step) for step in each.devices)
        plan = self._plans[mask] = tuple(stages)
        return plan

    def _steps(self, mask: int) -> Iterator[_Step]:
        """What is done for these resources, in order."""
        for place in bits(mask & self.before):
            yield self._step(place)
        tasks = mask & self.launched
        if tasks:
            yield _Step(tasks, next(bits(tasks)), None, None, False, True)
        for place in bits(mask & self.after):
            yield self._step(place)

    def _step(self, place: int) -> _Step:
        resource = self.backend.resources[place]
        writer = WRITERS[type(resource)]
        staged = isinstance(resource, Staged)
        on_device = isinstance(resource, Buffer) and resource.on_device
        return _Step(1 << place, place, resource, writer, staged or not on_device, staged or on_device)

    def _run(self, stage: _Stage, ledger: Ledger, declined: int) -> tuple[int, int]:
        """The host's work of a stage, then the device's. What was filled and not sent is free again."""
        filled: list[tuple[int, StagingBuffer]] = []
        before, sent = declined, 0
        written = stage.mask
        try:
            for step in stage.hosts:
                if declined and step.mask & _readers(ledger, declined):
                    written &= ~step.mask
                    continue
                value = step.write(self, step.place, step.resource)
                if value is None:
                    declined |= step.mask
                elif step.on_device:
                    filled.append((step.place, value))
            if stage.recordable and not declined and self._replay(stage, filled):
                sent = len(filled)
            else:
                for place, buffer in filled:
                    self.values[place].copy_(buffer.tensor, non_blocking=True)
                    sent += 1
                for step in stage.devices:
                    skipped = step.mask & _readers(ledger, declined) if declined else 0
                    written &= ~skipped
                    if step.mask & ~skipped and self._write(step, skipped) is None:
                        declined |= step.mask
        except BaseException:
            for _, buffer in filled[sent:]:
                buffer.abandon()
            self._depart(filled[:sent])
            raise
        self._depart(filled)
        return written & ~declined, declined & ~before

    def _write(self, step: _Step, skipped: int) -> Any:
        """One step on the device; None says that it declined."""
        if step.resource is not None:
            return step.write(self, step.place, step.resource)
        assert self.launch is not None, "there are tasks only where there are recipes"
        self.launch(sum(self.tasks[place] for place in bits(step.mask & ~skipped)))
        return step

    # A stage that comes again and again is recorded once, with its copies, and replayed.

    def _replay(self, stage: _Stage, filled: list[tuple[int, StagingBuffer]]) -> bool:
        """Replay the recording of this stage and these staging buffers, if there is one by now."""
        if self.recorder is None or len(filled) + len(stage.devices) < 2 or self.recorder.capturing():
            return False
        replay = stage.recordings.get(self.turn)
        if replay is None:
            stage.seen += 1
            if stage.seen <= RECORD_AFTER * StagingRing.DEPTH:
                return False
            replay = self._recorded(stage, filled)
            if replay is None:
                return False
            stage.recordings[self.turn] = replay
        replay()
        torch.autograd.graph.increment_version(stage.outputs)
        return True

    def _recorded(self, stage: _Stage, filled: list[tuple[int, StagingBuffer]]) -> Callable[[], None] | None:
        """A recording of the device's part; None, for good, where something in it cannot be recorded."""
        assert self.recorder is not None, "only then is anything recorded"
        copies = [(self.values[place], buffer.tensor) for place, buffer in filled]
        results: list[Any] = []

        def issue() -> None:
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)
            results.extend(self._write(step, 0) for step in stage.devices)

        try:
            replay = self.recorder.record(issue)
        except RuntimeError:  # an operation that no stream may capture
            stage.recordable = False
            return None
        if any(result is None for result in results):
            stage.recordable = False
            return None
        stage.outputs = [self.values[place] for place, _ in filled] + [
            self.values[place] for step in stage.devices for place in bits(step.mask)
        ]
        return replay

    def _recordable(self, step: _Step) -> bool:
        """Whether a recording stays true: the step reads buffers, as the launch does, which stay where they are."""
        if step.resource is None:
            return True
        by_name = self.backend.by_name
        return all(read in self.backend.inputs or isinstance(by_name[read], Buffer) for read in step.resource.reads)

    def _depart(self, filled: list[tuple[int, StagingBuffer]]) -> None:
        """The copies were enqueued: one event behind them guards them all."""
        if filled:
            flight = self.flights.take()
            for place, buffer in filled:
                buffer.submit(flight)
                self.hosts[place] = buffer.tensor
            flight.depart()

    def keep(self, place: int, value: Any) -> None:
        """Take `value`, of a kind that a graph bakes in, as the domain's."""
        if value is not self.values[place]:
            self.values[place], self.epoch = value, next(EPOCHS)

    def doubt(self) -> None:
        """A buffer was written by others, who may have moved it in place."""
        self.epoch = next(EPOCHS)

    def put_back(self, view: DomainView, values: list[Any]) -> None:
        """What an undone transition found."""
        self.view, self.values[:] = view, values
        self.doubt()

    def forget(self) -> None:
        """Something moved that nobody can see: no staging buffer is patched before it was filled whole."""
        self.doubt()
        for ring in self.rings.values():
            ring.forget()

    def rebind(self, place: int, tensor: torch.Tensor) -> None:
        """Take `tensor` as the domain's buffer from now on."""
        resource = self.backend.resources[place]
        if not isinstance(resource, Buffer):
            raise TypeError(
                f"{resource.name} is a {resource.kind}: only a Table, Staged or Shared has a buffer to bind; "
                f"publish({resource.name!r}, value) gives it another value"
            )
        offenders = misfits(resource, resource.name, tensor, self.view.axes, self.domain)
        if offenders:
            raise ValueError("; ".join(offenders))
        if self.launch is not None and resource.name in self.launch.tensors:
            self.launch.rebind(resource.name, tensor)
        self.keep(place, tensor)
        self._plans.clear()


@frozen
class _Step:
    """One resource's refresh, or the launch of several.

    Args:
        mask: what it writes.
        place: of the resource, or of the launch's first.
        resource: None for the launch.
        write: how it is written.
        on_host: whether the host runs it and may read what it is derived from.
        on_device: whether the device writes it, when it gets there.
    """

    mask: int
    place: int
    resource: Any
    write: Any
    on_host: bool
    on_device: bool


@define(eq=False)
class _Stage:
    """Work of the host, then work of the device, none of which the host's part waits for.

    Attributes:
        hosts: filled, derived, dropped and referred to by the host, in order.
        devices: written by the device, in order, after what was filled is copied.
        mask: all that it writes.
        recordable: whether the device's part may be recorded.
        recordings: which side of the staging rings is copied → replay of the device's part.
        seen: how often the stage ran without one.
        outputs: the tensors that a replay writes.
    """

    hosts: list[_Step] = field(factory=list)
    devices: list[_Step] = field(factory=list)
    mask: int = 0
    recordable: bool = False
    recordings: dict[int, Callable[[], None]] = field(factory=dict)
    seen: int = 0
    outputs: list[torch.Tensor] = field(factory=list)

    def add(self, step: _Step) -> None:
        (self.hosts if step.on_host else self.devices).append(step)
        self.mask |= step.mask


RECORD_AFTER = 2
"""Recording takes a millisecond or two: only what ran so often already is recorded."""


class Recorder:
    """Records device work as a CUDA graph: its few copies and kernels cost the host one launch instead of one each.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()  # graphs of a domain run one after the other: scratch may be shared

    def capturing(self) -> bool:
        """Whether the engine captures: what is issued then belongs to its graph, which cannot hold a replay."""
        return torch.cuda.is_current_stream_capturing()

    def record(self, issue: Callable[[], None]) -> Callable[[], None]:
        """Run `issue` once, executing nothing; what replays it.

        Raises:
            RuntimeError: it holds an operation that cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types here
        with no_collection(), torch.cuda.device(self.device), torch.cuda.stream(stream):
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                issue()
            finally:
                graph.capture_end()
        return graph.replay


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage while a CUDA graph is captured: freeing another graph, or pinned memory, would spoil it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def misfits(resource: Buffer, attribute: str, value: Any, axes: Mapping[str, int], domain: Domain) -> list[str]:
    """What is wrong with the buffer that `attribute` carries: nothing there, dtype, or shape."""
    wanted = shape_in(resource, axes)
    axis_names = ", ".join(str(axis) for axis in resource.shape)
    if not isinstance(value, torch.Tensor):
        return [f"{attribute} [{domain}] is missing: {resource.dtype} [{axis_names}] = {list(wanted)} is due"]
    found = str(value.dtype).removeprefix("torch.")
    faults = []
    if found != resource.dtype:
        faults.append(f"{attribute} [{domain}] has the dtype {found}, not {resource.dtype}")
    if tuple(value.shape) != wanted:
        faults.append(f"{attribute} [{domain}] has the shape {list(value.shape)}, not [{axis_names}] = {list(wanted)}")
    if value.is_inference():
        faults.append(
            f"{attribute} [{domain}] was made in inference mode, which has no version counters; make it outside"
        )
    return faults


def _readers(ledger: Ledger, mask: int) -> int:
    """Everything derived from any of these."""
    readers, first = 0, len(ledger.inputs)
    for place in bits(mask):
        readers |= ledger.readers[first + place]
    return readers


# How each kind is written. Each returns what it wrote; None says that it declined.


def _write_pointer(binding: Binding, place: int, resource: Pointer) -> Any:
    value = resource.of(binding.view)
    if value is not None:
        binding.keep(place, value)
    return value


def _write_alias(binding: Binding, place: int, resource: Alias) -> Any:
    source = binding.values[binding.backend.resources.index(binding.backend.by_name[resource.of])]
    value = resource.derive(source, binding.view)
    if value is not None:
        binding.values[place] = value
    return value


def _write_buffer(binding: Binding, place: int, resource: Buffer) -> Any:
    assert resource.refresh is not None, "a buffer without recipe or fill has a refresh: checked at declaration"
    return resource.refresh(binding.view, binding.values[place])


def _fill_staged(binding: Binding, place: int, resource: Staged) -> StagingBuffer | None:
    """The host half. It is copied with whatever else the same stage fills."""
    buffer = binding.rings[place].take(binding.turn)
    host = buffer.fill()
    try:
        note, buffer.note = buffer.note, None
        filled = None
        if resource.patch is not None:
            filled = buffer.note = resource.patch(binding.view, host, note)
        if filled is None:
            filled = resource.fill(binding.view, host)
    except BaseException:
        buffer.abandon()
        raise
    if filled is None:
        buffer.abandon()
        return None
    return buffer


def _drop_value(binding: Binding, place: int, resource: Resource) -> Any:
    binding.values[place] = None
    return resource


WRITERS: Mapping[type[Resource], Callable[[Binding, int, Any], Any]] = {
    Pointer: _write_pointer,
    Alias: _write_alias,
    Table: _write_buffer,
    Staged: _fill_staged,
    Shared: _write_buffer,
    Plan: _drop_value,
    Cache: _drop_value,
}
