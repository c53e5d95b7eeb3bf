"""One class for each mistake: what it carries, what it says, and the builtin it also is."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from specfsm import errors
from specfsm.contracts.consensus import Vote
from specfsm.contracts.lifetime import Life
from specfsm.domain import Domain
from specfsm.states.phase import Phase

HERE = (Phase.TARGET_PREPARE, "draft_forward", Phase.DRAFT_FORWARD)
REFUSED = "TARGET_PREPARE --draft_forward--> DRAFT_FORWARD refused"
STALE = {"backend": "flash_mla", "resource": "block_ids_per_seq", "domain": Domain.DRAFT}

CASES: dict[str, tuple[Exception, type[Exception], list[str]]] = {
    "InvalidTable": (
        errors.InvalidTable("phase", ("IDLE has 2 rows",)),
        ValueError,
        ["the phase machine cannot be built as declared", "IDLE has 2 rows"],
    ),
    "IncompleteBackend": (
        errors.IncompleteBackend("toy", ("rows has 0 writers",)),
        TypeError,
        ["backend toy is not fully declared", "rows has 0 writers"],
    ),
    "UnknownMetadata": (
        errors.UnknownMetadata("Mine cannot be switched", ("a twin is missing",), "make one"),
        TypeError,
        ["Mine cannot be switched", "a twin is missing", "to mend: make one"],
    ),
    "IllegalTransition": (
        errors.IllegalTransition(Phase.IDLE, "restore", legal=("target_prepare",)),
        RuntimeError,
        ["IDLE --restore--> ? refused", "IDLE accepts target_prepare"],
    ),
    "NestedPhase": (
        errors.NestedPhase(Phase.DRAFT_FORWARD, "draft_forward"),
        RuntimeError,
        ["DRAFT_FORWARD --draft_forward--> ? refused", "draft_step() makes the next draft token"],
    ),
    "NestedEvent": (
        errors.NestedEvent(Phase.TARGET_PREPARE, "draft_forward"),
        RuntimeError,
        ["another event is under way", "to mend: fire it when the first has returned"],
    ),
    "WrongThread": (
        errors.WrongThread(*HERE, owner="main", caller="worker"),
        RuntimeError,
        [REFUSED, "thread 'worker' fired it, but thread 'main' drives this orchestrator"],
    ),
    "StaleResource": (
        errors.StaleResource(*HERE, **STALE, moved={"blocks": (17, 18)}, resources=("block_ids_per_seq", "plan")),
        RuntimeError,
        [
            REFUSED,
            "flash_mla.block_ids_per_seq [draft] is stale: blocks moved 17 → 18 since its last refresh",
            "stale beside it: plan",
            "publish('block_ids_per_seq', tensor, domain=DRAFT)",
        ],
    ),
    "RefreshDeclined": (
        errors.RefreshDeclined(*HERE, **STALE, moved={"blocks": (17, 18)}),
        RuntimeError,
        [
            "flash_mla.block_ids_per_seq [draft] is stale: blocks moved 17 → 18",
            "its refresh ran and returned nothing (declined)",
            "to mend: make the refresh return what it wrote",
        ],
    ),
    "TargetMutated": (
        errors.TargetMutated(Phase.DRAFT_FORWARD, "restore", Phase.RESTORE, backend="toy", resource="rows"),
        RuntimeError,
        ["toy.rows [target] was written during the draft phase", "dirty('rows', TARGET), then restore()"],
    ),
    "ContentsViolated": (
        errors.ContentsViolated(
            *HERE,
            **STALE,
            index=(1, 2),
            row=1,
            column=2,
            request=7,
            found=5,
            expected=4,
            since="target_prepare",
            moved={"lengths": (4, 5)},
        ),
        RuntimeError,
        [
            REFUSED,
            "flash_mla.block_ids_per_seq [draft] at [1, 2] (row 1, column 2, request 7) holds 5, though its stamp",
            "recomputed from its inputs it is 4",
            "found by the validation after target_prepare",
            "declared not to read lengths; lengths moved 4 → 5 since its last refresh",
            "to mend: add lengths to what block_ids_per_seq reads, if it does",
        ],
    ),
    "GraphContractBroken": (
        errors.GraphContractBroken(*HERE, key=(8, 3), broken=("rows moved", "too long")),
        RuntimeError,
        ["graph (8, 3): rows moved", "graph (8, 3): too long", "to mend: record the graph again, or run eagerly"],
    ),
    "PendingTransfer": (
        errors.PendingTransfer(Phase.IDLE, "fill", resource="rows"),
        RuntimeError,
        ["the staging buffer of rows still feeds a copy that has not landed"],
    ),
    "WindowOverflow": (
        errors.WindowOverflow(*HERE, short=((7, Domain.DRAFT, 13, 12), (9, Domain.DRAFT, 14, 12))),
        RuntimeError,
        [
            REFUSED,
            "request 7 needs room for 13 tokens in the draft's cache, but its pages hold 12",
            "request 9 needs room for 14 tokens in the draft's cache",
            "to mend: allocate its pages for the whole window first",
        ],
    ),
    "PaddingViolated": (
        errors.PaddingViolated(
            *HERE,
            domain=Domain.DRAFT,
            reached=((2, -1, 5, 7), (2, -1, 6, None), (3, -2, None, None)),
        ),
        RuntimeError,
        [
            REFUSED,
            "row 2, the dummy -1, resolves to page 5 of the draft's cache, which request 7 holds",
            "row 2, the dummy -1, resolves to page 6 of the draft's cache, which is free",
            "row 3, the dummy -2, has no page in the draft's cache for a token that it writes",
            "to mend: give each dummy pages of its own in both caches",
        ],
    ),
    "DraftContentInvalid": (
        errors.DraftContentInvalid(*HERE, short=((7, 4, 8), (9, 0, 8))),
        RuntimeError,
        [
            REFUSED,
            "request 7 has 4 valid rows in the draft's cache, but the draft would read 8",
            "request 9 has 0 valid rows",
            "to mend: begin the draft's pass at the first row that is missing",
        ],
    ),
    "RankDisagreement": (
        errors.RankDisagreement(
            *HERE,
            rank=1,
            votes={0: Vote(4, "skip", batch=8), 1: Vote(4, "draft_forward", batch=8), 2: Vote(4, "skip", batch=8)},
            fields=("event",),
        ),
        RuntimeError,
        [
            REFUSED,
            "the ranks differ in event; this is rank 1",
            "rank 0, 2: step 4: skip, batch 8, draft length 0",
            "rank 1: step 4: draft_forward, batch 8, draft length 0",
            "a rank that goes without the draft says so with skip()",
        ],
    ),
    "RankSilent": (
        errors.RankSilent(*HERE, votes={0: Vote(4, "skip")}, missing=(1, 3), timeout=0.5),
        errors.RankDisagreement,
        [REFUSED, "rank 1, 3 did not vote within 0.5 s", "rank 0: step 4: skip", "another Consensus on every rank"],
    ),
    "RetiredRequest": (
        errors.RetiredRequest(*HERE, request=7),
        RuntimeError,
        [REFUSED, "the batch names request 7, which does not live", "to mend: leave it out of the batch"],
    ),
    "RestoreFailed": (
        errors.RestoreFailed("restore", [ValueError("first"), OSError("second")]),
        ExceptionGroup,
        ["restore failed and could not be undone", "to mend: rebuild or repair the metadata, then reset()"],
    ),
}


def test_every_class_has_a_case() -> None:
    assert set(CASES) == set(errors.__all__) - {"SpecFSMError"}


@pytest.mark.parametrize("name", CASES)
def test_message_names_the_facts_and_the_remedy(name: str) -> None:
    error, builtin, lines = CASES[name]
    assert type(error) is getattr(errors, name)
    assert isinstance(error, builtin)
    assert isinstance(error, errors.SpecFSMError)
    assert [line for line in lines if line not in str(error)] == []


CAUSES = [
    ({"tampered": "written"}, "was written behind the machine's back since its last refresh", "declare it: dirty("),
    ({"misbound": True}, "still holds the other cache's value: its switch did not happen", "do not drop its action"),
    ({"never": True, "moved": {"blocks": (0, 1)}}, "was never refreshed (it is derived from blocks)", "refresh it"),
    ({}, "is stale: it was edited since its last refresh", "refresh it before this event"),
]


@pytest.mark.parametrize(("facts", "cause", "remedy"), CAUSES)
def test_each_cause_of_staleness_has_words_of_its_own(facts: dict[str, object], cause: str, remedy: str) -> None:
    error = errors.StaleResource(*HERE, **STALE, **facts)  # type: ignore[arg-type]  # facts by name
    assert f"{error.place} {cause}" in str(error)
    assert remedy in error.remedy


RETIRED = [
    (
        "claim",
        {"steps": (4,)},
        "request 7 (generation 2) was retired while step 4 computed this result",
        "drop this row",
    ),
    ("free", {"steps": (4, 5)}, "step 4, 5 in flight may write to them", "when fence() names it"),
    ("free", {"steps": (4,), "drafting": True}, "step 4 in flight may write to them and the draft phase", "retire it"),
    ("free", {}, "it is live, and fence() has not named it", "retire it"),
    ("begin", {"steps": (4,)}, "the pages of request 7 (generation 2) cannot be given away: step 4", "begin it anew"),
]


@pytest.mark.parametrize(("event", "facts", "cause", "remedy"), RETIRED)
def test_each_use_of_a_life_has_words_of_its_own(event: str, facts: dict[str, Any], cause: str, remedy: str) -> None:
    error = errors.RetiredRequest(Life.LIVE, event, request=7, generation=2, **facts)
    assert cause in str(error)
    assert remedy in str(error)


def test_padded_row_has_words_of_its_own() -> None:
    """No request stands there: what it reaches is what its sentinel names."""
    error = errors.PaddingViolated(*HERE, domain=Domain.TARGET, reached=((3, None, 0, 7),))
    assert "padded row 3 resolves to page 0 of the target's cache, which request 7 holds" in str(error)
    assert "to mend: keep page 0 from requests, pad with a sentinel that is no page, or pad with dummies" in str(error)
    assert (error.row, error.request, error.page, error.owner) == (3, None, 0, 7)


def test_state_without_exits_accepts_nothing() -> None:
    error = errors.IllegalTransition(Phase.IDLE, "restore", legal=())
    assert str(error).endswith("IDLE accepts nothing: the state has no exits")


def test_a_contract_without_a_reason_is_named_as_such() -> None:
    """The row is there, so what the state accepts is not the news."""
    text = str(errors.IllegalTransition(*HERE))
    assert "a contract refused it and gave no reason" in text
    assert "to mend: let the contract raise a subclass" in text
    assert "accepts" not in text


def test_subject_reason_and_remedy_are_told() -> None:
    error = errors.IllegalTransition(*HERE, subject="rows [draft]", why="too late", mend="be early", legal=("finish",))
    assert str(error).splitlines()[1:] == ["  rows [draft]: too late", "  to mend: be early"]


def test_failed_restore_splits_like_a_group() -> None:
    """``except*`` takes it apart and the parts still know the event."""
    group = errors.RestoreFailed("restore", [ValueError("first"), OSError("second")])
    match, rest = group.split(ValueError)
    assert isinstance(match, errors.RestoreFailed)
    assert isinstance(rest, errors.RestoreFailed)
    assert (match.event, [str(each) for each in match.exceptions]) == ("restore", ["first"])


@pytest.mark.parametrize("name", CASES)
def test_errors_are_sent_to_other_processes_with_their_facts(name: str) -> None:
    error, _, _ = CASES[name]
    for sent in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(sent) is type(error)
        assert (str(sent), repr(sent)) == (str(error), repr(error))


@pytest.mark.parametrize("name", [name for name in CASES if name != "RestoreFailed"])
def test_errors_are_told_apart_by_identity(name: str) -> None:
    """Two refusals for the same reason are two refusals."""
    error, _, _ = CASES[name]
    assert error == error
    assert hash(error) == hash(error)
    assert isinstance(repr(error), str)
