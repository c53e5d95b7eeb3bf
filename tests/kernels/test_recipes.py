"""What recipes and their bindings are refused for, and what the message says. Nothing here launches."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from specfsm.domain import Geometry, Unit
from specfsm.kernels import ExpandRows, GatherTable, RefreshLaunch, SlidingTable, SlotMapping, validate_bindings

GEOMETRY = Geometry(tokens_per_block=4, blocks_in_primary_pool=9, max_blocks_per_seq=6, num_layers=2, index_scale=4)
MAPPING: dict[str, Any] = {"requests": "r", "back": "b", "lens": "l", "data_bytes": 8, "scale_bytes": 4}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GatherTable(base="", rows="rows", unit=Unit.SLOT), TypeError, "base must be a resource name"),
        (lambda: GatherTable(base="base", rows=None, unit=Unit.SLOT), TypeError, "rows must be a resource name"),  # type: ignore[arg-type]  # the test
        (lambda: GatherTable(base="base", rows="rows", unit=Unit.BLOCK), ValueError, "unit"),
        (lambda: GatherTable(base="b", rows="r", unit=Unit.SLOT, sentinel=2**31), ValueError, "must fit it"),
        (lambda: SlotMapping(table="t", part="both", **MAPPING), ValueError, "part"),  # type: ignore[arg-type]  # the test
        (lambda: SlotMapping(table="t", part="data", **(MAPPING | {"data_bytes": 0})), ValueError, "data_bytes"),
        (lambda: ExpandRows(table="t", times=0), ValueError, "times"),
    ],
)
def test_recipes_are_checked_when_made(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_reads_names_every_edge() -> None:
    """The dependency graph of a backend is read off its recipes."""
    table = GatherTable(base="base", rows="rows", unit=Unit.SLOT)
    assert table.reads == ("base", "rows")
    assert attrs.evolve(table, lens="lens").reads == ("base", "rows", "lens")
    assert SlotMapping(table="t", part="data", **MAPPING).reads == ("t", "r", "b", "l")
    assert ExpandRows(table="t", times=2).reads == ("t",)
    sliding = SlidingTable(base="base", rows="rows", pools="p", scales="s", offsets="o")
    assert sliding.reads == ("base", "rows", "p", "s", "o")


def _view(size: int, *shape: int) -> torch.Tensor:
    """A tensor whose last axis is not contiguous."""
    return torch.zeros(*shape, size, 2, dtype=torch.int32)[..., 0]


WRONG_TENSORS: dict[str, tuple[str, Any, type[Exception], str]] = {
    "missing": ("rows", None, ValueError, r"slots: rows 'rows' is not bound: pass it in tensors \(rows int32 \[S\]\)"),
    "no tensor": ("rows", [1, 2], TypeError, "must be a tensor"),
    "dtype": (
        "lens",
        torch.zeros(5, dtype=torch.int64),
        TypeError,
        r"lens 'lens' is torch.int64, expected torch.int32",
    ),
    "rank": (
        "base",
        torch.zeros(8, 3, dtype=torch.int32),
        ValueError,
        r"\[8, 3\], expected the axes of base int32 \[P, R, Q, Bb\]",
    ),
    "batch": (
        "lens",
        torch.zeros(4, dtype=torch.int32),
        ValueError,
        r"lens.*shape \[4\].*must be 5, because S=5 in rows",
    ),
    "tokens": ("back", torch.zeros(4, dtype=torch.int32), ValueError, "T=11 in requests 'requests'"),
    "pools": ("pages", torch.zeros(2, 5, 2, 7, dtype=torch.int32), ValueError, "P=1 in base 'base'"),
    "layers": ("offsets", torch.zeros(2, dtype=torch.int32), ValueError, "L=3 in pools 'pools'"),
    "strides": ("cut", _view(7, 5), ValueError, r"last axis of out int32 \[S, B\] must be contiguous"),
    "device": (
        "lens",
        torch.zeros(5, dtype=torch.int32, device="meta"),
        ValueError,
        "is on meta, but this launch is on",
    ),
    "pool bound": ("pools", torch.full((3, 2), 1, dtype=torch.int32), ValueError, "names pool 1.*P=1 pools"),
    "negative": ("scales", torch.full((3, 2), -1, dtype=torch.int32), ValueError, "must not be negative"),
    "too large": ("scales", torch.full((3, 2), 2**30, dtype=torch.int32), ValueError, "int32 output cannot hold"),
    "folded": ("cut", torch.zeros(7, dtype=torch.int32).expand(5, 7), ValueError, "the output overlaps itself"),
}


@pytest.mark.parametrize(("name", "tensor", "error", "message"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_wrong_tensors_are_refused(
    build: Any, name: str, tensor: Any, error: type[Exception], message: str, device: torch.device
) -> None:
    """The message names the resource, the axis, what was expected and what was found."""
    case = build(GEOMETRY)
    case.tensors["pools"].fill_(0)
    validate_bindings(case.recipes, case.tensors, GEOMETRY)  # sound before the change
    if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and 0 not in tensor.stride():
        tensor = (
            tensor.to(device) if tensor.stride(-1) == 1 else tensor.to(device).as_strided(tensor.shape, tensor.stride())
        )
    if isinstance(tensor, torch.Tensor) and 0 in tensor.stride():
        tensor = tensor[0].to(device).expand(tensor.shape)
    case.tensors[name] = tensor
    with pytest.raises(error, match=message):
        RefreshLaunch(case.recipes, case.tensors, GEOMETRY)


def test_outputs_share_memory_with_nothing(build: Any) -> None:
    """Neither with an operand nor with another output."""
    case = build(GEOMETRY)
    case.tensors["cut"] = case.tensors["slots"]
    with pytest.raises(ValueError, match="shares memory with the output 'cut'"):
        validate_bindings(case.recipes, case.tensors, GEOMETRY)
    case = build(GEOMETRY, batch=4, width=4)
    case.tensors["cut"] = case.tensors["base"][0, :4, 0, :4]
    with pytest.raises(ValueError, match=r"cut: the output shares memory with the operand 'base'.*separate launches"):
        validate_bindings(case.recipes, case.tensors, GEOMETRY)


def test_interleaved_views_of_one_buffer_are_legal(build: Any, device: torch.device) -> None:
    """Left and right halves of one buffer share an extent but no element; one column more, and they do."""
    case = build(GEOMETRY)
    buffer = torch.zeros(5, 14, dtype=torch.int32, device=device)
    case.tensors |= {"slots": buffer[:, :7], "cut": buffer[:, 7:]}
    validate_bindings(case.recipes, case.tensors, GEOMETRY)
    case.tensors["cut"] = buffer[:, 6:13]
    with pytest.raises(ValueError, match="shares memory with the output 'cut'"):
        validate_bindings(case.recipes, case.tensors, GEOMETRY)
    case.tensors |= {"slots": buffer[:, 6:13], "cut": buffer[:, :7]}
    with pytest.raises(ValueError, match="shares memory with the output 'cut'"):
        validate_bindings(case.recipes, case.tensors, GEOMETRY)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fp8": SlotMapping(table="nowhere", part="data", **MAPPING)}, "'nowhere' must be a GatherTable.*no recipe"),
        ({"fp8": SlotMapping(table="sliding", part="data", **MAPPING)}, "found a SlidingTable"),
        (
            {"fp8": SlotMapping(table="tokens", part="data", **MAPPING)},
            "counts in tokens; a slot mapping needs unit SLOT",
        ),
        ({"expanded": ExpandRows(table="pages", times=3)}, "'pages' has planes"),
    ],
)
def test_tables_that_cannot_be_decoded_through(build: Any, changed: dict[str, Any], message: str) -> None:
    case = build(GEOMETRY)
    with pytest.raises(ValueError, match=message):
        validate_bindings(case.recipes | changed, case.tensors, GEOMETRY)


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (attrs.evolve(GEOMETRY, blocks_in_primary_pool=2**30, index_scale=1), "tokens: values can reach 4294967292"),
        (attrs.evolve(GEOMETRY, num_layers=1, kv_factor=1), "base 'base' has Q=2 planes, but a slot has 1 pages"),
        (attrs.evolve(GEOMETRY, tokens_per_block=2**31), "positions are int32"),
    ],
)
def test_geometries_that_the_outputs_cannot_hold(build: Any, geometry: Geometry, message: str) -> None:
    """Found from the geometry, before anything runs."""
    case = build(GEOMETRY)
    with pytest.raises(ValueError, match=message):
        validate_bindings(case.recipes, case.tensors, geometry)


@pytest.mark.parametrize("engine", ["reference", "triton"])
def test_rows_are_repeated_as_often_as_said_or_as_the_output_has_room_for(build: Any, engine: Any) -> None:
    case = build(GEOMETRY)
    found = []
    for times in (None, 3):
        case.poison()
        recipes = case.recipes | {"expanded": ExpandRows(table="cut", times=times)}
        RefreshLaunch(recipes, case.tensors, GEOMETRY, engine=engine)()
        found.append(case.tensors["expanded"].clone())
    assert torch.equal(*found)
    with pytest.raises(ValueError, match=r"'expanded' has shape .*, but axis 0 of out int32 .S x 2, B. must be"):
        validate_bindings(case.recipes | {"expanded": ExpandRows(table="cut", times=2)}, case.tensors, GEOMETRY)
    uneven = case.tensors | {"expanded": torch.zeros(case.tensors["rows"].shape[0] * 3 - 1, 4, dtype=torch.int32)}
    with pytest.raises(ValueError, match=r"axis 0 of out int32 .S x n, B. must be"):
        validate_bindings(case.recipes, uneven, GEOMETRY)


def test_slot_mappings_that_int64_cannot_hold(build: Any) -> None:
    case = build(GEOMETRY)
    wide = attrs.evolve(case.recipes["fp8"], data_bytes=2**60)
    with pytest.raises(ValueError, match="int64 output cannot hold"):
        validate_bindings(case.recipes | {"fp8": wide}, case.tensors, GEOMETRY)


def test_what_is_no_recipe_is_refused(build: Any) -> None:
    case = build(GEOMETRY)
    with pytest.raises(TypeError, match="fp8: expected a recipe, got str"):
        validate_bindings(case.recipes | {"fp8": "slots"}, case.tensors, GEOMETRY)
    with pytest.raises(ValueError, match="1 to 63 recipes"):
        validate_bindings({}, case.tensors, GEOMETRY)
    with pytest.raises(ValueError, match="but this launch is on meta"):
        RefreshLaunch(case.recipes, case.tensors, GEOMETRY, device="meta")
