"""How what is stale is refreshed, in one domain or in both at once: the host's work, then all of the device's.

A refresh is a plan of stages. In a stage the host derives what is no buffer and fills one staging buffer with what is
one; then the device copies, and launches the recipes. A stage that comes again is recorded once, with its copies, and
costs the host one submission from then on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from attrs import define, field, frozen

from specfsm.backends.binding import Binding
from specfsm.backends.resource import Alias, Buffer, Cache, Plan, Pointer, Resource, Shared, Staged, Table
from specfsm.backends.staging import Event, StagingBuffer, StagingRing, events
from specfsm.domain import Domain
from specfsm.states.resource import Ledger, bits

__all__ = ["Masks", "Refresher", "no_collection", "only"]

Masks = tuple[int, int]
"""Of resources, the target's and the draft's."""


def only(binding: Binding, mask: int) -> Masks:
    """This of one domain, and nothing of the other."""
    return (0, mask) if binding.side else (mask, 0)


RECORD_AFTER = 2
"""Recording takes a millisecond or two: only what ran so often already, on either side of the ring, is recorded."""
MOST_RECORDINGS = 64
"""What is stale in either cache comes in many combinations: an engine's few steps recur, and memory is not for all."""


@frozen
class _Step:
    """One resource's refresh, or the launch of several.

    Args:
        binding: in which domain.
        mask: what it writes.
        place: of the resource, or of the launch's first.
        resource: None for the launch.
        write: how the resource is written: (step, staging buffer) → what was written; None says that it declined.
        on_host: whether the host runs it and may read what it is derived from.
        on_device: whether the device writes it, when it gets there.
        slot: its number in the staging ring; None where it is not staged.
        half: whether the metadata carries its host half.
    """

    binding: Binding
    mask: int
    place: int
    resource: Any
    write: Any
    on_host: bool
    on_device: bool
    slot: int | None = None
    half: bool = False


@define(eq=False)
class _Stage:
    """Work of the host, then work of the device, none of which the host's part waits for.

    Attributes:
        hosts: derived, dropped and referred to by the host, and staged, in order.
        devices: written by the device, in order, after what was staged is copied.
        masks: all that it writes.
        staged: how many of `hosts` are staged.
        recordable: whether the device's part may be recorded.
        recordings: the side of the staging ring that is copied → replay of the device's part.
        seen: how often the stage ran without one.
        outputs: the tensors that a replay writes.
    """

    hosts: list[_Step] = field(factory=list)
    devices: list[_Step] = field(factory=list)
    masks: list[int] = field(factory=lambda: [0 for _ in Domain])
    staged: int = 0
    recordable: bool = False
    recordings: dict[int, Callable[[], None]] = field(factory=dict)
    seen: int = 0
    outputs: list[torch.Tensor] = field(factory=list)

    def add(self, step: _Step) -> None:
        (self.hosts if step.on_host else self.devices).append(step)
        self.masks[step.binding.side] |= step.mask
        self.staged += step.slot is not None

    def join(self, other: _Stage) -> None:
        for step in (*other.hosts, *other.devices):
            self.add(step)


class Refresher:
    """Refreshes the resources of a backend.

    Args:
        bindings: the target's and, where the draft has a cache of its own, the draft's.
        device: where the buffers are.
        event: makes staging events; for tests.

    Attributes:
        ring: the host halves of everything staged, in both domains.
        slots: (side, place) of what is staged → its number in the ring.
        recorder: records the device's part of a stage; None where nothing is recorded.
        recordings: how many there are.
    """

    def __init__(
        self, bindings: Sequence[Binding], device: torch.device, event: Callable[[], Event] | None = None
    ) -> None:
        self.bindings = tuple(bindings)
        self.backend = bindings[0].backend
        staged = [(each, place) for each in self.bindings for place in each.staged]
        self.slots = {(binding.side, place): slot for slot, (binding, place) in enumerate(staged)}
        buffers = [binding.values[place] for binding, place in staged]
        self.ring = StagingRing(self.backend.name, buffers, device, event or events(device))
        self._plans: dict[Masks, tuple[_Stage, ...]] = {}
        self.recordings = 0
        compiled = all(each.launch is None or each.launch.engine == "triton" for each in self.bindings)
        self.recorder = Recorder(device) if device.type == "cuda" and compiled else None

    def rebind(self, binding: Binding, place: int, tensor: torch.Tensor) -> None:
        """Take `tensor` as the domain's buffer from now on: plans and recordings name the one before."""
        binding.rebind(place, tensor)
        self._plans.clear()
        self.recordings = 0

    def forget(self) -> None:
        """Something moved that nobody can see: no staging buffer is patched before it was filled whole, and buffers may
        be elsewhere."""
        self.ring.forget()
        for binding in self.bindings:
            binding.doubt()

    def refresh(self, masks: Masks, ledger: Ledger) -> tuple[list[int], list[int]]:
        """Refresh these resources, producers first, the recipes of a domain in one launch.

        Returns:
            (what was written, what declined), masks of each domain. A reader of something that declined is not
            refreshed at all.
        """
        written, declined = [0, 0], [0, 0]
        for stage in self._plans.get(masks) or self._plan(masks):
            self._run(stage, ledger, written, declined)
        return written, declined

    # What is done, in which order.

    def _plan(self, masks: Masks) -> tuple[_Stage, ...]:
        """The stages of each domain, side by side: neither reads anything of the other."""
        apart = [self._stages(binding, masks[binding.side]) for binding in self.bindings if masks[binding.side]]
        stages = []
        for pair in zip_longest(*apart):
            stage = _Stage()
            for each in pair:
                if each is not None:
                    stage.join(each)
            stage.recordable = _recordable(stage)
            stages.append(stage)
        plan = self._plans[masks] = tuple(stages)
        return plan

    def _stages(self, binding: Binding, mask: int) -> list[_Stage]:
        """A new stage begins where the host may read what the device is to write."""
        stages, stage, pending = [], _Stage(), 0
        for step in self._steps(binding, mask):
            if step.on_host and binding.sources[step.place] & pending:
                stages.append(stage)
                stage, pending = _Stage(), 0
            stage.add(step)
            if step.on_device:
                pending |= step.mask
        return [*stages, stage]

    def _steps(self, binding: Binding, mask: int) -> Iterator[_Step]:
        for place in bits(mask & binding.before):
            yield self._step(binding, place)
        tasks = mask & binding.launched
        if tasks:
            yield _Step(binding, tasks, next(bits(tasks)), None, None, on_host=False, on_device=True)
        for place in bits(mask & binding.after):
            yield self._step(binding, place)

    def _step(self, binding: Binding, place: int) -> _Step:
        resource = self.backend.resources[place]
        slot = self.slots.get((binding.side, place))
        on_device = isinstance(resource, Buffer) and resource.on_device
        half = isinstance(resource, Staged) and resource.host_attribute is not None
        staged = slot is not None
        return _Step(
            binding,
            1 << place,
            place,
            resource,
            WRITERS[type(resource)],
            on_host=staged or not on_device,
            on_device=staged or on_device,
            slot=slot,
            half=half,
        )

    # Running a stage.

    def _run(self, stage: _Stage, ledger: Ledger, written: list[int], declined: list[int]) -> None:
        """The host's work, then the device's, noted in `written` and `declined`. What was not sent is free again."""
        buffer = self.ring.take() if stage.staged else None
        left, sent = [0, 0], False
        try:
            filled = self._fill(stage, buffer, ledger, declined, left)
            if not self._replay(stage, buffer, filled, declined):
                for step, host in filled:
                    step.binding.values[step.place].copy_(host, non_blocking=True)
                    sent = True
                for step in stage.devices:
                    self._issue(step, ledger, declined, left)
        except BaseException:
            if buffer is not None:
                (buffer.submit if sent else buffer.abandon)()
            raise
        if buffer is not None:
            (buffer.submit if filled else buffer.abandon)()
        for step, host in filled:
            if step.half:
                step.binding.hosts[step.place] = host
        for side, mask in enumerate(stage.masks):
            written[side] |= mask & ~(left[side] | declined[side])

    def _fill(
        self, stage: _Stage, buffer: StagingBuffer | None, ledger: Ledger, declined: list[int], left: list[int]
    ) -> list[tuple[_Step, torch.Tensor]]:
        """The host's part: what was staged, with its host half."""
        filled = []
        for step in stage.hosts:
            side = step.binding.side
            if declined[side] and step.mask & _readers(ledger, declined[side]):
                left[side] |= step.mask
                continue
            value = step.write(step, buffer)
            if value is None:
                declined[side] |= step.mask
            elif step.slot is not None:
                filled.append((step, value))
        return filled

    def _issue(self, step: _Step, ledger: Ledger, declined: list[int], left: list[int]) -> None:
        """One step on the device, without what reads something that declined."""
        side = step.binding.side
        blocked = step.mask & _readers(ledger, declined[side]) if declined[side] else 0
        left[side] |= blocked
        if step.mask & ~blocked and self._write(step, blocked) is None:
            declined[side] |= step.mask

    def _write(self, step: _Step, blocked: int) -> Any:
        """None says that it declined."""
        if step.resource is not None:
            return step.write(step, None)
        binding = step.binding
        assert binding.launch is not None, "there are tasks only where there are recipes"
        binding.launch(sum(binding.tasks[place] for place in bits(step.mask & ~blocked)))
        return step

    # A stage that comes again and again is recorded once, with its copies, and replayed.

    def _replay(
        self,
        stage: _Stage,
        buffer: StagingBuffer | None,
        filled: list[tuple[_Step, torch.Tensor]],
        declined: list[int],
    ) -> bool:
        """Replay the recording of this stage and this staging buffer, if there is one by now."""
        if self.recorder is None or not stage.recordable or declined[0] or declined[1] or self.recorder.capturing():
            return False
        turn = 0 if buffer is None else self.ring.turn
        replay = stage.recordings.get(turn)
        if replay is None:
            stage.seen += 1
            if stage.seen <= RECORD_AFTER * StagingRing.DEPTH or self.recordings >= MOST_RECORDINGS:
                return False
            replay = self._recorded(stage, filled)
            if replay is None:
                return False
            stage.recordings[turn] = replay
            self.recordings += 1
        replay()
        torch.autograd.graph.increment_version(stage.outputs)
        return True

    def _recorded(self, stage: _Stage, filled: list[tuple[_Step, torch.Tensor]]) -> Callable[[], None] | None:
        """A recording of the device's part; None, for good, where something in it cannot be recorded."""
        assert self.recorder is not None, "only then is anything recorded"
        copies = [(step.binding.values[step.place], host) for step, host in filled]
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
        stage.outputs = [destination for destination, _ in copies] + [
            step.binding.values[place] for step in stage.devices for place in bits(step.mask)
        ]
        return replay


def _recordable(stage: _Stage) -> bool:
    """Whether a recording is worth it, and stays true: what the device does reads buffers, as a launch does, which stay
    where they are."""
    worth = stage.staged + len(stage.devices) > 1
    return worth and all(step.resource is None or _reads_buffers(step) for step in stage.devices)


def _reads_buffers(step: _Step) -> bool:
    backend = step.binding.backend
    return all(read in backend.inputs or isinstance(backend.by_name[read], Buffer) for read in step.resource.reads)


def _readers(ledger: Ledger, mask: int) -> int:
    """Everything derived from any of these."""
    readers, first = 0, len(ledger.inputs)
    for place in bits(mask):
        readers |= ledger.readers[first + place]
    return readers


# How each kind is written. Each returns what it wrote; None says that it declined.


def _refer(step: _Step, _: StagingBuffer | None) -> Any:
    value = step.resource.of(step.binding.view)
    if value is not None:
        step.binding.keep(step.place, value)
    return value


def _derive(step: _Step, _: StagingBuffer | None) -> Any:
    binding, resource = step.binding, step.resource
    value = resource.derive(binding.values[binding.places[resource.of]], binding.view)
    if value is not None:
        binding.values[step.place] = value
    return value


def _call(step: _Step, _: StagingBuffer | None) -> Any:
    """A buffer without recipe or fill has a refresh: that was checked at declaration."""
    return step.resource.refresh(step.binding.view, step.binding.values[step.place])


def _stage(step: _Step, buffer: StagingBuffer | None) -> torch.Tensor | None:
    """The host half. It is copied with whatever else the same stage fills."""
    assert buffer is not None, "a stage in which anything is staged has a buffer"
    assert step.slot is not None, "whatever is staged has its number in the ring"
    resource, view, slot = step.resource, step.binding.view, step.slot
    host, note = buffer.tensors[slot], buffer.notes[slot]
    buffer.notes[slot] = done = None
    if resource.patch is not None:
        done = buffer.notes[slot] = resource.patch(view, host, note)
    if done is None:
        done = resource.fill(view, host)
    return None if done is None else host


def _drop(step: _Step, _: StagingBuffer | None) -> Any:
    step.binding.values[step.place] = None
    return step


WRITERS: Mapping[type[Resource], Callable[[_Step, StagingBuffer | None], Any]] = {
    Pointer: _refer,
    Alias: _derive,
    Table: _call,
    Staged: _stage,
    Shared: _call,
    Plan: _drop,
    Cache: _drop,
}


class Recorder:
    """Records device work as a CUDA graph: its few copies and kernels cost the host one launch instead of one each.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()  # these graphs run one after the other: scratch may be shared

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
