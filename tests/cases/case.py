"""What a scenario is: a situation that was reported in public, its faulty order of actions, and the right one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from attrs import frozen

from specfsm import Domain, Orchestrator, SpecFSMError
from specfsm.domain import INPUTS
from specfsm.states.resource import Freshness

__all__ = ["CASES", "LIST", "Case", "Told", "every_case", "report", "reports"]

LIST = {
    "R1": ("TensorRT-LLM #15251", "TensorRT-LLM #18343", "vLLM #39775"),
    "R2": ("TensorRT-LLM #16925", "vllm-ascend #8230", "TensorRT-LLM #12161", "vLLM #40410", "vLLM #46849"),
    "R3": ("TensorRT-LLM #18769", "SGLang #35275", "SGLang #37975", "vLLM #48261"),
    "R4": ("TensorRT-LLM #16290", "transformers #45323", "nano-vllm #190"),
    "R5": ("SGLang #26292", "SGLang #26880", "vllm-ascend #15417", "vLLM #56734"),
    "R6": ("TensorRT-LLM #13124", "SGLang #28028"),
    "R7": ("TensorRT-LLM #15546", "mini-sglang #103", "SGLang #31072"),
    "R8": ("TensorRT-LLM #17710", "vLLM #27837"),
    "R9": ("TensorRT-LLM #16382", "TensorRT-LLM #17381"),
    "R10": ("vLLM #45357", "SGLang #23456"),
    "R11": ("SGLang #19897", "SGLang #32176", "vLLM #35158"),
    "R12": ("vLLM #16370", "TensorRT-LLM #18660"),
}
"""Rule → its public cases. vLLM #40410 and #46849 left a refresh out and were right to."""

HOSTS = {
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
    "vLLM": "vllm-project/vllm",
    "vllm-ascend": "vllm-project/vllm-ascend",
    "SGLang": "sgl-project/sglang",
    "mini-sglang": "sgl-project/mini-sglang",
    "transformers": "huggingface/transformers",
    "nano-vllm": "GeeeekExplorer/nano-vllm",
}
"""Project → its repository."""


def report(name: str) -> str:
    """The address of "PROJECT #NUMBER". Issues and pull requests are numbered together, and found under either."""
    project, _, number = name.partition(" #")
    return f"https://github.com/{HOSTS[project]}/issues/{number}"


class Case:
    """One public case. The docstring tells the situation; the class is its facts.

    Attributes:
        rule: which of R1 to R12 was broken.
        name: "PROJECT #NUMBER" of the report.
        refused: the class of the error; None for a refresh that was rightly left out, which has no faulty order.
        facts: what the error carries.
        words: what its message says.
    """

    rule: ClassVar[str]
    name: ClassVar[str]
    refused: ClassVar[type[SpecFSMError] | None]
    facts: ClassVar[dict[str, Any]] = {}
    words: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.watched = 0

    def __init_subclass__(cls) -> None:
        CASES.append(cls)

    @classmethod
    def link(cls) -> str:
        return report(cls.name)

    @classmethod
    def situation(cls) -> str:
        """The docstring, on one line."""
        return " ".join((cls.__doc__ or "").split())

    def faulty(self) -> None:
        """The order of actions that was reported. What is refused stands in `refusing`."""
        raise NotImplementedError

    def corrected(self) -> None:
        """The order that is right: nothing is refused."""
        raise NotImplementedError

    def error(self) -> SpecFSMError:
        """What the faulty order is refused with."""
        try:
            self.faulty()
        except SpecFSMError as error:
            return error
        raise AssertionError(f"{self.name}: the faulty order was not refused")

    @contextmanager
    def refusing(self, *machines: Orchestrator) -> Iterator[None]:
        """Around the event that is refused: whatever these orchestrators show is the same before and after it."""
        before = [Picture(fsm) for fsm in machines]
        try:
            yield
        except SpecFSMError:
            for was, fsm in zip(before, machines, strict=True):
                assert not (moved := was.differences(Picture(fsm))), f"{self.name}: the refusal changed {moved}"
            self.watched += 1
            raise


CASES: list[type[Case]] = []
"""Every scenario whose module was imported."""


BUFFERS = ("Table", "Staged", "Shared")
"""The kinds that own memory. (What a pointer leads to is the manager's, who orders its rows as he likes.)"""


class Picture:
    """What an orchestrator shows: state, stamps, batches, what its metadata carries, and what is fresh in it."""

    def __init__(self, fsm: Orchestrator) -> None:
        self.lines = {f"{line.resource} [{line.domain}]": line for line in fsm.explain().lines}
        self.objects: dict[str, Any] = {"state": fsm.state, "the domain that is served": fsm.domain}
        self.objects |= {f"batch [{domain}]": fsm.batch(domain) for domain in Domain}
        self.objects |= {f"metadata.{name}": value for name, value in vars(fsm.metadata).items()}
        self.contents = {
            name: fsm.value(line.resource, line.domain).clone()
            for name, line in self.lines.items()
            if line.state is Freshness.FRESH and line.kind in BUFFERS
        }

    def differences(self, now: Picture) -> list[str]:
        """What is not as it was. A buffer that was rewritten on the way holds what the refused event would have read:
        it may be stale, and nothing else."""
        changed = [
            name for name in {*self.objects, *now.objects} if self.objects.get(name) is not now.objects.get(name)
        ]
        for name, line in self.lines.items():
            found = now.lines[name]
            rewritten = found.state is Freshness.STALE and not {*found.moved} & {*INPUTS}
            if found.stamp != line.stamp or not (found.state is line.state or rewritten):
                changed.append(f"the stamp of {name}")
        kept = self.contents.keys() & now.contents.keys()
        return changed + [
            f"contents of {name}" for name in kept if not torch.equal(self.contents[name], now.contents[name])
        ]


def every_case() -> dict[str, type[Case]]:
    """Name → scenario, in the order of the rules."""
    here = Path(__file__).parent
    for file in sorted(here.glob("*.py")):
        if not file.stem.startswith(("test_", "__")):
            import_module(f"{__package__}.{file.stem}")
    ordered = sorted(CASES, key=lambda case: (int(case.rule[1:]), case.__module__))
    return {case.name: case for case in ordered}


@frozen
class Told:
    """What a table says of a case.

    Args:
        refused: names of the classes; none for a refresh that was rightly left out.
    """

    rule: str
    name: str
    link: str
    situation: str
    refused: tuple[str, ...]


def reports() -> list[Told]:
    """Every case that is told, by rule: the scenarios, and each test here whose docstring begins with a report's
    address."""
    told = [*map(_of_scenario, every_case().values()), *_of_tests()]
    order = [name for names in LIST.values() for name in names]
    return sorted(told, key=lambda each: order.index(each.name))


def _of_scenario(case: type[Case]) -> Told:
    refused = (case.refused.__name__,) if case.refused else ()
    return Told(case.rule, case.name, case.link(), case.situation(), refused)


def _of_tests() -> Iterator[Told]:
    """Read and not imported: a document is written without pytest."""
    rules = {name: rule for rule, names in LIST.items() for name in names}
    projects = {repository: project for project, repository in HOSTS.items()}
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.parse(file.read_text()).body:
            text = (ast.get_docstring(node) or "") if isinstance(node, ast.FunctionDef) else ""
            found = re.match(r"(https://github\.com/([\w-]+/[\w-]+)/(?:issues|pull)/(\d+))\n+(.*)", text, re.DOTALL)
            if found:
                link, repository, number, situation = found.groups()
                name = f"{projects[repository]} #{number}"
                refused = re.findall(r"raises\((\w+)\)", ast.unparse(node))
                yield Told(rules[name], name, link, " ".join(situation.split()), tuple(dict.fromkeys(refused)))
