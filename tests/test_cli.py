"""The command line: what each subcommand prints, its exit codes, and its one-line complaints."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specfsm.backends import BACKENDS, named
from specfsm.cli import COMMANDS, main, matrix_markdown, matrix_text
from specfsm.states import TABLES
from specfsm.states.diagram import render

Capture = pytest.CaptureFixture[str]


def complaint(capsys: Capture) -> str:
    """The one line that a refused command leaves on stderr."""
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    return line


# The command itself.


@pytest.mark.parametrize("command", [(), ("diagram",), ("explain",), ("train-draft",)])
def test_help_teaches(command: tuple[str, ...], capsys: Capture) -> None:
    """Every --help exits 0; a subcommand's ends with examples."""
    with pytest.raises(SystemExit) as done:
        main([*command, "--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    assert ("examples:\n  specfsm " + "".join(command)) in shown if command else "COMMAND --help" in shown


def test_help_lists_every_command(capsys: Capture) -> None:
    """One line for each registered function."""
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    names = [register.__name__.removeprefix("add_").replace("_", "-") for register in COMMANDS]
    assert all(re.search(rf"^    {name}\s", shown, re.MULTILINE) for name in names)


@pytest.mark.parametrize("arguments", [[], ["nonesuch"], ["diagram"], ["diagram", "nonesuch"], ["explain"]])
def test_bad_usage_exits_with_two(arguments: list[str], capsys: Capture) -> None:
    """argparse's own exit code, and nothing on standard output."""
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code == 2
    assert capsys.readouterr().out == ""


def test_help_and_diagram_import_no_torch() -> None:
    """They answer at once."""
    code = "import sys; from specfsm.cli import main; main(['diagram', 'phase']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_a_closed_pipe_is_no_error() -> None:
    """``specfsm diagram phase | head -0``: whoever read has read enough."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "specfsm.cli", "diagram", "phase"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


# diagram


@pytest.mark.parametrize("machine", TABLES)
@pytest.mark.parametrize("form", ["mermaid", "dot", "markdown"])
def test_diagram_prints(machine: str, form: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """What `render` makes, byte for byte."""
    assert main(["diagram", machine, "--format", form]) == 0
    assert capfdbinary.readouterr().out == render(TABLES[machine], form)


@pytest.mark.parametrize(
    ("name", "form"),
    [("phase.mmd", "mermaid"), ("phase.md", "markdown"), ("phase.dot", "dot"), ("phase.txt", "mermaid")],
)
def test_diagram_takes_the_format_from_the_suffix(name: str, form: str, tmp_path: Path, capsys: Capture) -> None:
    """A suffix that says nothing gets the default."""
    assert main(["diagram", "phase", "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes() == render(TABLES["phase"], form)
    assert capsys.readouterr().out == ""


def test_diagram_prefers_the_format_that_is_named(tmp_path: Path) -> None:
    """--format wins over the suffix."""
    main(["diagram", "phase", "--format", "dot", "-o", str(tmp_path / "phase.md")])
    assert (tmp_path / "phase.md").read_text().startswith("digraph")


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_diagram_writes_a_picture(tmp_path: Path) -> None:
    """PNG into a file."""
    assert main(["diagram", "phase", "-o", str(tmp_path / "phase.png")]) == 0
    assert (tmp_path / "phase.png").read_bytes().startswith(b"\x89PNG")


def test_diagram_refuses_binary_to_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """With advice, before anything is drawn."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["diagram", "graph", "--format", "png"]) == 2
    assert complaint(capsys) == (
        "specfsm diagram: png is binary and standard output is a terminal: add -o graph.png, or redirect it"
    )


def test_diagram_prints_text_to_a_terminal(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    """Only what is binary is refused."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["diagram", "graph", "--format", "dot"]) == 0
    assert capfd.readouterr().out.startswith("digraph")


def test_diagram_without_graphviz(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    """One line that says what to install, and no file."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["diagram", "phase", "-o", str(tmp_path / "phase.svg")]) == 2
    assert "install Graphviz" in complaint(capsys)
    assert not (tmp_path / "phase.svg").exists()


def test_diagram_that_cannot_be_written(tmp_path: Path, capsys: Capture) -> None:
    """The file and the system's reason."""
    file = tmp_path / "nonesuch" / "phase.mmd"
    assert main(["diagram", "phase", "-o", str(file)]) == 2
    assert complaint(capsys) == f"specfsm diagram: cannot write {file}: No such file or directory"


# explain


@pytest.mark.parametrize("name", BACKENDS)
def test_explain_prints_every_resource(name: str, capsys: Capture) -> None:
    """A row for each, with what it is derived from."""
    assert main(["explain", name]) == 0
    shown = capsys.readouterr().out
    assert shown == matrix_text(named(name))
    rows = {line.split()[0]: line for line in shown.splitlines() if line}
    for resource in named(name).resources:
        assert all(source in rows[resource.name] for source in resource.reads)


@pytest.mark.parametrize("name", BACKENDS)
def test_explain_as_markdown(name: str, capsys: Capture) -> None:
    """Names are code, so that none is taken for emphasis."""
    assert main(["explain", name, "-f", "markdown"]) == 0
    shown = capsys.readouterr().out
    assert shown == matrix_markdown(named(name))
    assert all(f"| `{resource.name}" in shown for resource in named(name).resources)


def test_explain_says_which_event_takes_which_path(capsys: Capture) -> None:
    """The columns are paths; an engine knows events."""
    main(["explain", "trtllm"])
    assert "eager draft: draft_forward" in capsys.readouterr().out


def test_explain_refuses_an_unknown_backend(capsys: Capture) -> None:
    """One line that lists the known ones."""
    assert main(["explain", "flash-mla"]) == 2
    assert complaint(capsys) == f"specfsm explain: unknown backend 'flash-mla': it is one of {', '.join(BACKENDS)}"


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_are_named_as_they_name_themselves(name: str) -> None:
    """The name in the list, in errors and of the module is one."""
    assert named(name).name == name
    assert type(named(name)).__module__ == f"specfsm.backends.{name}"
