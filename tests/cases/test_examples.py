"""One real error of each class, and an account of what each carries."""

from __future__ import annotations

import re

import attrs
import pytest

from specfsm import errors
from tests.cases.case import Case
from tests.cases.examples import EXAMPLES, example

KINDS = [name for name in errors.__all__ if name != "SpecFSMError"]


def test_every_class_has_an_example() -> None:
    missing = [name for name in KINDS if name not in EXAMPLES]
    assert not missing, (
        f"no scenario raises {missing}: name one in EXAMPLES of tests/cases/examples.py, then `make docs`"
    )
    assert {*EXAMPLES} == {*KINDS}


@pytest.mark.parametrize("name", KINDS)
def test_the_example_is_of_exactly_this_class(name: str) -> None:
    """Raised by a scenario, and what it says is all that is needed to go on."""
    shown = example(name)
    assert type(shown.error) is getattr(errors, name)
    assert shown.situation
    assert "to mend: " in shown.message or isinstance(shown.error, errors.InvalidTable | errors.IncompleteBackend)
    assert not re.search(r"0x[0-9a-f]{6,}|/home/|object at", shown.message), "the page must read the same everywhere"


@pytest.mark.parametrize("name", KINDS)
def test_every_fact_is_accounted_for(name: str) -> None:
    """Each attribute that the class adds stands in its docstring, and is there."""
    kind = getattr(errors, name)
    meaning, *sections = (kind.__doc__ or "").split("\n\n")
    assert len(meaning.split()) > 5
    inherited = {each for base in kind.__mro__[1:] if attrs.has(base) for each in attrs.fields_dict(base)}
    added = {*attrs.fields_dict(kind)} - inherited if attrs.has(kind) else set()
    facts = re.findall(r"^ {8}(\w[\w, ]*): ", "".join(sections[-1:]), re.MULTILINE)
    accounted = re.findall(r"\w+", " ".join(facts))
    assert added <= {*accounted}, f"{name} carries {sorted(added - {*accounted})} and does not say what they are"
    assert all(hasattr(example(name).error, each) for each in accounted)


def test_an_example_that_raises_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector itself: what does not raise, or is not there, is never shown as if it were."""

    class Silent(Case):
        """Nothing happens."""

        rule, name, refused = "R1", "vLLM #0", errors.StaleResource

        def faulty(self) -> None: ...

    try:
        with pytest.raises(AssertionError, match="vLLM #0: the faulty order was not refused"):
            Silent().error()
    finally:
        from tests.cases.case import CASES

        CASES.remove(Silent)
    with pytest.raises(KeyError, match="no scenario raises Unheard: name one in EXAMPLES"):
        example("Unheard")
