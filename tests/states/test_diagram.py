"""Pictures and tables: each holds every row of its machine, once, and nothing else."""

from __future__ import annotations

import builtins
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest

from specfsm.states import PHASE, TABLES, Move, Table
from specfsm.states.diagram import FORMATS, MissingRenderer, arrows, dot, markdown, mermaid, render
from specfsm.states.table import States

MACHINES = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
NEEDS_DOT = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")


class Lamp(States):
    OFF = "off"
    ON = "on"
    BROKEN = "broken"


LAMP = Table(
    name="graph",  # a keyword of DOT
    initial=Lamp.OFF,
    rows=(
        (Lamp.OFF, (Move("press", Lamp.ON, why='a | bar and a "quote"'),)),
        (Lamp.ON, (Move("press", Lamp.OFF, why="<again>"), Move("drop", Lamp.BROKEN), Move("burn", Lamp.BROKEN))),
        (Lamp.BROKEN, ()),
    ),
    terminal=(Lamp.BROKEN,),
)


def triples(table: Table) -> set[tuple[str, str, str]]:
    return {(state.name, move.event, move.to.name) for state, move in table.moves()}


def others(table: Table, name: str) -> list[str]:
    return [state.name for state in table.states if state.name != name]


def drawn_in_mermaid(table: Table) -> list[tuple[str, str, str]]:
    """Every (state, event, to) that a reader sees, folded arrows unfolded."""
    text = mermaid(table)
    seen = [
        (source, event, to)
        for source, to, events in re.findall(r"^ {4}(\w+) --> (\w+): (.+)$", text, re.MULTILINE)
        for event in events.split(", ")
    ]
    for to, event in re.findall(r"note right of (\w+) : (\w+), from every other state", text):
        seen += [(source, event, to) for source in others(table, to)]
    return seen


def drawn_in_dot(table: Table) -> list[tuple[str, str, str]]:
    seen = []
    for source, to, facts in re.findall(r"^ {4}(\w+) -> (\w+) \[(.+)\]$", dot(table), re.MULTILINE):
        events = re.findall(r"(?:label=<|<br/>)(\w+)(?=<br/>|>)", facts)
        sources = others(table, to) if source == f"ANYWHERE_{to}" else [source]
        seen += [(each, event, to) for each in sources for event in events]
    return seen


def tabulated(table: Table) -> list[tuple[str, str, str]]:
    seen = []
    for line in markdown(table).splitlines()[2:]:
        event, sources, to = (cell.strip().strip("`") for cell in line.split("|")[1:4])
        seen += [(source.strip("` "), event, to) for source in sources.split(",")]
    return seen


@MACHINES
@pytest.mark.parametrize("draw", [drawn_in_mermaid, drawn_in_dot, tabulated])
def test_every_row_is_drawn_once_and_nothing_else(table: Table, draw: Any) -> None:
    """Read back from the text, a picture is the table."""
    seen = draw(table)
    assert len(seen) == len(set(seen))
    assert set(seen) == triples(table)


def test_only_what_can_happen_anywhere_is_folded() -> None:
    """Of all four machines, the phase machine's fault."""
    folded = {
        (name, move.event) for name, table in TABLES.items() for a in arrows(table) if not a.source for move in a.moves
    }
    assert folded == {("phase", "fault")}


def test_parallel_moves_share_an_arrow() -> None:
    """Two events between the same two states are one arrow with two labels."""
    assert "    ON --> BROKEN: drop, burn" in mermaid(LAMP).splitlines()


def test_initial_and_terminal_states_are_marked() -> None:
    """An arrow from the start, an arrow to the end."""
    assert "    [*] --> OFF" in mermaid(LAMP)
    assert "    BROKEN --> [*]" in mermaid(LAMP)
    assert "START -> OFF" in dot(LAMP)
    assert re.search(r"BROKEN \[.*peripheries=2\]", dot(LAMP))


def test_states_show_the_cache_they_serve() -> None:
    """Tinted by the domain that the rows into them activate."""
    assert "class TARGET_PREPARE, RESTORE target" in mermaid(PHASE)
    assert "class DRAFT_FORWARD, DRAFT_REPLAY draft" in mermaid(PHASE)
    assert "classDef" not in mermaid(LAMP)


def test_markdown_says_what_a_row_does_and_why() -> None:
    """Columns for what the protocol does, where the machine has any; the reason for each arc."""
    lines = markdown(PHASE).splitlines()
    assert lines[0] == "| event | from | to | activates | refreshes | ahead | requires | why |"
    [replay] = [line for line in lines if line.startswith("| `draft_replay`")]
    assert "| draft | draft | – | graph contract, draft fresh |" in replay
    assert markdown(LAMP).splitlines()[0] == "| event | from | to | why |"
    assert all(move.why in markdown(PHASE) for _, move in PHASE.moves())


def test_bars_and_quotes_are_escaped() -> None:
    """A bar would end a Markdown cell, a quote a DOT string."""
    assert r'a \| bar and a "quote"' in markdown(LAMP)
    assert r'tooltip="press: a | bar and a \"quote\""' in dot(LAMP)


@MACHINES
@pytest.mark.parametrize(("form", "text"), [("mermaid", mermaid), ("dot", dot), ("markdown", markdown)])
def test_render_encodes_the_text_forms(table: Table, form: str, text: Any) -> None:
    """The same text, in UTF-8."""
    assert render(table, form) == text(table).encode()


@NEEDS_DOT
@pytest.mark.parametrize("table", [*TABLES.values(), LAMP], ids=[*TABLES, "lamp"])
@pytest.mark.parametrize(("form", "begins"), [("svg", b"<?xml"), ("png", b"\x89PNG\r\n")])
def test_render_draws(table: Table, form: str, begins: bytes) -> None:
    """Graphviz accepts the DOT of every machine, one called "graph" included."""
    assert render(table, form).startswith(begins)


@NEEDS_DOT
def test_svg_carries_the_reasons_as_tooltips() -> None:
    """Pointing at an arrow in a browser says why it exists."""
    assert b"the draft model runs next: every table" in render(PHASE, "svg")


def test_render_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "graphviz":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingRenderer, match=re.escape("pip install 'specfsm[docs]'")):
        render(PHASE, "svg")


def test_render_without_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The error says what to install, and what needs nothing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingRenderer, match=r"apt-get install graphviz.*mermaid, dot, markdown"):
        render(PHASE, "png")


def test_render_refuses_an_unknown_format() -> None:
    """One line that lists the known ones."""
    with pytest.raises(ValueError, match=f"unknown format 'gif'; it is one of {', '.join(FORMATS)}"):
        render(PHASE, "gif")


def test_drawing_imports_no_torch() -> None:
    """Nor the machine's builder."""
    code = "import sys, specfsm.states.diagram; print({'torch', 'transitions', 'graphviz'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
