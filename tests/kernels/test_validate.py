"""The validation kernel against its torch reference, record for record; each kind of violation; what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from attrs import evolve

from specfsm.domain import NOBODY, SHARED, Geometry
from specfsm.kernels import refresh_reference
from specfsm.kernels.refresh import RefreshLaunch, Tile
from specfsm.kernels.validate import ValidateLaunch, Violation, difference, unravel
from specfsm.kernels.validate_reference import NOTHING, PROGRAM_BITS
from tests.kernels.test_refresh import GEOMETRIES, SIZES

# Triton's interpreter turns an array of one element into an index, which NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

ENGINES = ("reference", "triton")
FAR = 2**30


def launches(case: Any, pools: dict[str, str] | None = None, **options: Any) -> dict[str, ValidateLaunch]:
    """One of each engine, over the same tensors."""
    return {
        engine: ValidateLaunch(
            RefreshLaunch(case.recipes, case.tensors, case.geometry, engine=engine, **options),  # type: ignore[arg-type]  # a literal
            pools,
        )
        for engine in ENGINES
    }


def refreshed(case: Any) -> Any:
    refresh_reference(case.recipes, case.tensors, case.geometry)
    return case


def records(validations: dict[str, ValidateLaunch], mask: int | None = None) -> tuple[list[int], list[int]]:
    """Both records, without what only the kernel keeps in them: the program and the ticket."""
    found = []
    for launch in validations.values():
        record = launch(mask).cpu()
        key = int(record[0])
        whole = NOTHING if key == NOTHING else key >> PROGRAM_BITS
        found.append([whole, *([0] * 5 if key == NOTHING else record[2:].tolist())])
    return found[0], found[1]


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_what_was_refreshed_is_valid(build: Any, geometry: Geometry, sizes: dict[str, Any]) -> None:
    """The refresh and both validations compute the same by three arithmetics."""
    case = refreshed(build(geometry, **sizes))
    reference, kernel = records(launches(case))
    assert reference == kernel == [NOTHING, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("geometry", "sizes"), [("odd", "strided"), ("draft", "odd"), ("target", "all_padding")])
def test_kernel_equals_reference_in_whatever_is_wrong(build: Any, geometry: str, sizes: str) -> None:
    """One element after another is spoilt, and both name it, with what it holds and should hold."""
    case = refreshed(build(GEOMETRIES[geometry], **SIZES[sizes]))
    validations = launches(case)
    generator = torch.Generator().manual_seed(1)
    for name in case.recipes:
        out = case.tensors[name]
        at = int(torch.randint(out.numel(), (1,), generator=generator))
        index = unravel(at, tuple(out.shape))
        right = int(out[index])
        for wrong in (FAR, right + 1):
            out[index] = wrong
            reference, kernel = records(validations)
            assert reference == kernel, name
            found = validations["reference"].read(validations["reference"]())
            assert found is not None
            assert (found.output, found.index, found.found, found.expected) == (name, index, wrong, right)
        out[index] = right


@pytest.mark.parametrize("tile", [Tile(2, 4, 8), Tile(1, 16, 4)], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_of_many_is_recorded(build: Any, engine: str, tile: Tile) -> None:
    """The lowest element of the first output, however the work is cut; the mask leaves outputs out."""
    case = refreshed(build(GEOMETRIES["odd"], batch=5, tokens=21, width=18))
    launch = launches(case, tile=tile)[engine]
    for name in case.recipes:
        case.tensors[name].fill_(FAR)
    for bit, name in enumerate(case.recipes):
        if bit % 3:
            continue
        found = launch.read(launch(~0 << bit & (1 << len(case.recipes)) - 1).cpu())
        assert found is not None
        assert (found.output, set(found.index), found.found, found.failed) == (name, {0}, FAR, "bounds")


def owned(case: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Requests 100, 101, … in the manager's rows, and every slot with the first row that shows it."""
    base = case.tensors["base"].cpu()
    requests = torch.arange(100, 100 + base.shape[1])
    owners = torch.full((case.geometry.blocks_in_primary_pool,), NOBODY)
    for row in reversed(range(base.shape[1])):
        entries = base[:, row][base[:, row] >= 0].long()
        owners[(entries // case.geometry.index_scale).clamp(max=len(owners) - 1)] = 100 + row
    return requests, owners


@pytest.mark.parametrize("name", ["slots", "cut", "tokens", "pages", "expanded", "fp8", "fp8_scale"])
def test_foreign_page_is_found_in_every_kind_of_table(build: Any, name: str) -> None:
    """Every page belongs to the row that shows it; then the table shows another's, or a page of nobody."""
    geometry = evolve(GEOMETRIES["odd"], num_pools=1)
    case = build(geometry, padding="none", batch=4, tokens=13)
    base = case.tensors["base"]
    distinct = torch.arange(base.shape[1] * base.shape[3], dtype=torch.int32).view(base.shape[1], 1, base.shape[3])
    base.copy_((distinct * geometry.index_scale).expand(base.shape[1:])[None])
    case.tensors["lens"].fill_(geometry.max_tokens_per_seq)
    case.tensors["back"].fill_(geometry.max_tokens_per_seq)
    refreshed(case)
    requests, owners = owned(case)
    validations = launches(case, {name: "kv"})
    for launch in validations.values():
        launch.know(requests, {"kv": owners})
    assert records(validations)[1][0] == NOTHING
    rows = case.tensors["rows"].cpu().tolist()
    out, mask = case.tensors[name], validations["triton"].refresh.mask_of(name)
    first = next(index for index in torch.ones(out.shape).nonzero().tolist() if int(out[tuple(index)]) >= 0)
    batch_row = first[1] if name == "pages" else first[0]
    if name == "expanded":
        batch_row //= 3
    if name.startswith("fp8"):
        batch_row = int(case.tensors["requests"][batch_row])
    slot = rows[batch_row] * base.shape[3]
    spoilt = owners.clone()
    spoilt[slot] = SHARED  # several requests hold it: each may
    for launch in validations.values():
        launch.know(requests, {"kv": spoilt})
    assert [record[0] for record in records(validations, mask)] == [NOTHING, NOTHING]
    for owner in (555, NOBODY):
        spoilt = owners.clone()
        spoilt[slot] = owner
        for launch in validations.values():
            launch.know(requests, {"kv": spoilt})
        reference, kernel = records(validations, mask)
        assert reference == kernel
        found = validations["reference"].read(validations["reference"](mask))
        assert found is not None
        assert (found.failed, found.index) == ("owner", tuple(first))
        assert found.found == found.expected == int(out[tuple(first)])
        assert (found.owner, found.request) == (None if owner == NOBODY else owner, 100 + rows[batch_row])


@pytest.mark.parametrize("engine", ENGINES)
def test_page_of_several_requests_is_nobodys_alone(build: Any, engine: str) -> None:
    """It is foreign to none; where another value is due, no owner is named."""
    case = refreshed(build(GEOMETRIES["target"], padding="some", seed=5))
    launch = launches(case, {"slots": "kv"})[engine]
    requests, owners = owned(case)
    launch.know(requests, {"kv": torch.full_like(owners, SHARED)})
    mask, table = launch.refresh.mask_of("slots"), case.tensors["slots"]
    assert launch.read(launch(mask).cpu()) is None
    index = next(tuple(each) for each in (table >= 0).nonzero().tolist())
    table[index] = (int(table[index]) + 1) % len(owners)
    found = launch.read(launch(mask).cpu())
    assert found is not None
    assert (found.failed, found.owner) == ("contents", None)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_kind_has_its_name(build: Any, engine: str) -> None:
    """Padded row, column behind the length, beyond the pool, another place of the pool."""
    case = refreshed(build(GEOMETRIES["target"], padding="some", seed=5))
    case.tensors["lens"].fill_(GEOMETRIES["target"].tokens_per_block)
    refreshed(case)
    launch = launches(case)[engine]
    mask = launch.refresh.mask_of("cut")
    cut = case.tensors["cut"]
    live = next(row for row in range(5) if int(cut[row, 0]) >= 0)
    cases: list[tuple[tuple[int, int], int, str]] = [
        ((2, 1), 5, "sentinel"),  # row 2 is padded
        ((live, 3), 5, "sentinel"),  # behind the one page of its length
        ((live, 0), 50, "bounds"),
        ((live, 0), -2, "bounds"),
        ((live, 0), -1, "contents"),  # no page, though there is one
        ((live, 0), (int(cut[live, 0]) + 1) % 50, "contents"),
    ]
    for index, wrong, failed in cases:
        right = int(cut[index])
        cut[index] = wrong
        expected = Violation("cut", index, failed, wrong, right, None, None)
        assert launch.read(launch(mask).cpu()) == expected
        cut[index] = right
    assert launch.read(launch(mask).cpu()) is None


@pytest.mark.parametrize("engine", ENGINES)
def test_rebinding_is_followed(build: Any, engine: str) -> None:
    case = refreshed(build(GEOMETRIES["target"]))
    launch = launches(case)[engine]
    other = torch.full_like(case.tensors["slots"], FAR)
    launch.refresh.rebind("slots", other)
    found = launch.read(launch().cpu())
    assert found is not None
    assert (found.output, found.found) == ("slots", FAR)


def test_pool_of_no_output_is_refused(build: Any) -> None:
    case = build(GEOMETRIES["target"])
    with pytest.raises(ValueError, match="nothing: no output of this launch"):
        ValidateLaunch(RefreshLaunch(case.recipes, case.tensors, case.geometry), {"nothing": "kv"})


def test_record_that_could_not_name_its_element_is_refused(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = build(GEOMETRIES["target"])
    refresh = RefreshLaunch(case.recipes, case.tensors, case.geometry)
    refresh.programs = 1 << PROGRAM_BITS
    with pytest.raises(ValueError, match="too many for one record"):
        ValidateLaunch(refresh)


@pytest.mark.parametrize(
    ("found", "expected", "record"),
    [
        ([1, 2, 3], [1, 2, 3], [0, 0, 1, 1]),
        ([1, 9, 8], [1, 2, 3], [4, 1, 9, 2]),
        ([1, 200, 3], [1, 200, 3], [1, 1, 200, 200]),  # as recomputed, and no place all the same
        ([-1, 2, 3], [-1, 2, 3], [0, 0, -1, -1]),  # the sentinel need not be one
        ([], [], [0, 0, 0, 0]),
    ],
)
def test_difference(found: list[int], expected: list[int], record: list[int]) -> None:
    own, other = (torch.tensor(each, dtype=torch.int32) for each in (found, expected))
    assert difference(own, other, 0, 100, -1).tolist() == record


def test_difference_of_floats_is_by_bits() -> None:
    """Not a number is equal to itself, and zero to no negative zero."""
    own, other = torch.tensor([float("nan"), 0.0]), torch.tensor([float("nan"), -0.0])
    kind, at, found, expected = difference(own, other, 0, 0, 0).tolist()
    assert (kind, at) == (4, 1)
    assert torch.tensor([found, expected]).view(torch.float64).tolist() == [0.0, -0.0]


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specfsm.kernels.refresh import COMPILED_TILE as tile
from specfsm.kernels.validate_kernel import validate_kernel

types = {"tiles": "*i32", "mask": "i64", "num_requests": "i32", "programs": "i32"}
sizes = {"NUM_ROWS": tile.rows, "NUM_BLOCKS": tile.blocks, "NUM_TOKENS": tile.tokens}
signature = {name: types.get(name, "constexpr" if name in sizes else "*i64") for name in validate_kernel.arg_names}
kernel = triton.compile(ASTSource(validate_kernel, signature, sizes), target=GPUTarget("cuda", 90, 32))
assert kernel.asm["cubin"].startswith(b"\\x7fELF")
print(len(kernel.asm["cubin"]), "atom.global.gpu.acq_rel.min.s64" in kernel.asm["ptx"])
"""


def test_compiles_for_sm_90_without_a_gpu(tmp_path: Any) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    size, atomic = done.stdout.split()
    assert int(size) > 10_000
    assert atomic == "True"
