"""How what is stale is refreshed: stages, what declines, recordings, buffers bound anew, and both domains at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from specfsm.backends import refresher
from specfsm.backends.backend import Backend
from specfsm.backends.refresher import no_collection
from specfsm.backends.resource import Alias, DomainView, Staged, Table
from specfsm.domain import Domain, Unit
from specfsm.kernels.recipes import GatherTable
from specfsm.states.transfer import Transfer
from tests.toys import BACKENDS, BATCH, RESOURCES, SLOTS, Injected, Tape, World, buffers, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT


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


def test_refresh_reports_what_it_wrote_and_what_declined() -> None:
    """A reader of what declined is left alone, and so is a table of the launch."""
    resources = tuple(
        attrs.evolve(each, fill=lambda view, host: None) if each.name == "base" else each for each in RESOURCES
    )
    at = world(Backend("toy", resources, {"adapter": "the adapter"}))
    binding, ledger = at.fsm.bindings[TARGET], at.fsm.ledger
    binding.see(BATCH)
    mask = ledger.mask(["base", "rows", "block_table", "first_slots"])
    written, declined = at.fsm.refresher.refresh((mask, 0), ledger)
    assert (written, declined) == ([ledger.mask(["rows"]), 0], [ledger.mask(["base"]), 0])


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
    [plan] = at.fsm.refresher._plans.values()
    assert [[names[step.place] for step in stage.hosts] for stage in plan] == [["base", "rows"], ["echo"]]


def test_what_nobody_on_the_host_reads_is_one_stage() -> None:
    """DSA, all of it stale: fills first, then every copy, the maps of its tokens, and one launch."""
    at = world("dsa")
    at.prepare()
    names = at.fsm.ledger.names
    [[stage]] = at.fsm.refresher._plans.values()
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
    ring = at.fsm.refresher.ring
    assert ring.buffers[ring.turn].machine.state is Transfer.IN_FLIGHT
    at.prepare()


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


def taped(backend: str | Backend = "toy", **options: Any) -> tuple[World, Tape]:
    at, tape = world(backend, **options), Tape()
    at.fsm.refresher.recorder = tape  # type: ignore[assignment]  # stands in for it
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


def test_recordings_are_not_without_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes again once there are so many is issued as it was before."""
    monkeypatch.setattr(refresher, "MOST_RECORDINGS", 1)
    at, tape = taped()
    for length in range(4, 14):
        step(at, min(length, 12))
        assert torch.equal(at.metadata.rows, at.metadata.host_rows)
    assert (tape.recorded, tape.replayed) == (1, 2)


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
    for length in range(4, 8):  # the same that came before
        step(at, length)
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
    ring = at.fsm.refresher.ring
    assert ring.buffers[ring.turn].machine.state is Transfer.FREE
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


@pytest.mark.parametrize("report", [lambda fsm: fsm.dirty("rows"), lambda fsm: fsm.moved("blocks", DRAFT)])
def test_what_nobody_saw_is_staged_whole(report: Callable[[Any], None]) -> None:
    """An edit or a move that the machine is only told of: no side of the ring is patched from what was noted before."""
    at = world()
    at.prepare()
    ring = at.fsm.refresher.ring
    for each in ring.buffers:
        each.notes[0] = "noted"
    report(at.fsm)
    assert all(note is None for each in ring.buffers for note in each.notes)
