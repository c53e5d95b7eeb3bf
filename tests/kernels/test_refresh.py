"""The Triton kernel against its torch reference, bit for bit; what one launch leaves alone; what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specfsm.domain import Geometry, RowOrder, Unit
from specfsm.kernels import GatherTable, RefreshLaunch, SlotMapping, refresh_kernel, refresh_reference
from specfsm.kernels.refresh import Tile, reciprocal

# Triton's interpreter turns an array of one element into an index, which NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

POISON = -77777
GEOMETRIES = {
    "target": Geometry(
        tokens_per_block=64, blocks_in_primary_pool=50, max_blocks_per_seq=9, num_layers=3, index_scale=6
    ),
    "draft": Geometry(
        tokens_per_block=32,
        blocks_in_primary_pool=7,
        max_blocks_per_seq=5,
        num_layers=1,
        kv_factor=1,
        row_order=RowOrder.SLOT,
    ),
    "odd": Geometry(
        tokens_per_block=3,
        blocks_in_primary_pool=1000,
        max_blocks_per_seq=20,
        num_layers=7,
        index_scale=5,
        num_pools=3,
        row_order=RowOrder.SLOT,
    ),
    "latent": Geometry(
        tokens_per_block=128,
        blocks_in_primary_pool=33,
        max_blocks_per_seq=8,
        num_layers=61,
        kv_factor=1,
        index_scale=61,
    ),
}
SIZES: dict[str, dict[str, Any]] = {
    "one_row": {"batch": 1, "tokens": 1},
    "one_column": {"width": 1},
    "odd": {"batch": 6, "tokens": 13, "width": 19, "seed": 3},
    "aligned": {"batch": 8, "tokens": 16, "width": 8, "padding": "none"},
    "empty_batch": {"batch": 0, "tokens": 0},
    "no_tokens": {"tokens": 0},
    "no_columns": {"width": 0},
    "all_padding": {"padding": "all"},
    "strided": {"batch": 7, "strided": True, "seed": 4},
}


def launch(case: Any, **options: Any) -> RefreshLaunch:
    return RefreshLaunch(case.recipes, case.tensors, case.geometry, engine="triton", **options)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name}\n{found[name]}\n{tensor}"


def reference(case: Any, names: list[str] | None = None) -> dict[str, torch.Tensor]:
    """Whole buffers after the reference ran on poisoned ones."""
    case.poison()
    refresh_reference(case.recipes, case.tensors, case.geometry, names)
    found: dict[str, torch.Tensor] = case.snapshot()
    case.poison()
    return found


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_kernel_equals_reference(build: Any, geometry: Geometry, sizes: dict[str, Any]) -> None:
    """Poisoned outputs are overwritten whole, and nothing outside them is."""
    case = build(geometry, **sizes)
    expected = reference(case)
    launch(case)()
    assert_same(case.snapshot(), expected)
    for name in case.recipes:
        assert not (case.tensors[name] == POISON).any(), f"{name} keeps poison"


@pytest.mark.parametrize(("end", "back"), [(2**31 - 1, -(2**31)), (-(2**31), 2**31 - 1), (-(2**31), 5), (2, -(2**31))])
def test_positions_that_int32_cannot_hold_are_outside(build: Any, end: int, back: int) -> None:
    """Garbage lengths take the sentinel; in 32 bits the second case would wrap to position 1."""
    case = build(GEOMETRIES["target"], padding="none")
    case.tensors["lens"].fill_(end)
    case.tensors["back"].fill_(back)
    expected = reference(case)
    launch(case)()
    assert_same(case.snapshot(), expected)
    assert (case.tensors["fp8"] == -1).all()


@pytest.mark.parametrize("tile", [Tile(2, 4, 8), Tile(1, 16, 4)], ids=str)
def test_many_tiles_equal_reference(build: Any, tile: Tile) -> None:
    """Tiles smaller than the tables, with a remainder on every axis."""
    case = build(GEOMETRIES["odd"], batch=5, tokens=21, width=18)
    expected = reference(case)
    launched = launch(case, tile=tile)
    assert launched.programs > 2 * len(launched._planes)
    launched()
    assert_same(case.snapshot(), expected)


def aligned_case(build: Any) -> Any:
    """Every width a multiple of four and every buffer on its own, as an engine allocates them."""
    case = build(GEOMETRIES["latent"], batch=8, tokens=16, width=8, padding="none")
    for name in ("tokens", "cut_pages", "expanded"):
        size = (*case.tensors[name].shape[:-1], 8)
        case.tensors[name] = case.buffers[name] = case.tensors[name].new_full(size, POISON)
    return case


def test_vector_specialisation_equals_reference(build: Any) -> None:
    """Aligned tables take the specialisation that moves four elements at a time."""
    case = aligned_case(build)
    expected = reference(case)
    launched = launch(case)
    assert launched.vector == 4
    launched()
    assert_same(case.snapshot(), expected)


def test_vectors_are_for_the_life_of_a_launch(build: Any) -> None:
    """A graph that captured the aligned kernel must never meet a table off alignment, so such a rebind is refused."""
    case = aligned_case(build)
    launched, expected = launch(case), reference(case)
    unaligned = case.tensors["slots"].new_full((8, 9), POISON)[:, 1:]
    with pytest.raises(ValueError, match="slots: this launch moves 4 elements at a time"):
        launched.rebind("slots", unaligned)
    launched()
    assert_same(case.snapshot(), expected)

    case.tensors["slots"] = unaligned
    launched = launch(case)
    assert launched.vector == 1
    launched.rebind("slots", case.buffers["slots"])
    assert launched.vector == 1


@pytest.mark.parametrize("names", [["slots"], ["expanded", "fp8"], ["sliding"], ["fp4", "pages", "cut"], []], ids=str)
def test_mask_leaves_the_rest_untouched(build: Any, names: list[str]) -> None:
    """A slot mapping and an expanded table are right although the table they decode through was masked out."""
    case = build(GEOMETRIES["target"])
    expected = reference(case, names)
    launched = launch(case)
    launched(launched.mask_of(*names))
    assert_same(case.snapshot(), expected)
    assert sorted(name for name, buffer in case.buffers.items() if (buffer != POISON).any()) == sorted(names)


@pytest.mark.parametrize("engine", ["reference", "triton"])
def test_mask_tensor_is_read_at_each_launch(build: Any, device: torch.device, engine: Any) -> None:
    case = build(GEOMETRIES["target"])
    mask = torch.zeros(1, dtype=torch.int64, device=device)
    launched = RefreshLaunch(case.recipes, case.tensors, case.geometry, engine=engine, mask_tensor=mask)
    launched()
    assert all((buffer == POISON).all() for buffer in case.buffers.values())
    mask.fill_(launched.mask_of("cut", "fp8"))
    launched(0)
    assert all((buffer == POISON).all() for buffer in case.buffers.values())
    launched(launched.mask_of("cut", "pages"))
    assert [name for name, buffer in case.buffers.items() if (buffer != POISON).any()] == ["cut"]


@pytest.mark.parametrize("engine", ["reference", "triton"])
def test_mask_beyond_the_recipes_is_refused(build: Any, engine: Any) -> None:
    case = build(GEOMETRIES["target"])
    launched = RefreshLaunch(case.recipes, case.tensors, case.geometry, engine=engine)
    with pytest.raises(ValueError, match="bits beyond the 10 recipes"):
        launched(1 << 10)
    with pytest.raises(ValueError, match="bits beyond"):
        launched(-1)


def test_sixty_three_recipes(device: torch.device) -> None:
    """The last bit of a signed 64-bit mask is usable, and one more recipe is refused."""
    geometry = GEOMETRIES["draft"]
    tensors = {
        "base": torch.arange(4, dtype=torch.int32, device=device).reshape(1, 2, 1, 2),
        "rows": torch.tensor([1], dtype=torch.int32, device=device),
    } | {f"t{i}": torch.full((1, 2), POISON, dtype=torch.int32, device=device) for i in range(64)}
    recipes = {f"t{i}": GatherTable(base="base", rows="rows", unit=Unit.SLOT) for i in range(64)}
    with pytest.raises(ValueError, match="1 to 63 recipes"):
        RefreshLaunch(recipes, tensors, geometry, engine="triton")
    del recipes["t63"]
    last = "t62"
    launched = RefreshLaunch(recipes, tensors, geometry, engine="triton")
    launched(launched.mask_of(last))
    assert [name for name in recipes if (tensors[name] != POISON).any()] == [last]
    assert tensors[last].tolist() == [[2, 3]]


def test_slots_times_stride_beyond_int32(device: torch.device) -> None:
    """A pool of 2**24 blocks of 8448 bytes: the last block starts near 2**37."""
    geometry = Geometry(tokens_per_block=64, blocks_in_primary_pool=2**24, max_blocks_per_seq=2, num_layers=1)
    last = 2**24 - 1
    tensors = {
        "base": torch.tensor([last, 2**18], dtype=torch.int32, device=device).reshape(1, 1, 1, 2),
        "rows": torch.zeros(1, dtype=torch.int32, device=device),
        "lens": torch.full((1,), 128, dtype=torch.int32, device=device),
        "requests": torch.zeros(128, dtype=torch.int32, device=device),
        "back": torch.arange(128, 0, -1, dtype=torch.int32, device=device),
        "table": torch.empty(1, 2, dtype=torch.int32, device=device),
    } | {part: torch.empty(128, dtype=torch.int64, device=device) for part in ("data", "scale")}
    common: dict[str, Any] = {"table": "table", "requests": "requests", "back": "back", "lens": "lens"}
    recipes = {"table": GatherTable(base="base", rows="rows", unit=Unit.SLOT)} | {
        part: SlotMapping(**common, data_bytes=128, scale_bytes=4, part=part) for part in ("data", "scale")
    }
    expected = [slot * 8448 + off * 128 for slot in (last, 2**18) for off in range(64)]
    scales = [slot * 8448 + 64 * 128 + off * 4 for slot in (last, 2**18) for off in range(64)]
    assert min(expected) >= 2**31
    for engine in ("reference", "triton"):
        RefreshLaunch(recipes, tensors, geometry, engine=engine)()
        assert tensors["data"].tolist() == expected
        assert tensors["scale"].tolist() == scales


def test_columns_times_page_beyond_int32(device: torch.device) -> None:
    """Column 2 of 2**30-token pages starts at 2**31, beyond every length."""
    geometry = Geometry(tokens_per_block=2**30, blocks_in_primary_pool=9, max_blocks_per_seq=4, num_layers=1)
    tensors = {
        "base": torch.arange(4, dtype=torch.int32, device=device).reshape(1, 1, 1, 4),
        "rows": torch.zeros(1, dtype=torch.int32, device=device),
        "lens": torch.full((1,), 2**31 - 1, dtype=torch.int32, device=device),
        "table": torch.empty(1, 4, dtype=torch.int32, device=device),
    }
    recipes = {"table": GatherTable(base="base", rows="rows", unit=Unit.SLOT, lens="lens", sentinel=-1)}
    for engine in ("reference", "triton"):
        RefreshLaunch(recipes, tensors, geometry, engine=engine)()
        assert tensors["table"].tolist() == [[0, 1, -1, -1]]


def test_base_larger_than_int32_elements_is_addressed_in_int64(build: Any, device: torch.device) -> None:
    """The kernel's address of (pool, row) is base + an int64 offset: shown by a row stride past 2**31 bytes."""
    geometry = Geometry(tokens_per_block=4, blocks_in_primary_pool=9, max_blocks_per_seq=2, num_layers=1)
    storage = torch.empty(2**30 + 2, dtype=torch.int32, device=device)  # untouched pages cost no memory on a host
    base = storage.as_strided((1, 2, 1, 2), (2**30 + 2, 2**30, 2, 1))
    base[0, 1, 0] = torch.tensor([5, 7], dtype=torch.int32)
    tensors = {
        "base": base,
        "rows": torch.tensor([1], dtype=torch.int32, device=device),
        "table": torch.empty(1, 2, dtype=torch.int32, device=device),
    }
    recipes = {"table": GatherTable(base="base", rows="rows", unit=Unit.SLOT)}
    RefreshLaunch(recipes, tensors, geometry, engine="triton")()
    assert tensors["table"].tolist() == [[5, 7]]


@pytest.mark.parametrize(
    "name", ["base", "pages_base", "rows", "lens", "back", "requests", "scales", "cut", "sliding", "fp8"]
)
def test_rebind_follows_the_new_tensor(build: Any, name: str) -> None:
    """After a rebind the launch equals one built anew, whatever the old tensor holds."""
    case, donor = build(GEOMETRIES["target"], strided=True), build(GEOMETRIES["target"], strided=True, seed=9)
    launched = launch(case)
    old = case.tensors[name]
    launched.rebind(name, donor.tensors[name])
    case.tensors[name] = donor.tensors[name]
    if name in case.buffers:
        case.buffers[name] = donor.buffers[name]
    old.fill_(1)
    expected = reference(case)
    launched()
    assert_same(case.snapshot(), expected)
    assert launched.tensors[name] is donor.tensors[name]


def test_refused_rebind_changes_nothing(build: Any) -> None:
    case = build(GEOMETRIES["target"])
    launched, expected = launch(case), reference(case)
    refused = {
        "base": (case.tensors["base"].long(), TypeError, "expected torch.int32"),
        "cut": (case.tensors["cut"].new_empty(5, 9), ValueError, "build a new RefreshLaunch"),
        "rows": (case.tensors["rows"][:2], ValueError, "S="),
        "nothing": (case.tensors["rows"], ValueError, "no tensor of this launch"),
    }
    for name, (tensor, error, message) in refused.items():
        with pytest.raises(error, match=message):
            launched.rebind(name, tensor)
    launched()
    assert_same(case.snapshot(), expected)


@pytest.mark.parametrize("engine", ["reference", "triton"])
def test_version_counters_of_written_tensors_move(build: Any, engine: Any) -> None:
    """A Triton store moves no counter, so the launcher does, for the tensors in the mask only."""
    case = build(GEOMETRIES["target"])
    launched = RefreshLaunch(case.recipes, case.tensors, case.geometry, engine=engine)
    before = {name: tensor._version for name, tensor in case.tensors.items()}
    launched(launched.mask_of("cut", "fp8"))
    moved = {name for name, tensor in case.tensors.items() if tensor._version != before[name]}
    assert moved == {"cut", "fp8"}


def test_tensors_of_inference_mode_have_no_counter(build: Any) -> None:
    case = build(GEOMETRIES["target"])
    with torch.inference_mode():
        case.tensors["cut"] = case.buffers["cut"] = torch.full_like(case.tensors["cut"], POISON)
        expected = reference(case)
        launch(case)()
        assert_same(case.snapshot(), expected)


def test_auto_never_picks_the_interpreter(build: Any, device: torch.device) -> None:
    case = build(GEOMETRIES["draft"])
    launched = RefreshLaunch(case.recipes, case.tensors, case.geometry)
    assert launched.engine == ("triton" if device.type == "cuda" else "reference")
    expected = reference(case)
    launched()
    assert_same(case.snapshot(), expected)


def test_the_kernel_refuses_host_tensors_outside_the_interpreter(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = build(GEOMETRIES["draft"])
    case.tensors = {name: tensor.cpu() for name, tensor in case.tensors.items()}
    monkeypatch.setattr(refresh_kernel, "INTERPRETED", False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1 before"):
        launch(case)
    with pytest.raises(ValueError, match="engine must be"):
        RefreshLaunch(case.recipes, case.tensors, case.geometry, engine="fast")  # type: ignore[arg-type]  # the test


@pytest.mark.parametrize("mask", [torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)], ids=str)
def test_mask_tensor_is_checked(build: Any, mask: torch.Tensor, device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"mask_tensor must be int64 \[1\]"):
        launch(build(GEOMETRIES["draft"]), mask_tensor=mask.to(device))


@given(st.integers(0, 2**31 - 1), st.one_of(st.integers(1, 4096), st.integers(1, 2**40)))
def test_reciprocal_divides_exactly(n: int, divisor: int) -> None:
    magic, shift = reciprocal(divisor)
    assert magic < 2**32
    for numerator in {n, n // divisor * divisor, min(n // divisor * divisor + divisor - 1, 2**31 - 1)}:
        assert ((2 * numerator * magic) >> 32) >> shift == numerator // divisor


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specfsm.kernels.refresh import COMPILED_TILE as tile
from specfsm.kernels.refresh_kernel import refresh_kernel

types = {"planes": "*i64", "tiles": "*i32", "mask_tensor": "*i64", "mask": "i64"}
signature = {name: types.get(name, "constexpr") for name in refresh_kernel.arg_names}
sizes = {"NUM_ROWS": tile.rows, "NUM_BLOCKS": tile.blocks, "NUM_TOKENS": tile.tokens, "STEP": int(sys.argv[1])}
aligned = {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}
kernel = triton.compile(ASTSource(refresh_kernel, signature, sizes, aligned), target=GPUTarget("cuda", 90, 32))
assert kernel.asm["cubin"].startswith(b"\\x7fELF")
print(len(kernel.asm["cubin"]), "v4.b32" in kernel.asm["ptx"])
"""


@pytest.mark.parametrize("step", [1, 4])
def test_compiles_for_sm_90_without_a_gpu(step: int, tmp_path: Any) -> None:
    """Every specialisation gives a cubin; the aligned one really moves four elements at a time."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    done = subprocess.run([sys.executable, script, str(step)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    size, vectors = done.stdout.split()
    assert int(size) > 10_000
    assert vectors == str(step == 4)
