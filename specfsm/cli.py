"""The command line: ``specfsm decode``, ``diagram``, ``explain``, ``train-draft``. Each registers itself by a function.

Modules that need torch are imported by the command that uses them, so that ``--help`` and ``diagram`` answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import specfsm
from specfsm.backends import BACKENDS, named
from specfsm.errors import SpecFSMError
from specfsm.states import TABLES
from specfsm.states.diagram import FORMATS, pipe_table, render

if TYPE_CHECKING:
    from specfsm.backends.backend import Backend

__all__ = ["UsageError", "main", "matrix_markdown", "matrix_text"]

USAGE = 2
"""Exit code of a command that was asked for something it cannot do; argparse's own."""


class UsageError(SpecFSMError):
    """What was asked cannot be done. The message is one line that says what can."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A mistake in its use is one line on stderr, and code 2."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except UsageError as error:
        print(f"specfsm {arguments.command}: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # Whoever read the output has read enough. What is still buffered must not reach the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specfsm",
        description="The switch between a target's and a draft's KV cache, as a state machine.",
        epilog="specfsm COMMAND --help tells more, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"specfsm {specfsm.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for register in COMMANDS:
        register(commands)
    return parser


def _command(commands: Any, name: str, summary: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A subcommand whose help ends with examples."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary}.\n\n{description}",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


# diagram

SUFFIXES = {".mmd": "mermaid", ".md": "markdown", ".dot": "dot", ".gv": "dot", ".svg": "svg", ".png": "png"}
BINARY = ("png",)


def add_diagram(commands: Any) -> None:
    """Register ``specfsm diagram``."""
    parser = _command(
        commands,
        "diagram",
        "Draw one of the four state machines",
        "The picture comes from the table that the machine runs by, so it cannot be out of date.\n"
        "  phase     which cache the metadata serves, and how that may change\n"
        "  resource  one for each table, pointer or plan in each cache: unbound, stale or fresh\n"
        "  graph     one for each captured CUDA graph\n"
        "  transfer  one for each staging buffer between host and device",
        "  specfsm diagram phase                  Mermaid, for a Markdown file\n"
        "  specfsm diagram phase -f markdown      the same as a table, with a reason for each arc\n"
        "  specfsm diagram phase -o phase.svg     a picture; needs Graphviz and pip install 'specfsm[docs]'\n"
        "  specfsm diagram resource -f dot | dot -Tpdf > resource.pdf",
    )
    parser.add_argument("machine", choices=tuple(TABLES), help="which machine")
    parser.add_argument(
        "-f", "--format", choices=FORMATS, help="what to write; by default what FILE's suffix says, else mermaid"
    )
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write here instead of to standard output")
    parser.set_defaults(run=run_diagram)


def run_diagram(arguments: argparse.Namespace) -> int:
    """Write a machine's picture or table."""
    output: Path | None = arguments.output
    form = arguments.format or (SUFFIXES.get(output.suffix, "mermaid") if output else "mermaid")
    if output is None and form in BINARY and sys.stdout.isatty():
        raise UsageError(
            f"{form} is binary and standard output is a terminal: add -o {arguments.machine}.{form}, or redirect it"
        )
    try:
        drawn = render(TABLES[arguments.machine], form)
    except SpecFSMError as error:
        raise UsageError(str(error)) from error
    _write(drawn, output)
    return 0


def _write(drawn: bytes, output: Path | None) -> None:
    if output is None:
        sys.stdout.buffer.write(drawn)
        sys.stdout.buffer.flush()
        return
    try:
        output.write_bytes(drawn)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from error


# explain


def add_explain(commands: Any) -> None:
    """Register ``specfsm explain``."""
    parser = _command(
        commands,
        "explain",
        "Print what a backend's metadata holds and what each switch does to it",
        "One row for each resource: what it is derived from, what its entries point at, and the action that it takes\n"
        "on every path. – means that none applies. (For what is stale in a running engine: print(fsm.explain()).)\n\n"
        f"backends: {', '.join(BACKENDS)}",
        "  specfsm explain trtllm\n  specfsm explain flash_mla --format markdown",
    )
    parser.add_argument("backend", metavar="BACKEND", help="name of an attention backend")
    parser.add_argument(
        "-f",
        "--format",
        choices=("text", "markdown"),
        default="text",
        help="for a terminal (default), or for a document",
    )
    parser.set_defaults(run=run_explain)


def run_explain(arguments: argparse.Namespace) -> int:
    """Print a backend's resource × path matrix."""
    try:
        backend = named(arguments.backend)
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(matrix_text(backend) if arguments.format == "text" else matrix_markdown(backend), end="")
    return 0


def matrix_text(backend: Backend) -> str:
    """The matrix aligned for a terminal, and which event takes which path."""
    from specfsm.explain import matrix, text_table

    return f"{text_table(*matrix(backend))}\n\n{_events_of_paths()}\n"


def matrix_markdown(backend: Backend) -> str:
    """The matrix as a Markdown table; names in it are code, since they may begin with an underscore."""
    from specfsm.explain import matrix

    head, rows = matrix(backend)
    coded = [(_coded_first(name), kind, _coded(sources), *rest) for name, kind, sources, *rest in rows]
    return f"{pipe_table(head, coded)}\n{_events_of_paths()}\n"


def _coded_first(text: str) -> str:
    name, *rest = text.split(" ", 1)
    return " ".join((f"`{name}`", *rest))


def _coded(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def _events_of_paths() -> str:
    from specfsm.orchestrator import PATHS

    events: dict[str, list[str]] = {}
    for event, path in PATHS.items():
        events.setdefault(path.value, []).append(event)
    return "; ".join(f"{path}: {', '.join(names)}" for path, names in events.items())


# decode


def add_decode(commands: Any) -> None:
    """Register ``specfsm decode``."""
    from specfsm.decode import command

    parser = _command(
        commands,
        "decode",
        "Decode speculatively on a real model, and show what the machine did",
        "A target and a draft, each with a KV cache of its own, take turns on one attention-metadata object. Text\n"
        "that was drafted and accepted is green; a summary tells what was refreshed, and what need not be.\n\n"
        "exit codes: 0 done; 1 --verify found a difference; 2 wrong use; 3 the machine refused a transition",
        command.EXAMPLES,
    )
    command.add_arguments(parser)
    parser.set_defaults(run=run_decode)


def run_decode(arguments: argparse.Namespace) -> int:
    """Decode, and turn a mistake in its use into one line."""
    from specfsm.decode.command import DecodeError, decode

    try:
        return decode(arguments)
    except ImportError as error:
        raise UsageError(f"{error}: decoding needs pip install 'specfsm[decode]'") from error
    except DecodeError as error:
        raise UsageError(str(error)) from error


# train-draft


def add_train_draft(commands: Any) -> None:
    """Register ``specfsm train-draft``."""
    from specfsm.decode.training import settings

    parser = _command(
        commands,
        "train-draft",
        "Train a draft head for a target, on the target's own answers",
        "No data set is needed: the target answers prompts that are made here, and a one-layer head learns to foresee\n"
        "what it will say. Minutes on a GPU. Acceptance on held-out prompts is printed at every evaluation, and the\n"
        "best head is kept. The same seed and --steps give the same head on the same device.",
        settings.EXAMPLES,
    )
    settings.add_arguments(parser)
    parser.set_defaults(run=run_train_draft)


def run_train_draft(arguments: argparse.Namespace) -> int:
    """Train, and turn a mistake in its use into one line."""
    from specfsm.decode.training.settings import from_arguments

    try:
        from specfsm.decode.training.run import train

        train(from_arguments(arguments))
    except ImportError as error:
        raise UsageError(f"{error}: training needs pip install 'specfsm[decode]'") from error
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    return 0


COMMANDS = (add_decode, add_diagram, add_explain, add_train_draft)
"""What registers each subcommand, in the order that ``--help`` lists them."""


if __name__ == "__main__":
    sys.exit(main())
