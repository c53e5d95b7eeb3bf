"""Every public case: its faulty order is refused with the right class and facts, and its corrected order passes."""

from __future__ import annotations

import pytest

from specfsm import SpecFSMError
from tests.cases.case import Case, every_case

CASES = every_case()
REFUSED = [case for case in CASES.values() if case.refused is not None]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_the_faulty_order_is_refused(case: type[Case]) -> None:
    """With exactly this class and these facts; state, stamps and all that is fresh are as they were."""
    scenario = case()
    with pytest.raises(SpecFSMError) as caught:
        scenario.faulty()
    assert type(caught.value) is case.refused
    assert {name: getattr(caught.value, name) for name in case.facts} == case.facts
    assert [words for words in case.words if words not in str(caught.value)] == []
    assert scenario.watched == 1, "the refused event stands in `refusing`"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_corrected_order_passes(case: type[Case]) -> None:
    case().corrected()
