"""The list of public cases: each has one scenario with the address of its report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specfsm import errors
from tests.cases.case import HOSTS, LIST, Case, every_case, reports

HERE = Path(__file__).parent
LINK = re.compile(r"https://github\.com/[\w-]+/[\w-]+/(issues|pull)/\d+")


@pytest.mark.parametrize("rule", LIST)
def test_every_public_case_has_one_scenario(rule: str) -> None:
    """With the address of its report; none stands in two places."""
    told = [each for each in reports() if each.rule == rule]
    assert sorted(each.name for each in told) == sorted(LIST[rule]), "each needs one scenario in tests/cases"
    for each in told:
        assert LINK.fullmatch(each.link)
        assert each.name.partition(" #")[2] == each.link.rpartition("/")[2]
        assert HOSTS[each.name.partition(" #")[0]] in each.link


@pytest.mark.parametrize("case", every_case().values(), ids=every_case())
def test_a_scenario_is_whole(case: type[Case]) -> None:
    """One to four sentences, both orders of actions, and facts to be held to; one without an error has none."""
    assert 1 <= len(re.findall(r"[.!?](?= |$)", case.situation())) <= 4
    own = vars(case).keys()
    assert "corrected" in own
    assert (case.refused is not None) == ("faulty" in own) == bool(case.facts) == bool(case.words)


def test_only_public_names_are_used() -> None:
    """No private attribute of anything, and nothing of the package's that begins with an underscore."""
    for file in HERE.glob("*.py"):
        private = re.findall(r"\.(_(?!_)\w+)", file.read_text())
        assert not private, f"{file.name} uses {private}"


def test_every_refusal_has_a_public_case() -> None:
    """No class is there that no report asked for, but these."""
    ours = {"ContentsViolated", "NestedEvent", "RankSilent", "TargetMutated", "WrongThread"}
    at_run_time = {name for name in errors.__all__ if issubclass(getattr(errors, name), errors.IllegalTransition)}
    reported = {name for each in reports() for name in each.refused}
    assert at_run_time - reported == ours
