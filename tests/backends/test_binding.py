"""One domain of a bound backend: the stages of a refresh, what declines, and buffers bound anew."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from specfsm.backends.backend import Backend
from specfsm.backends.binding import no_collection
from specfsm.backends.resource import Alias, DomainView, Staged, Table
from specfsm.domain import Domain, Unit
from specfsm.kernels.recipes import GatherTable
from specfsm.states.resource import bits
from specfsm.states.transfer import Transfer
from tests.toys import BACKENDS, BATCH, RESOURCES, SLOTS, Injected, World, buffers, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT


@pytest.mark.parametrize("backend", BACKENDS)
def test_stages_put_producers_before_consumers(backend: str) -> None:
    """Before the launch, in it, after it: a partition in which nothing reads from a later stage."""
    fsm = world(backend).fsm
    binding = fsm.bindings[DRAFT]
    stages = (binding.before, binding.launched, binding.after)
    everything = (1 << len(fsm.backend.resources)) - 1
    assert sum(stages) == everything
    assert stages[0] | stages[1] | stages[2] == everything
    stage_of = {fsm.ledger.names[place]: stage for stage, mask in enumerate(stages) for place in bits(mask)}
    for resource in fsm.backend.resources:
        for read in resource.reads:
            assert stage_of.get(read, 0) <= stage_of[resource.name], f"{resource.name} reads {read}"
    assert set(binding.tasks) == set(bits(binding.launched))


def test_what_reads_the_launch_is_refreshed_after_it() -> None:
    at = world()
    at.fuse.arm(None)
    at.prepare()
    at.fuse.disarm()
    order = at.fuse.passed
    assert order.index("fill base") < order.index("launch") < order.index("refresh first_slots")


def test_launch_is_told_what_is_stale() -> None:
    """Two tables, one of them fresh: the mask has one bit."""
    second = Table(
        "second",
        reads=("base", "rows", "adapter"),
        dtype="int32",
        shape=("S", "B"),
        space=SLOTS,
        recipe=GatherTable(base="base", rows="rows", unit=Unit.SLOT),
    )
    at = world(Backend("toy", (*RESOURCES, second), {"adapter": "the adapter"}))
    at.prepare()
    at.fsm.moved("adapter", TARGET)
    at.prepare()
    assert at.fsm.bindings[TARGET].launch.masks == [0b11, 0b10]  # type: ignore[union-attr]  # toys' launch


def test_backend_without_recipes_launches_nothing() -> None:
    plain = tuple(each for each in RESOURCES if each.name in ("manager_ref", "counters"))
    at = world(Backend("plain", plain))
    at.round_trip()
    assert at.fsm.bindings[TARGET].launch is None


def test_refresh_reports_what_it_wrote_and_what_declined() -> None:
    """A reader of what declined is left alone, and so is a table of the launch."""
    resources = tuple(
        attrs.evolve(each, fill=lambda view, host: None) if each.name == "base" else each for each in RESOURCES
    )
    at = world(Backend("toy", resources, {"adapter": "the adapter"}))
    binding, ledger = at.fsm.bindings[TARGET], at.fsm.ledger
    binding.see(BATCH)
    written, declined = binding.refresh(ledger.mask(["base", "rows", "block_table", "first_slots"]), ledger)
    assert (written, declined) == (ledger.mask(["rows"]), ledger.mask(["base"]))


def test_domains_have_buffers_of_their_own() -> None:
    """What the orchestrator keeps itself is made twice too."""
    fsm = world().fsm
    one, other = fsm.bindings
    for place, name in enumerate(fsm.ledger.names):
        if isinstance(one.values[place], torch.Tensor):
            same = one.values[place] is other.values[place]
            assert same == (fsm.backend.resource(name).kind == "Shared"), name


def test_view_follows_the_batch() -> None:
    binding = world().fsm.bindings[TARGET]
    assert binding.batch is None
    binding.see(BATCH)
    assert binding.batch is BATCH is binding.view.batch
    assert binding.manager is binding.view.manager


def test_view_shows_what_resources_are_in_its_domain() -> None:
    """A device-side refresh reads its producers there; a view of nothing says so."""
    at = world()
    for binding in at.fsm.bindings:
        assert binding.view.value("rows") is at.fsm.value("rows", binding.domain)
        binding.see(BATCH)
        assert binding.view.value("rows") is at.fsm.value("rows", binding.domain)
    view = binding.view
    with pytest.raises(KeyError, match="rows: this view is of no bound backend"):
        DomainView(view.domain, view.manager, view.geometry, None, view.axes).value("rows")


# Stages: the host's work, then the device's.


def host_copy(view: DomainView, buffer: torch.Tensor) -> torch.Tensor:
    """Reads on the host what was staged: wrong unless the copy was enqueued before."""
    return buffer.copy_(view.value("rows"))


READS_STAGED = Table("echo", reads=("rows",), dtype="int32", shape=("S",), refresh=host_copy)


def test_host_never_reads_what_was_not_sent_yet() -> None:
    """A function of the host that reads a staged buffer begins a stage; everything before it shares one."""
    resources = (*(each for each in RESOURCES if each.name in ("base", "rows", "block_table")), READS_STAGED)
    at = world(Backend("toy", resources, {"adapter": "the adapter"}))
    at.prepare()
    assert at.metadata.echo.tolist() == at.metadata.rows.tolist() != [-1] * 5
    names = at.fsm.ledger.names
    binding = at.fsm.bindings[TARGET]
    [plan] = binding._plans.values()
    assert [[names[step.place] for step in stage.hosts] for stage in plan] == [["base", "rows"], ["echo"]]


def test_what_nobody_on_the_host_reads_is_one_stage() -> None:
    """DSA, all of it stale: fills first, then every copy, the maps of its tokens, and one launch."""
    at = world("dsa")
    at.prepare()
    names = at.fsm.ledger.names
    [[stage]] = at.fsm.bindings[TARGET]._plans.values()
    assert [names[step.place] for step in stage.devices] == [
        "req_idx_per_token",
        "tokens_to_end",
        "kv_cache_block_offsets",
    ]
    assert stage.devices[-1].resource is None


def test_copies_before_a_failing_launch_are_still_guarded() -> None:
    """They were enqueued: their sources are in flight, not free."""
    at = world()
    at.fuse.arm("launch")
    with pytest.raises(Injected):
        at.prepare()
    at.fuse.disarm()
    binding = at.fsm.bindings[TARGET]
    carried = [staged.resource for flight in binding.flights.all for staged in flight.buffers]
    assert carried == ["base", "rows"]
    at.prepare()


def test_epoch_moves_when_a_pointer_is_replaced_and_never_returns() -> None:
    """Not by a refresh that finds the same value, nor by tables that are written; by an undo too, to a new one."""
    at = world("trtllm")
    binding = at.fsm.bindings[TARGET]
    epochs = [binding.epoch]
    at.prepare()
    epochs.append(binding.epoch)
    at.target.swap()
    at.prepare(attrs.evolve(BATCH, kv_lens=(9, 8, 8)))
    assert binding.epoch == epochs[-1]
    values = [*binding.values]
    at.target.pool_pointers, at.target.generation = (0x9000,), 7
    at.fuse.arm("launch")
    with pytest.raises(Injected):
        at.prepare()
    at.fuse.disarm()
    assert all(now is was for now, was in zip(binding.values, values, strict=True))
    epochs.append(binding.epoch)
    at.prepare()
    epochs.append(binding.epoch)
    assert epochs == sorted({*epochs})


def test_no_two_bindings_share_an_epoch() -> None:
    """Nor does what an undo puts back have the one of what it undid."""
    target, draft = world("trtllm").fsm.bindings
    other = world("trtllm").fsm.bindings[TARGET]
    epochs = [target.epoch, draft.epoch, other.epoch]
    view, values = target.view, [*target.values]
    target.keep(target.places["tokens_per_block"], 8)
    epochs.append(target.epoch)
    target.put_back(view, values)
    assert target.values == values
    assert len({*epochs, target.epoch}) == 5


def test_bound_buffer_is_copied_to_from_then_on() -> None:
    """The plan of a refresh names no buffer that is gone."""
    at = world()
    at.prepare()
    other = torch.full_like(at.metadata.rows, 7)
    at.fsm.bind("rows", other, TARGET)
    at.prepare()
    assert at.metadata.rows is other
    assert other.tolist() != [7] * 5


# A stage that comes again is recorded and replayed.


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


def taped(backend: str | Backend = "toy", **options: Any) -> tuple[World, Tape]:
    at, tape = world(backend, **options), Tape()
    at.fsm.bindings[TARGET].recorder = tape  # type: ignore[assignment]  # stands in for it
    return at, tape


def step(at: World, length: int) -> None:
    """Everything that a step moves."""
    at.target.swap()
    at.prepare(attrs.evolve(BATCH, kv_lens=(length,) * len(BATCH)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_replayed_refresh_writes_what_the_plain_one_does(backend: str) -> None:
    """A recording for each side of the rings, made the third time it comes; level "tensors" sees each write."""
    (at, tape), plain = taped(backend, check="tensors"), world(backend, check="tensors")
    for length in range(4, 14):
        for each in (at, plain):
            step(each, min(length, 12))
        for name, contents in buffers(plain.fsm, TARGET).items():
            assert torch.equal(buffers(at.fsm, TARGET)[name], contents), name
    assert tape.replayed > 0
    assert tape.recorded <= 2


def test_nothing_is_replayed_into_the_engines_own_graph() -> None:
    at, tape = taped()
    tape.busy = True
    for length in range(4, 14):
        step(at, min(length, 12))
    assert (tape.recorded, tape.replayed) == (0, 0)


def test_what_cannot_be_captured_is_issued_as_before() -> None:
    at, tape = taped()
    tape.refuses = True
    for length in range(4, 14):
        step(at, min(length, 12))
    assert torch.equal(at.metadata.rows, at.metadata.host_rows)


def test_recording_of_a_buffer_that_is_gone_is_dropped() -> None:
    at, tape = taped()
    for length in range(4, 12):
        step(at, length)
    assert tape.replayed
    other = torch.full_like(at.metadata.rows, 7)
    at.fsm.bind("rows", other, TARGET)
    replayed = tape.replayed
    step(at, 12)
    assert tape.replayed == replayed
    assert torch.equal(other, at.metadata.host_rows)


def test_refresh_that_reads_a_view_is_not_recorded() -> None:
    """The view's length follows the batch: a recording would keep the old one."""
    view = Alias("live_rows", of="rows", reads=("batch",), derive=lambda rows, view: rows[: len(view.batch or ())])
    reader = Table(
        "reader",
        reads=("rows", "live_rows"),
        dtype="int32",
        shape=("S",),
        refresh=lambda view, buffer: buffer.fill_(len(view.value("live_rows"))),
        on_device=True,
    )
    kept = tuple(each for each in RESOURCES if each.name in ("base", "rows"))
    at, tape = taped(Backend("toy", (*kept, view, reader), {"adapter": "the adapter"}))
    for length in range(4, 12):
        step(at, length)
    assert tape.recorded == 0
    assert at.metadata.reader.tolist() == [3] * 5


def test_failing_replay_keeps_nothing_in_flight_and_is_tried_again() -> None:
    at, _ = taped()
    for length in range(4, 12):
        step(at, length)
    at.fuse.arm("launch")
    with pytest.raises(Injected):
        step(at, 12)
    at.fuse.disarm()
    binding = at.fsm.bindings[TARGET]
    for ring in binding.rings.values():
        assert ring.buffers[binding.turn].machine.state is Transfer.FREE
    step(at, 12)
    assert torch.equal(at.metadata.rows, at.metadata.host_rows)


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_during_a_capture(enabled: bool) -> None:
    """Whoever had switched the collector off finds it off, after an exception too."""

    def capture() -> None:
        with no_collection():
            assert not gc.isenabled()
            raise Injected

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(Injected):
            capture()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("breaks", ["patch", "fill"])
def test_what_was_left_half_written_is_not_patched(breaks: str) -> None:
    """A patch noted what the buffer holds; the next one fails in the middle, or the fill that it leaves the work to."""
    notes: list[Any] = []
    broken = False

    def patch(view: DomainView, host: torch.Tensor, note: Any) -> Any:
        notes.append(note)
        if not broken:
            return "noted"
        return fill(view, host) if breaks == "patch" else None

    def fill(view: DomainView, host: torch.Tensor) -> torch.Tensor:
        host.fill_(7)
        raise Injected("half way")

    reads = ("batch", "lengths")
    staged = Staged("staged", reads=reads, dtype="int32", shape=("S",), sentinel=0, fill=fill, patch=patch)
    at = world(Backend("patched", (staged,)))
    lengths = iter(range(8, 99))

    def refresh_either_side() -> None:
        for _ in range(2):
            at.prepare(attrs.evolve(BATCH, kv_lens=(next(lengths),) * 3))

    refresh_either_side()
    refresh_either_side()
    assert notes == [None, None, "noted", "noted"]
    broken = True
    for _ in range(2):
        with pytest.raises(Injected):
            at.prepare(attrs.evolve(BATCH, kv_lens=(next(lengths),) * 3))
    broken = False
    refresh_either_side()
    assert notes[-2:] == [None, None]
