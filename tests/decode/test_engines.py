"""Capture engines: operations are recorded once, on the addresses that they had, and repeated on those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from specfsm.decode.engines import CaptureError, CudaEngine, GraphEngine, RecordedEngine, engine_for

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
ENGINES = {"cpu": RecordedEngine, "cuda": CudaEngine}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU)])
def device(request: pytest.FixtureRequest) -> str:
    """Each engine's own."""
    name: str = request.param
    return name


class Carrier:
    """What an engine's metadata is to a captured phase: attributes that are looked up while it is captured."""

    def __init__(self, device: str) -> None:
        self.table = torch.arange(4, device=device)
        self.out = torch.zeros(4, dtype=torch.long, device=device)


def captured(device: str, phase: Callable[[], Any]) -> GraphEngine:
    engine = engine_for(device)
    torch.sort(torch.zeros(2, device=device))  # the device is awake
    with engine.capture():
        phase()
    return engine


def test_engine_follows_the_device(device: str) -> None:
    assert isinstance(engine_for(device), ENGINES[device])
    assert isinstance(engine_for(torch.device(device)), ENGINES[device])


def test_recording_executes_nothing(device: str) -> None:
    """Whatever it wrote, in place, by index or through a view, is as it was."""
    at = Carrier(device)
    seven = torch.full((), 7, dtype=at.table.dtype, device=device)  # a CUDA graph takes no number from the host

    def phase() -> None:
        at.out.copy_(at.table)
        at.out[1:3].add_(10)
        at.table[torch.tensor_split(at.out, 2)[0].clamp(max=3)] = seven

    engine = captured(device, phase)
    assert (at.table.tolist(), at.out.tolist()) == ([0, 1, 2, 3], [0, 0, 0, 0])
    engine.replay()
    assert (at.table.tolist(), at.out.tolist()) == ([7, 1, 2, 7], [0, 11, 12, 3])


def test_replay_repeats_operations_not_the_program(device: str) -> None:
    """What Python decided, and what it computed on the host, is decided once."""
    at, ran = Carrier(device), []

    def phase() -> None:
        ran.append(len(ran))
        at.out.add_(len(ran) if at.out.shape[0] == 4 else 100)

    engine = captured(device, phase)
    for _ in range(3):
        engine.replay()
    assert ran == [0]
    assert at.out.tolist() == [3] * 4


def test_replay_follows_writes_in_place(device: str) -> None:
    at = Carrier(device)
    engine = captured(device, lambda: at.out.copy_(at.table * 2))
    at.table.fill_(5)
    engine.replay()
    assert at.out.tolist() == [10] * 4
    at.table[1] = 6
    engine.replay()
    assert at.out.tolist() == [10, 12, 10, 10]


def test_replay_after_a_rebind_reads_and_writes_the_old_storage(device: str) -> None:
    """The address was baked in: an attribute that carries another buffer by now is not looked at."""
    at = Carrier(device)
    engine = captured(device, lambda: at.out.copy_(at.table))
    old, at.table = at.table, torch.full_like(at.table, 9)
    read, at.out = at.out, torch.full_like(at.out, -1)
    old.add_(1)
    engine.replay()
    assert read.tolist() == [1, 2, 3, 4]
    assert at.out.tolist() == [-1] * 4


def test_recording_keeps_the_old_storage() -> None:
    """A CUDA graph does not, which is one more reason why a rebinding invalidates the graph."""
    at = Carrier("cpu")
    engine = captured("cpu", lambda: at.out.copy_(at.table))
    at.table = torch.zeros_like(at.table)
    engine.replay()
    assert at.out.tolist() == [0, 1, 2, 3]


def test_view_taken_before_the_capture_shows_what_a_replay_writes(device: str) -> None:
    at = Carrier(device)
    half = at.out[2:]
    engine = captured(device, lambda: at.out.view(2, 2).t().copy_(at.table.view(2, 2)))
    engine.replay()
    assert at.out.tolist() == [0, 2, 1, 3]
    assert half.tolist() == [1, 3]


def test_temporaries_are_the_graphs_own(device: str) -> None:
    """Each replay writes them where the recording made them: the last one's values stand there, and chains follow."""
    at, made = Carrier(device), []

    def phase() -> None:
        doubled = at.table * 2
        made.append(doubled)
        made.append(doubled[1:])  # a view of it
        at.out.copy_(torch.cat((made[1], doubled[:1])) + doubled)

    engine = captured(device, phase)
    addresses = [each.data_ptr() for each in made]
    for start in (0, 3):
        at.table.copy_(torch.arange(start, start + 4))
        engine.replay()
        doubled = [2 * (start + place) for place in range(4)]
        assert [each.tolist() for each in made] == [doubled, doubled[1:]]
        assert at.out.tolist() == [one + other for one, other in zip(doubled, (*doubled[1:], doubled[0]), strict=True)]
    assert [each.data_ptr() for each in made] == addresses


def test_operations_with_several_outputs_or_a_given_one(device: str) -> None:
    at = Carrier(device)

    def phase() -> None:
        values, places = at.table.topk(2)
        torch.add(values, places, out=at.out[:2])

    engine = captured(device, phase)
    at.table.copy_(torch.tensor([5, 0, 8, 1]))
    engine.replay()
    assert at.out.tolist() == [10, 5, 0, 0]


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda table: table[0].item(),
    "int": lambda table: int(table[0]),
    "an index": lambda table: range(table[1]),
    "a branch": lambda table: 1 if table.sum() > 3 else 0,
    "a comparison": lambda table: torch.equal(table, table),
    "nonzero": lambda table: table.nonzero(),
    "where": lambda table: torch.where(table > 1),
    "a mask read": lambda table: table[table > 1],
    "a mask written": lambda table: table.__setitem__(table > 1, table[:2]),
    "masked_select": lambda table: table.masked_select(table > 1),
    "unique": lambda table: table.unique(),
    "a size from contents": lambda table: torch.repeat_interleave(table, table),
    "tolist": lambda table: table.tolist(),
    "numpy": lambda table: table.cpu().numpy(),
    "a host list": lambda table: table.add_(torch.tensor([1, 2, 3, 4], device=table.device)),
}


@pytest.mark.parametrize("how", WAITS)
def test_host_that_waits_for_the_device_is_refused(how: str) -> None:
    """On a GPU it would fail in the driver, or bake one step's value in. Nothing of the capture remains."""
    at, engine = Carrier("cpu"), RecordedEngine()

    def record() -> None:
        with engine.capture():
            at.out.add_(1)
            WAITS[how](at.table)

    with pytest.raises(CaptureError, match="wait for each other"):
        record()
    assert (at.table.tolist(), at.out.tolist()) == ([0, 1, 2, 3], [0] * 4)
    with pytest.raises(CaptureError, match="nothing was captured"):
        engine.replay()
    with engine.capture():
        at.out.add_(1)
    engine.replay()
    assert at.out.tolist() == [1] * 4


@pytest.mark.parametrize("draw", [torch.rand_like, torch.bernoulli, lambda table: functional.dropout(table, 0.5)])
def test_random_numbers_are_refused(draw: Callable[[torch.Tensor], Any]) -> None:
    """Passed in as a tensor they are the engine's own to draw anew."""
    at = torch.ones(3)
    engine = RecordedEngine()
    with pytest.raises(CaptureError, match="draws random numbers"), engine.capture():
        draw(at)


def test_what_only_looks_like_waiting_is_captured(device: str) -> None:
    """Sizes that are given, indices that are numbers, and attention without dropout."""
    at, heads = Carrier(device), torch.ones(1, 1, 4, 8, device=device)

    def phase() -> None:
        twice = torch.repeat_interleave(at.table, at.table.clamp(0, 0) + 1, output_size=4)
        at.out.copy_(torch.where(twice > 1, twice[at.table], 0))
        heads.copy_(functional.scaled_dot_product_attention(heads, heads, heads) + 1)

    engine = captured(device, phase)
    engine.replay()
    assert at.out.tolist() == [0, 0, 2, 3]
    torch.testing.assert_close(heads, torch.full_like(heads, 2))


def test_crash_in_a_capture_leaves_no_trace() -> None:
    """The error itself comes out, and memory is as it was."""
    at, engine = Carrier("cpu"), RecordedEngine()

    def record() -> None:
        with engine.capture():
            at.out.add_(1)
            raise KeyError("a model's own")

    with pytest.raises(KeyError, match="a model's own"):
        record()
    assert at.out.tolist() == [0] * 4
    with engine.capture():
        pass


def test_an_engine_holds_one_capture(device: str) -> None:
    engine = captured(device, lambda: None)
    with pytest.raises(CaptureError, match="make another one with engine_for"), engine.capture():
        pass


def test_nothing_captured_cannot_be_replayed(device: str) -> None:
    with pytest.raises(CaptureError, match="run the phases once inside"):
        engine_for(device).replay()


def test_replay_needs_no_gradients(device: str) -> None:
    """Whatever mode the caller is in."""
    weight = torch.ones(3, device=device, requires_grad=True)
    out = torch.zeros(3, device=device)

    def phase() -> None:
        with torch.no_grad():
            out.copy_(weight * 2)

    engine = captured(device, phase)
    engine.replay()
    assert (out.tolist(), out.requires_grad) == ([2.0] * 3, False)
