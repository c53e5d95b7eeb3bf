"""Pictures and tables of a machine, drawn from the same rows that run it: Mermaid, DOT, SVG, PNG, Markdown.

An event that every other state answers by going to one and the same state (a `fault`) is drawn once, apart, so that
the picture shows how the machine is meant to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape

from attrs import frozen

from specfsm.domain import Domain
from specfsm.errors import SpecFSMError
from specfsm.states.table import Move, States, Table

__all__ = ["FORMATS", "Arrow", "MissingRenderer", "arrows", "dot", "markdown", "mermaid", "pipe_table", "render"]

FOLDED_FROM = 4
"""Sources from which an event must lead to one state before its arrows are folded into one."""


class MissingRenderer(SpecFSMError, ImportError):
    """SVG and PNG need the `graphviz` package and Graphviz's own program ``dot``; one of them is not installed."""


INK, QUIET = "#24292f", "#6e7781"
TINTS = {None: ("#f6f8fa", "#8c959f"), Domain.TARGET: ("#ddf4ff", "#0969da"), Domain.DRAFT: ("#fff1e5", "#bc4c00")}
"""(fill, line) of a state, by the domain that it serves."""


@frozen
class Arrow:
    """One arrow of a picture: all moves between the same two states, in the table's order.

    Args:
        source: None for every state but `to`.
    """

    source: States | None
    to: States
    moves: tuple[Move, ...]


def arrows(table: Table) -> tuple[Arrow, ...]:
    """The table's moves as arrows: parallel ones merged, what can happen anywhere folded and put last."""
    folded = tuple(_folded(table))
    between: dict[tuple[States, States], list[Move]] = {}
    for state, move in table.moves():
        if move not in folded:
            between.setdefault((state, move.to), []).append(move)
    drawn = (Arrow(source, to, tuple(moves)) for (source, to), moves in between.items())
    return (*drawn, *(Arrow(None, move.to, (move,)) for move in folded))


def _folded(table: Table) -> Iterator[Move]:
    """Moves that every state but their destination has."""
    for move, sources in _by_move(table):
        if len(sources) >= FOLDED_FROM and {*sources, move.to} == {*table.states} and move.to not in sources:
            yield move


def _by_move(table: Table) -> Iterator[tuple[Move, tuple[States, ...]]]:
    """Every distinct move with the states that have it."""
    sources: dict[Move, list[States]] = {}
    for state, move in table.moves():
        sources.setdefault(move, []).append(state)
    for move, states in sources.items():
        yield move, tuple(states)


def _served(table: Table, state: States) -> Domain | None:
    """The one domain that the moves into `state` activate, if there is one."""
    activated = {move.activates for _, move in table.moves() if move.to is state and move.activates is not None}
    return activated.pop() if len(activated) == 1 else None


def mermaid(table: Table) -> str:
    """A Mermaid ``stateDiagram-v2``, as GitHub and most documentation tools render it."""
    lines = ["stateDiagram-v2", f"    [*] --> {table.initial.name}"]
    for arrow in arrows(table):
        events = ", ".join(move.event for move in arrow.moves)
        if arrow.source is None:
            lines.append(f"    note right of {arrow.to.name} : {events}, from every other state")
        else:
            lines.append(f"    {arrow.source.name} --> {arrow.to.name}: {events}")
    lines += [f"    {state.name} --> [*]" for state in table.terminal]
    return "\n".join((*lines, *_tints(table))) + "\n"


def _tints(table: Table) -> Iterator[str]:
    for domain in Domain:
        fill, line = TINTS[domain]
        serving = [state.name for state in table.states if _served(table, state) is domain]
        if serving:
            yield f"    classDef {domain} fill:{fill},stroke:{line},color:{INK}"
            yield f"    class {', '.join(serving)} {domain}"


# DOT.

FONT = f'fontname="Helvetica,Arial,sans-serif", fontcolor="{INK}"'
HEAD = f"""\
    graph [rankdir=LR, nodesep=0.5, ranksep=0.4, pad=0.2, bgcolor=white]
    node [shape=box, style="rounded,filled", {FONT}, fontsize=12, margin="0.18,0.1"]
    edge [{FONT}, fontsize=11, color="{QUIET}", arrowsize=0.7]"""


def dot(table: Table) -> str:
    """Graphviz DOT. An edge shows its events and what they activate and refresh; its tooltip says the rest, and why."""
    # Names are quoted: "graph" is a keyword of DOT.
    lines = [f"digraph {_quoted(table.name)} {{", HEAD, '    START [shape=point, width=0.12, label=""]']
    lines += [_node(table, state) for state in table.states]
    lines += [f"    START -> {table.initial.name}"]
    lines += [line for arrow in arrows(table) for line in _edges(arrow)]
    return "\n".join((*lines, "}")) + "\n"


def _node(table: Table, state: States) -> str:
    served = _served(table, state)
    fill, line = TINTS[served]
    serves = "" if served is None else f'<br/><font point-size="9" color="{line}">{served}\'s cache</font>'
    border = ", peripheries=2" if state in table.terminal else ""
    return f'    {state.name} [label=<<b>{state.name}</b>{serves}>, fillcolor="{fill}", color="{line}"{border}]'


def _edges(arrow: Arrow) -> Iterator[str]:
    labels = "<br/>".join(_edge_label(move) for move in arrow.moves)
    tooltip = _quoted("\n".join(_sentence(move) for move in arrow.moves))
    facts = f"label=<{labels}>, tooltip={tooltip}, labeltooltip={tooltip}"
    if arrow.source is not None:
        yield f"    {arrow.source.name} -> {arrow.to.name} [{facts}]"
        return
    anywhere = f"ANYWHERE_{arrow.to.name}"
    yield f'    {anywhere} [shape=plaintext, style="", fontcolor="{QUIET}", label="every other state"]'
    yield f"    {anywhere} -> {arrow.to.name} [style=dashed, {facts}]"


def _edge_label(move: Move) -> str:
    """The event, and below it what the protocol does; one object is named once."""
    verbs: dict[str, list[str]] = {}
    for verb, what in _details(move):
        if verb != "requires":
            verbs.setdefault(what, []).append(verb)
    does = ", ".join(f"{' and '.join(each)} {what}" for what, each in verbs.items())
    return move.event + (f'<br/><font point-size="9" color="{QUIET}">{escape(does)}</font>' if does else "")


def _sentence(move: Move) -> str:
    details = "; ".join(f"{verb} {what}" for verb, what in _details(move))
    return f"{move.event}: {move.why}" + (f" ({details})" if details else "")


def _details(move: Move) -> Iterator[tuple[str, str]]:
    """What the protocol does on the way, as (verb, object)."""
    if move.activates is not None:
        yield "activates", str(move.activates)
    if move.refreshes:
        yield "refreshes", ", ".join(map(str, move.refreshes))
    if move.ahead is not None:
        yield "ahead", str(move.ahead)
    if move.requires:
        yield "requires", ", ".join(requirement.value for requirement in move.requires)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


# Markdown.

COLUMNS = ("activates", "refreshes", "ahead", "requires")


def markdown(table: Table) -> str:
    """A Markdown table with a row for each move: event, from where, to where, what it does, and why."""
    columns = [verb for verb in COLUMNS if any(verb in dict(_details(move)) for _, move in table.moves())]
    anywhere = tuple(_folded(table))
    moves = sorted(_by_move(table), key=lambda each: each[0] in anywhere)
    head = ("event", "from", "to", *columns, "why")
    return pipe_table(head, [_row(move, sources, columns) for move, sources in moves])


def pipe_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table. A bar inside a cell is escaped."""
    lines = (head, ["---"] * len(head), *rows)
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _row(move: Move, sources: Sequence[States], columns: Sequence[str]) -> tuple[str, ...]:
    details = dict(_details(move))
    where = ", ".join(f"`{state.name}`" for state in sources)
    return (f"`{move.event}`", where, f"`{move.to.name}`", *(details.get(verb, "–") for verb in columns), move.why)


# Files.

TEXT: dict[str, Callable[[Table], str]] = {"mermaid": mermaid, "dot": dot, "markdown": markdown}
DRAWN = ("svg", "png")
FORMATS = (*TEXT, *DRAWN)
"""What `render` writes."""


def render(table: Table, format: str) -> bytes:  # noqa: A002 # the command line's own word
    """`table` as a file of one of `FORMATS`.

    Raises:
        ValueError: the format is not one of them.
        MissingRenderer: it is drawn by Graphviz, and the package `graphviz` or the program ``dot`` is not installed.
    """
    if format in TEXT:
        return TEXT[format](table).encode()
    if format in DRAWN:
        return _draw(dot(table), format)
    raise ValueError(f"unknown format {format!r}; it is one of {', '.join(FORMATS)}")


def _draw(source: str, format: str) -> bytes:  # noqa: A002 # likewise
    try:
        import graphviz
    except ImportError:
        raise MissingRenderer(
            f"{format} needs the Python package graphviz: pip install 'specfsm[docs]', or choose {', '.join(TEXT)}"
        ) from None
    try:
        drawn: bytes = graphviz.Source(source).pipe(format=format)
    except graphviz.ExecutableNotFound:
        raise MissingRenderer(
            f"{format} needs Graphviz's program dot, which is not on PATH: install Graphviz "
            f"(apt-get install graphviz, brew install graphviz), or choose {', '.join(TEXT)}"
        ) from None
    return drawn
