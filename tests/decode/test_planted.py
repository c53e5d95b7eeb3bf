"""Every planted fault is refused or found, in every place; the document says which, and is true."""

from __future__ import annotations

from functools import cache

import pytest

from specfsm.verify import Check
from tests.decode.planted import BEGIN, DOCUMENT, END, FAULTS, PLACES, Fault, document, outcome

PLANTED = [(fault, place) for fault in FAULTS for place in fault.places]
IDS = [f"{fault.name}, {place}" for fault, place in PLANTED]


@cache
def rows() -> dict[str, dict[str, str]]:
    """Fault → place → outcome, as the document has it."""
    text = DOCUMENT.read_text().split(BEGIN)[1].split(END)[0]
    head, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line]
    return {line[1]: dict(zip(head, line, strict=True)) for line in lines}


@pytest.mark.parametrize(("fault", "place"), PLANTED, ids=IDS)
def test_planted_fault_is_not_silent(fault: Fault, place: str) -> None:
    """It is refused, or found and mended, by the class that the document names."""
    seen = outcome(fault, place, fault.level)
    assert seen.startswith(("refused (", "found ("))
    assert seen == rows()[fault.name][place]


@pytest.mark.parametrize("backend", ["flash_mla", "dsa", "deepseek_v4"])
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.kind == "drop"], ids=lambda fault: fault.name)
def test_dropped_refresh_in_the_middle_of_things(fault: Fault, backend: str) -> None:
    """Over the other backends. (Not in a replay: DSA's graph refreshes this table itself.)"""
    assert outcome(fault, "overlap", fault.level, backend) == "refused (StaleResource)"


@pytest.mark.parametrize("fault", [each for each in FAULTS if each.level > Check.STAMPS], ids=lambda each: each.name)
def test_level_below_does_not_find_it(fault: Fault) -> None:
    """The level that the document names is the first that finds it."""
    assert outcome(fault, "eager", Check(fault.level - 1)).startswith("silent: ")


@pytest.mark.parametrize("fault", [each for each in FAULTS if each.level is Check.CONTENTS], ids=lambda each: each.name)
def test_what_only_contents_finds_does_harm(fault: Fault) -> None:
    assert outcome(fault, "eager", Check.TENSORS) == "silent: other tokens"


@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_found_where_nothing_is_wrong(place: str) -> None:
    nothing = Fault(name="nothing", kind="none")
    assert outcome(nothing, place, Check.CONTENTS) == "silent: nothing happened"


def test_document_lists_what_is_planted() -> None:
    assert {name: row["level"] for name, row in rows().items()} == {
        fault.name: fault.level.name.lower() for fault in FAULTS
    }
    assert {place for row in rows().values() for place in row if place in PLACES} == {*PLACES}


def test_table_is_put_between_its_markers() -> None:
    assert document(f"before\n{BEGIN}old\n{END}after\n", "new\n") == f"before\n{BEGIN}\nnew\n\n{END}after\n"
