"""The list of public cases: each has one scenario with the address of its report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specfsm import errors
from tests.cases.case import CASES, Case, every_case

LIST = {
    "R1": ("TensorRT-LLM #15251", "TensorRT-LLM #18343", "vLLM #39775"),
    "R2": ("TensorRT-LLM #16925", "vllm-ascend #8230", "TensorRT-LLM #12161", "vLLM #40410", "vLLM #46849"),
    "R3": ("TensorRT-LLM #18769", "SGLang #35275", "SGLang #37975", "vLLM #48261"),
    "R4": ("TensorRT-LLM #16290", "transformers #45323", "nano-vllm #190"),
    "R6": ("TensorRT-LLM #13124", "SGLang #28028"),
    "R7": ("TensorRT-LLM #15546", "mini-sglang #103", "SGLang #31072"),
    "R8": ("TensorRT-LLM #17710", "vLLM #27837"),
    "R9": ("TensorRT-LLM #16382", "TensorRT-LLM #17381"),
    "R10": ("vLLM #45357", "SGLang #23456"),
    "R11": ("SGLang #19897", "SGLang #32176", "vLLM #35158"),
    "R12": ("vLLM #16370", "TensorRT-LLM #18660"),
}
"""Rule → its public cases. vLLM #40410 and #46849 left a refresh out and were right to."""

LINK = re.compile(r"https://github\.com/[\w-]+/[\w-]+/issues/\d+")


def test_every_public_case_has_one_scenario() -> None:
    every_case()
    listed = sorted((rule, name) for rule, names in LIST.items() for name in names)
    told = sorted((case.rule, case.name) for case in CASES)
    assert told == listed, "a case stands here and in a module of tests/cases, once in each"


@pytest.mark.parametrize("case", every_case().values(), ids=every_case())
def test_a_scenario_is_whole(case: type[Case]) -> None:
    """A link, one to four sentences, both orders of actions, and facts to be held to; one without an error has none."""
    assert LINK.fullmatch(case.link())
    assert case.name.partition(" #")[2] == case.link().rpartition("/")[2]
    assert 1 <= len(re.findall(r"[.!?](?= |$)", case.situation())) <= 4
    own = vars(case).keys()
    assert "corrected" in own
    assert (case.refused is not None) == ("faulty" in own) == bool(case.facts) == bool(case.words)


def test_only_public_names_are_used() -> None:
    """No private attribute of anything, and nothing of the package's that begins with an underscore."""
    for file in Path(__file__).parent.glob("*.py"):
        private = re.findall(r"\.(_(?!_)\w+)", file.read_text())
        assert not private, f"{file.name} uses {private}"


def test_every_class_of_error_that_a_contract_raises_has_a_case() -> None:
    """So that no rule is held by an error that no public case shows."""
    without = {"IllegalTransition", "NestedEvent", "RankSilent", "TargetMutated", "WrongThread"}
    refused = {case.refused.__name__ for case in CASES if case.refused is not None}
    run_time = {
        name for name in errors.__all__ if issubclass(getattr(errors, name), errors.IllegalTransition)
    } - without
    assert run_time <= refused | {"ContentsViolated", "PaddingViolated"}
