"""``specfsm decode``: a real model decodes speculatively under the state machine, and shows what the machine did."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, define, field

from specfsm.backends import BACKENDS
from specfsm.domain import Domain, RowOrder
from specfsm.errors import IllegalTransition

if TYPE_CHECKING:
    from rich.console import Console

    from specfsm.decode.loop import DecodeLoop, Emission

__all__ = ["REFUSED", "DecodeError", "add_arguments", "decode"]

DIFFERS, REFUSED = 1, 3
"""Exit codes: speculation changed the text; the machine refused a transition."""

DEFAULT_PROMPT = "Why is the sky blue?"

EXAMPLES = """\
  specfsm decode                                   the default prompt and model
  specfsm decode "Name three rivers." --verify     compare with the target alone, token by token
  specfsm decode --backend flash_mla --draft early-exit:8
  specfsm decode --break kv_cache_block_offsets    drop that refresh: refused, exit code 3
  specfsm decode --break kv_cache_block_offsets --unchecked
                                                   carry on regardless, and see what it does
  specfsm decode --trace trace.json                open it at ui.perfetto.dev"""


class DecodeError(ValueError):
    """What was asked cannot be decoded. The message is one line that says what can."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything that ``specfsm decode`` takes."""
    add = parser.add_argument
    add("prompts", metavar="PROMPT", nargs="*", help=f"what to answer; several run as one batch ({DEFAULT_PROMPT!r})")
    model = parser.add_argument_group("models")
    model.add_argument(
        "--target", metavar="PATH", help="a transformers model's folder (default: SmolLM2-135M-Instruct)"
    )
    model.add_argument(
        "--draft",
        metavar="DRAFT",
        help="mtp[:FILE] (a trained head; the shipped one without FILE), self (same weights, own cache), early-exit:K"
        " (first K layers), or the folder of a model with the same tokenizer (default: mtp for SmolLM2-135M-Instruct,"
        " self for any other target)",
    )
    model.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    run = parser.add_argument_group("decoding")
    run.add_argument(
        "--backend",
        default="trtllm",
        metavar="NAME",
        help=f"attention backend: {', '.join(BACKENDS)} (%(default)s)",
    )
    run.add_argument("--draft-len", type=int, default=3, metavar="L", help="draft tokens a step (%(default)s)")
    run.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="longest answer (%(default)s)")
    run.add_argument(
        "--rows", choices=[order.value for order in RowOrder], default="batch", help="row order of the KV managers"
    )
    run.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy; else sample (%(default)s)"
    )
    run.add_argument("--seed", type=int, default=0, help="of the sampling (%(default)s)")
    run.add_argument(
        "--graphs",
        choices=("off", "whole", "draft"),
        default="off",
        help="capture and replay: target, acceptance and draft in one graph, or the draft phase alone (%(default)s)",
    )
    run.add_argument(
        "--unified",
        metavar="REASON",
        help="keep the draft's KV in the target's cache, in layers behind the target's, and say why",
    )
    run.add_argument("--overlap", action="store_true", help="prepare step n + 1 while step n runs")
    run.add_argument(
        "--kernels",
        choices=("torch", "flash_mla"),
        default="torch",
        help="attention kernels; flash_mla needs a Hopper GPU",
    )
    run.add_argument("--device", default="cpu", help="where to run (%(default)s)")
    run.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="of weights and caches (%(default)s)"
    )
    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--verify", action="store_true", help="decode with the target alone too; exit code 1 if a token differs"
    )
    machine.add_argument(
        "--break",
        dest="broken",
        metavar="RESOURCE",
        help="drop that resource's refresh in the draft's cache (target:RESOURCE for the target's); exit code 3",
    )
    machine.add_argument(
        "--unchecked", action="store_true", help="with --break: verify nothing, go on with the stale resource"
    )
    machine.add_argument(
        "--check", choices=("stamps", "tensors", "contents"), default="stamps", help="what is verified (%(default)s)"
    )
    machine.add_argument("--poison", action="store_true", help="fill whatever is stale with what no kernel can use")
    out = parser.add_argument_group("output")
    out.add_argument(
        "--trace", metavar="FILE", type=Path, help="write every phase and refresh as JSON that Perfetto opens"
    )
    out.add_argument("--json", action="store_true", help="print one JSON object instead of text")


@define
class Run:
    """What one decoding of all prompts gave.

    Args:
        outputs: tokens of each request, in order of submission.
        accepted: of each request, which of its tokens were drafted.
    """

    outputs: list[list[int]]
    drafted: list[list[bool]]
    forwards: int
    steps: int
    proposed: int
    accepted: int
    seconds: float
    phases: list[dict[str, Any]] = field(factory=list)
    replays: int = 0
    crash: str = ""

    @property
    def how(self) -> str:
        """How many of the forwards were graph replays, if any was."""
        eager = self.forwards - self.replays
        return f" ({self.replays} replayed from graphs, {eager} eager)" if self.replays else ""

    @property
    def tokens(self) -> int:
        return sum(len(output) for output in self.outputs)

    @property
    def rate(self) -> float:
        return self.accepted / self.proposed if self.proposed else 0.0


def decode(arguments: argparse.Namespace) -> int:
    """Run ``specfsm decode`` and return its exit code.

    Raises:
        DecodeError: a mistake in its use, in one line.
    """
    from rich.console import Console

    if arguments.verify and arguments.temperature:
        raise DecodeError("--verify compares greedy decoding token by token; leave --temperature at 0")
    if arguments.unchecked and not arguments.broken:
        raise DecodeError("--unchecked goes with --break: there is nothing to leave unchecked")
    console = Console(stderr=arguments.json, highlight=False)
    session = Session(arguments)
    try:
        return _decode(session, console, arguments)
    finally:
        session.save_trace()


def _decode(session: Session, console: Console, arguments: argparse.Namespace) -> int:
    drop = [session.broken] if arguments.broken else []
    if arguments.unchecked:
        return _compare(session, console, drop)
    try:
        run = session.run(drop, console if len(session.prompts) == 1 and not arguments.json else None)
    except IllegalTransition as error:
        if arguments.json:
            print(json.dumps({"refused": type(error).__name__, "message": str(error)}))
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        return REFUSED
    alone = session.run([], None, alone=True) if arguments.verify else None
    _report(session, console, run, alone)
    return DIFFERS if alone is not None and alone.outputs != run.outputs else 0


class Session:
    """Models, prompts and options of one command."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch

        from specfsm.decode.attention import FLAVOURS
        from specfsm.decode.model import Model, default_draft, make_draft
        from specfsm.decode.weights import load_target

        self.arguments = arguments
        if arguments.backend not in FLAVOURS:
            raise DecodeError(f"unknown backend {arguments.backend!r}: it is one of {', '.join(FLAVOURS)}")
        if arguments.draft_len < 1:
            raise DecodeError(f"--draft-len must be at least 1, not {arguments.draft_len}")
        self.broken = self._broken()
        self._require_trace_file()
        dtype = getattr(torch, arguments.dtype)
        place = {"dtype": dtype, "device": arguments.device}
        try:
            torch.empty(1, device=arguments.device)
        except (RuntimeError, AssertionError) as error:  # torch's own, for a device that is not there
            raise DecodeError(f"cannot run on {arguments.device!r}: {str(error).splitlines()[0]}") from error
        try:
            lm, self.tokenizer = load_target(arguments.target, **place)
            self.target = Model(lm)
            self.prompts = [self._encode(prompt) for prompt in arguments.prompts or [DEFAULT_PROMPT]]
            spec = arguments.draft or default_draft(self.target)
            self.draft = make_draft(spec, self.target, lambda path: load_target(path, **place)[0], **place)
        except (ValueError, OSError) as error:
            raise DecodeError(str(error).splitlines()[0]) from error
        self.last: DecodeLoop | None = None

    def _broken(self) -> tuple[str, Domain]:
        from specfsm.decode.attention import FLAVOURS

        if not self.arguments.broken:
            return "", Domain.DRAFT
        domain, _, name = self.arguments.broken.rpartition(":")
        if domain not in ("", "target", "draft"):
            raise DecodeError(
                f"--break takes RESOURCE, draft:RESOURCE or target:RESOURCE, not {self.arguments.broken!r}"
            )
        try:
            declared = FLAVOURS[self.arguments.backend].backend().resource(name)
        except KeyError as error:
            raise DecodeError(str(error.args[0])) from error
        default = Domain.DRAFT if Domain.DRAFT in declared.domains else Domain.TARGET
        return name, Domain[domain.upper()] if domain else default

    def _require_trace_file(self) -> None:
        """Before anything is decoded."""
        file: Path | None = self.arguments.trace
        try:
            if file is not None:
                file.open("a").close()
        except OSError as error:
            raise DecodeError(f"cannot write {file}: {error.strerror}") from error

    def save_trace(self) -> None:
        """Write what the last speculative run did, be it that it was refused."""
        if self.arguments.trace is not None and self.last is not None:
            self.last.fsm.trace.save(self.arguments.trace)

    def _encode(self, prompt: str) -> list[int]:
        if not prompt.strip():
            raise DecodeError("the prompt is empty: there is nothing to continue")
        if self.arguments.raw or self.tokenizer.chat_template is None:
            ids: list[int] = self.tokenizer(prompt)["input_ids"]
            return ids
        turns = [{"role": "user", "content": prompt}]
        encoded = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def run(self, drop: Sequence[Any], live: Console | None, *, alone: bool = False, check: str | None = None) -> Run:
        """Decode all prompts; with `alone`, by the target only."""
        loop = self._loop(drop, alone, check)
        self.last = loop if not alone else self.last
        try:
            ids = [loop.submit(prompt, self.arguments.max_new_tokens) for prompt in self.prompts]
        except ValueError as error:
            raise DecodeError(str(error)) from error
        emissions: list[Emission] = []
        writer = _Writer(live, self.tokenizer) if live is not None else None
        started = time.perf_counter()
        crash = ""

        def note(emission: Emission) -> None:
            emissions.append(emission)
            if writer is not None:
                writer.write(emission)

        try:
            loop.run(note)
        except Exception as error:  # whatever a stale resource brings down when nobody checks
            if check != "off" or isinstance(error, IllegalTransition):
                raise
            crash = f"{type(error).__name__}: {error}".splitlines()[0]
        run = _collect(ids, emissions, loop, time.perf_counter() - started)
        run.crash = crash
        return run

    def _loop(self, drop: Sequence[Any], alone: bool, check: str | None) -> DecodeLoop:
        from specfsm.decode.loop import DecodeLoop, Settings
        from specfsm.decode.verify import Sampler
        from specfsm.trace import Trace

        arguments = self.arguments
        longest = max(map(len, self.prompts)) + arguments.max_new_tokens
        limit = self.target.config.max_position_embeddings
        if longest > limit:
            given = longest - arguments.max_new_tokens
            raise DecodeError(
                f"{given} prompt tokens and {arguments.max_new_tokens} new ones are more than the model's {limit}"
            )
        settings = Settings(
            backend=arguments.backend,
            draft_len=arguments.draft_len,
            max_requests=len(self.prompts),
            max_tokens=longest,
            row_order=RowOrder(arguments.rows),
            dtype=arguments.dtype,
            device=arguments.device,
            graphs=arguments.graphs,
            overlap=arguments.overlap,
            unified=arguments.unified,
            kernels=arguments.kernels,
        )
        try:
            return DecodeLoop(
                self.target,
                None if alone else self.draft,
                settings,
                stop=self._stop(),
                sampler=Sampler(arguments.temperature, arguments.seed),
                check=check or arguments.check,
                poison=arguments.poison,
                drop=drop,
                trace=Trace(capacity=None),
            )
        except ValueError as error:
            raise DecodeError(str(error)) from error

    def _stop(self) -> list[int]:
        configured = self.target.lm.generation_config.eos_token_id
        listed = configured if isinstance(configured, list) else [configured]
        return [token for token in (*listed, self.tokenizer.eos_token_id) if token is not None]

    def text(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


def _collect(ids: Sequence[int], emissions: Sequence[Emission], loop: DecodeLoop, seconds: float) -> Run:
    outputs: dict[int, list[int]] = {request: [] for request in ids}
    drafted: dict[int, list[bool]] = {request: [] for request in ids}
    for emission in emissions:
        outputs[emission.request] += emission.tokens
        drafted[emission.request] += [place < emission.accepted for place in range(len(emission.tokens))]
    return Run(
        list(outputs.values()),
        list(drafted.values()),
        loop.forwards,
        sum(emission.proposed > 0 for emission in emissions),
        sum(emission.proposed for emission in emissions),
        sum(emission.accepted for emission in emissions),
        seconds,
        [asdict(summary) for summary in loop.fsm.trace.summary()],
        loop.replays,
    )


class _Writer:
    """Streams one request's text; what the draft proposed and the target accepted is green."""

    def __init__(self, console: Console, tokenizer: Any) -> None:
        self.console, self.tokenizer = console, tokenizer
        self.tokens: list[int] = []
        self.shown = ""

    def write(self, emission: Emission) -> None:
        for place, token in enumerate(emission.tokens):
            self.tokens.append(token)
            text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
            if text.endswith("\ufffd"):  # a character whose other bytes are still to come
                continue
            style = "green" if place < emission.accepted else ""
            self.console.print(text[len(self.shown) :], style=style, end="", markup=False, soft_wrap=True)
            self.shown = text
        if emission.finished:
            self.console.print()


def _report(session: Session, console: Console, run: Run, alone: Run | None) -> None:
    same = alone is None or alone.outputs == run.outputs
    if session.arguments.json:
        facts = asdict(run) | {"texts": [session.text(output) for output in run.outputs], "tokens": run.tokens}
        facts |= {} if alone is None else {"verified": same, "alone_seconds": alone.seconds}
        print(json.dumps(facts, indent=2))
        return
    if len(run.outputs) > 1:
        for output in run.outputs:
            console.print(session.text(output), markup=False, soft_wrap=True)
            console.rule(style="dim")
    console.print()
    console.print(_summary(run), markup=False)
    console.print(_phases(run))
    if alone is not None:
        _verdict(session, console, run, alone)


def _summary(run: Run) -> str:
    mean = run.tokens / run.forwards if run.forwards else 0.0
    pace = run.tokens / run.seconds
    return (
        f"{run.tokens} tokens in {run.forwards} target forwards: {mean:.2f} a forward, {pace:.1f} a second{run.how}\n"
        f"{run.accepted} of {run.proposed} drafted tokens accepted ({run.rate:.0%}), shown in green"
    )


def _phases(run: Run) -> Any:
    from rich.table import Table

    table = Table(
        "event", "count", "total", "mean", "refreshes run", "proven unnecessary", title="what the machine did"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for phase in run.phases:
        total = phase["total_ns"] / 1e6
        mean = phase["total_ns"] / phase["count"] / 1e3
        cells = (
            str(phase["count"]),
            f"{total:.2f} ms",
            f"{mean:.0f} µs",
            str(phase["refreshed"]),
            str(phase["proven"]),
        )
        table.add_row(phase["event"], *cells)
    return table


def _verdict(session: Session, console: Console, run: Run, alone: Run) -> None:
    if alone.outputs == run.outputs:
        console.print(
            f"verified: the target alone writes the same {alone.tokens} tokens, in {alone.forwards} forwards"
            f" ({alone.tokens / alone.seconds:.1f} a second)",
            style="bold green",
        )
        return
    for number, (ours, theirs) in enumerate(zip(run.outputs, alone.outputs, strict=True)):
        pairs = enumerate(zip(ours, theirs, strict=False))
        place = next((index for index, pair in pairs if pair[0] != pair[1]), min(len(ours), len(theirs)))
        if ours != theirs:
            console.print(
                f"DIFFERENT: prompt {number}, token {place}: speculative {session.text(ours[place : place + 1])!r},"
                f" target alone {session.text(theirs[place : place + 1])!r}",
                style="bold red",
                markup=False,
            )


def _compare(session: Session, console: Console, drop: Sequence[Any]) -> int:
    """What a stale resource does when nobody checks: healthy and broken, side by side."""
    healthy = session.run([], None)
    broken = session.run(drop, None, check="off")
    name, domain = session.broken
    if session.arguments.json:
        print(json.dumps({"healthy": asdict(healthy), "broken": asdict(broken)}, indent=2))
        return 0
    warning = f"unchecked: {name} [{domain}] was never refreshed, and nothing said so"
    console.print(warning, style="bold yellow", markup=False)
    for title, run in (("healthy", healthy), ("broken", broken)):
        console.rule(title, align="left")
        for output in run.outputs:
            console.print(session.text(output), markup=False, soft_wrap=True)
        console.print(_summary(run), style="dim", markup=False)
        if run.crash:
            console.print(f"then it crashed: {run.crash}", style="bold red", markup=False)
    same = healthy.outputs == broken.outputs
    change = "the text is the same" if same else "the text CHANGED"
    console.rule()
    console.print(
        f"{change}; accepted: {healthy.rate:.0%} → {broken.rate:.0%}. Without --unchecked this run is refused."
    )
    return 0
