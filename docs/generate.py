"""Write the generated regions of the documents: ``python -m docs.generate``; ``--check`` says what is out of date.

A region stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``; NAME is a key of `REGIONS`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent

from specfsm import errors
from specfsm.backends import BACKENDS, named
from specfsm.backends.resource import ACTIONS
from specfsm.backends.resource import Path as Route
from specfsm.cli import matrix_markdown
from specfsm.domain import INPUTS
from specfsm.states import TABLES
from specfsm.states.diagram import markdown, mermaid, pipe_table
from tests.cases.case import reports
from tests.cases.examples import example

__all__ = ["COMMAND", "DOCUMENTS", "REGIONS", "generated", "main"]

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
COMMAND = "make docs"
REGION = re.compile(r"(^<!-- generated: (?P<name>[^>]+?) -->\n).*?(^<!-- end -->$)", re.DOTALL | re.MULTILINE)
OPENING = re.compile(r"^<!-- generated:", re.MULTILINE)


def diagram(machine: str) -> str:
    return f"```mermaid\n{mermaid(TABLES[machine])}```\n"


def matrices() -> str:
    """A section for each registered backend."""
    return "\n".join(f"### `{name}`\n\n{_matrix(name)}" for name in BACKENDS)


def _matrix(name: str) -> str:
    backend = named(name)
    notes = "".join(f"- `{each.name}`: {each.note}\n" for each in backend.resources if each.note)
    return "\n".join(filter(None, (matrix_markdown(backend), notes)))


def kinds() -> str:
    """Kind × path → actions, with the first sentence of each kind's docstring."""
    rows = [
        (
            f"`{kind.__name__}`",
            _summary(kind),
            *(" + ".join(action.value for action in row[path]) or "–" for path in Route),
        )
        for kind, row in ACTIONS.items()
    ]
    return pipe_table(("kind", "what it is", *(path.value for path in Route)), rows)


def inputs() -> str:
    return pipe_table(("input", "what moves it"), [(f"`{name}`", meaning) for name, meaning in INPUTS.items()])


def error_classes() -> str:
    rows = []
    for name in errors.__all__:
        kind = getattr(errors, name)
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        rows.append((f"`{name}`", bases, _summary(kind)))
    return pipe_table(("class", "is a", "when"), rows)


def error_reference() -> str:
    """A section for each class: what it means, when it is raised, what it carries, and a message raised just now."""
    return "\n".join(_error_section(name) for name in sorted(errors.__all__) if name != "SpecFSMError")


def _error_section(name: str) -> str:
    kind = getattr(errors, name)
    meaning, *more = _paragraphs(kind)
    raised = [each for each in more if not each.startswith("Attributes:")]
    bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
    rows = [(f"`{attribute}`", meant) for attribute, meant in _attributes(kind)]
    shown = example(name)
    source = f"[{shown.name}]({shown.link}). " if shown.link else ""
    parts = (
        f"## `{name}`",
        f"{meaning} Base: {bases}.",
        *raised,
        pipe_table(("attribute", "what it is"), rows).strip() if rows else "",
        f"For example: {source}{shown.situation}",
        f"```text\n{shown.message}\n```",
    )
    return "\n\n".join(filter(None, parts)) + "\n"


def _attributes(kind: type) -> Iterator[tuple[str, str]]:
    """What the docstring's last section says of each attribute (or of several, with a comma between them)."""
    section = next((each for each in _sections(kind) if each.startswith("Attributes:")), "")
    for line in re.sub(r"\n {4,}", " ", dedent(section.partition("\n")[2])).splitlines():
        names, _, meaning = line.partition(": ")
        yield names.replace(", ", "`, `"), meaning


def _sections(documented: type) -> list[str]:
    return cleandoc(documented.__doc__ or "").split("\n\n")


def _paragraphs(documented: type) -> list[str]:
    """The paragraphs of a docstring, each on one line."""
    return [" ".join(each.split()) for each in _sections(documented)]


def cases() -> str:
    """Every public case by rule: what happened, and what its faulty order of actions is refused with."""
    rows = [
        (
            each.rule,
            f"[{each.name}]({each.link})",
            each.situation,
            ", ".join(f"`{name}`" for name in each.refused) or "nothing: rightly left out",
        )
        for each in reports()
    ]
    return pipe_table(("rule", "report", "what happened", "refused with"), rows)


def _summary(documented: type) -> str:
    """The first paragraph of a docstring, on one line."""
    return _paragraphs(documented)[0]


REGIONS: dict[str, Callable[[], str]] = {
    **{f"diagram {name}": partial(diagram, name) for name in TABLES},
    **{f"table {name}": partial(markdown, table) for name, table in TABLES.items()},
    "matrices": matrices,
    "kinds": kinds,
    "inputs": inputs,
    "errors": error_classes,
    "error reference": error_reference,
    "cases": cases,
}
"""Name of a region → what writes it."""


def generated(text: str) -> str:
    """`text` with every region written anew.

    Raises:
        ValueError: a region has an unknown name, or no end.
    """
    if len(OPENING.findall(text)) != len(REGION.findall(text)):
        raise ValueError("a generated region has no <!-- end -->")
    return REGION.sub(lambda found: f"{found[1]}{_region(found['name'])}{found[3]}", text)


def _region(name: str) -> str:
    if name not in REGIONS:
        raise ValueError(f"unknown region {name!r}: it is one of {', '.join(REGIONS)}")
    return REGIONS[name]()


def outdated() -> Iterator[tuple[Path, str]]:
    """Every document that is not what it would be, with what it would be."""
    for document in DOCUMENTS:
        text = document.read_text()
        wanted = generated(text)
        if wanted != text:
            yield document, wanted


def main(argv: Sequence[str] | None = None) -> int:
    """Write what is out of date, or with ``--check`` list it and return 1."""
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a document is out of date")
    check = parser.parse_args(argv).check
    late = list(outdated())
    for document, wanted in late:
        print(f"{document.relative_to(ROOT)}: {'out of date; run ' + COMMAND if check else 'written'}")
        if not check:
            document.write_text(wanted)
    return 1 if check and late else 0


if __name__ == "__main__":
    sys.exit(main())
