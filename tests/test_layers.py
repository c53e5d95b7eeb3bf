"""Imports go one way, and what needs no torch imports none."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import specfsm

PACKAGE = Path(specfsm.__file__).parent

LAYERS = (
    ("errors",),
    ("domain",),
    ("states",),
    ("kernels",),
    ("backends",),
    ("contracts",),
    ("graph", "switch", "verify", "trace", "explain", "validation", "poison", "orchestrator"),
    ("decode",),
    ("cli",),
)
"""Each may import its own layer and the ones before it."""

RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of the package, those in functions included; not those for type checkers."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield node.lineno, node.module or ""


def layer(module: str) -> int | None:
    """The rank of ``specfsm.<layer>…``; None for the package itself and for other packages."""
    parts = module.split(".")
    return RANK[parts[1]] if parts[0] == "specfsm" and len(parts) > 1 else None


def test_every_module_has_a_layer() -> None:
    """A new top-level module is placed before it is imported."""
    known = {name.split(".")[1] for name, _ in modules() if "." in name}
    assert known <= set(RANK), f"no layer for {known - set(RANK)}"


@pytest.mark.parametrize("module", [name for name, _ in modules()])
def test_imports_go_one_way(module: str) -> None:
    path = dict(modules())[module]
    own = layer(module)
    if own is None:
        own = len(LAYERS)
    for line, imported in imports(path):
        other = layer(imported)
        if other is not None:
            assert other <= own, f"{module}:{line} imports {imported}, which stands above it"


def test_direction_check_sees_an_upward_import(tmp_path: Path) -> None:
    """The check is no formality: this is what it must find."""
    (tmp_path / "bad.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from specfsm.cli import main\n"
        "def late():\n    from specfsm.orchestrator import Orchestrator\n"
    )
    found = [(line, layer(name)) for line, name in imports(tmp_path / "bad.py") if layer(name) is not None]
    assert found == [(5, RANK["orchestrator"])]
    assert RANK["orchestrator"] > RANK["states"]


def imported_by(statement: str) -> set[str]:
    """Top-level packages in a fresh interpreter after `statement`."""
    code = f"import sys; {statement}; print(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    ["import specfsm", "import specfsm.states", "import specfsm.domain", "import specfsm.errors", "dir(specfsm)"],
)
def test_tables_need_no_torch(statement: str) -> None:
    """Tools that draw or check a table start fast, and anywhere."""
    prefix = "import specfsm; " if statement.startswith("dir") else ""
    loaded = imported_by(prefix + statement)
    assert "specfsm" in loaded
    assert loaded.isdisjoint({"torch", "triton", "numpy", "transformers"})


def test_torch_would_be_seen() -> None:
    assert "torch" in imported_by("import specfsm.orchestrator")


def test_only_one_module_imports_transitions() -> None:
    users = {name for name, path in modules() for _, module in imports(path) if module.split(".")[0] == "transitions"}
    assert users == {"specfsm.states.machine"}


def test_public_names() -> None:
    """Every one resolves, is listed by dir(), and an unknown one says so."""
    assert set(specfsm.__all__) <= set(dir(specfsm))
    assert all(getattr(specfsm, name) is not None for name in specfsm.__all__)
    with pytest.raises(AttributeError, match="module 'specfsm' has no attribute 'Orchestra'"):
        specfsm.Orchestra  # noqa: B018 # the attribute is the test
