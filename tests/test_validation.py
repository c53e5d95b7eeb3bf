"""Level "contents": each kind of violation is found, named, and refuses the next transition; a sound loop is silent."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import pytest
import torch

from specfsm.backends.backend import Backend
from specfsm.backends.resource import Alias, Pointer, Staged, Table
from specfsm.domain import Domain, KVManager, OwningKVManager, RowOrder
from specfsm.errors import ContentsViolated
from specfsm.states.phase import Phase
from tests.toys import BACKENDS, BATCH, OTHER, Injected, Manager, World, manager, refused, world

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT


@pytest.mark.parametrize("order", RowOrder)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sound_loop_is_silent(backend: str, order: RowOrder) -> None:
    """Steps and moves in each domain, reports, rebinding through the machine: no false alarm; something is compared."""
    at = world(backend, check="contents", order=order)
    for batch in at.moves():
        assert at.fsm.validation is not None
        assert len(at.fsm.validation.pending) == 1
        at.fsm._fire("draft_replay", at.fsm.switch.draft, batch)
        at.fsm.restore()
    at.fsm.finish()
    assert at.fsm.violations == ()


# Behind the machine's back: writes that move no version counter.


def behind(at: World, name: str, domain: Domain, index: tuple[int, ...], value: int) -> None:
    """Write one element through NumPy."""
    buffer = at.fsm.value(name, domain)
    version = buffer._version
    buffer.numpy()[index] = value
    assert buffer._version == version


def caught(at: World, event: Any) -> ContentsViolated:
    return refused(at.fsm, ContentsViolated, event)


def spoilt(name: str, index: tuple[int, ...], value: int, domain: Domain = TARGET) -> tuple[World, ContentsViolated]:
    """The toy's table, spoilt after it was refreshed, and the refusal that follows the next validation."""
    at = world(check="contents")
    at.round_trip()
    at.prepare()
    if domain is DRAFT:
        at.fsm.draft_forward(BATCH)
        behind(at, name, domain, index, value)
        at.fsm.draft_step(BATCH)
        return at, caught(at, at.fsm.restore)
    behind(at, name, domain, index, value)
    at.prepare()
    return at, caught(at, lambda: at.fsm.draft_forward(BATCH))


@pytest.mark.parametrize(
    ("name", "index", "value", "failed", "request_of", "owner"),
    [
        ("block_table", (1, 2), 40, "bounds", 3, None),
        ("block_table", (1, 2), 0, "owner", 3, 7),  # slot 0 is request 7's first page
        ("block_table", (1, 2), 30, "owner", 3, None),  # nobody's
        ("block_table", (4, 0), 6, "sentinel", None, 7),  # a padded row
        ("block_table", (0, 5), 3, "sentinel", 7, 7),  # behind a request's last page
        ("block_table", (1, 2), 1, "contents", 3, 3),  # its own page, at the wrong place
        ("rows", (1,), 2, "contents", 3, None),
        ("rows", (1,), 99, "bounds", 3, None),
        ("rows", (3,), 1, "sentinel", None, None),
        ("base", (0, 0, 0, 0), 5, "contents", 7, None),
        ("counters", (2,), 7, "contents", 9, None),
        ("scratch", (1,), 3, "contents", None, None),
    ],
)
def test_each_kind_of_violation(
    name: str, index: tuple[int, ...], value: int, failed: str, request_of: int | None, owner: int | None
) -> None:
    at, error = spoilt(name, index, value)
    facts = (error.resource, error.domain, error.failed, error.index, error.found, error.request, error.owner)
    assert facts == (name, TARGET, failed, index, value, request_of, owner)
    assert (error.event, error.since, error.moved) == ("draft_forward", "target_prepare", {})
    assert error.expected == int(at.fsm.bindings[TARGET].values[at.fsm.ledger.index[name]][index]) or failed
    assert f"toy.{name} [target] at {list(index)}" in str(error)
    at.fsm.dirty(name)
    at.prepare()
    at.fsm.draft_forward(BATCH)
    assert at.fsm.violations == (error,)


def test_draft_is_validated_in_its_own_geometry() -> None:
    """Slot 25 is one of the target's pool, and none of the draft's."""
    _, error = spoilt("block_table", (1, 1), 25, DRAFT)
    assert (error.domain, error.failed, error.since) == (DRAFT, "bounds", "draft_step")
    assert (error.row, error.column) == (1, 1)


def test_host_half_of_a_staged_is_compared() -> None:
    at = world(check="contents")
    at.prepare()
    at.metadata.host_rows.numpy()[0] = 2
    at.prepare()
    error = caught(at, at.prepare)
    assert (error.resource, error.index, error.found) == ("rows", (0,), 2)


def test_manager_that_gave_a_page_away_is_found() -> None:
    """The table is as the manager's own says, and the page is another's."""
    at = world(check="contents")
    at.target.slots[9].append(at.target.slots[3][1])
    at.prepare()
    error = caught(at, at.prepare)
    assert (error.failed, error.resource, error.request, error.owner) == ("owner", "block_table", 3, 9)
    assert error.found == error.expected


class Discreet:
    """A manager that does not tell whose its pages are."""

    def __init__(self, held: Manager) -> None:
        self.held = held

    def __getattr__(self, name: str) -> Any:
        if name == "page_owners":
            raise AttributeError(name)
        return getattr(self.held, name)


def test_owner_is_not_checked_where_the_manager_tells_none() -> None:
    """And `explain` says so."""
    discreet: Any = Discreet(manager(DRAFT))
    assert isinstance(discreet, KVManager)
    assert not isinstance(discreet, OwningKVManager)
    at = world(check="contents", draft=discreet)
    assert at.fsm.validation is not None
    assert at.fsm.validation.unowned == ("block_table [draft]",)
    assert "does not tell who owns the pages of block_table [draft]" in str(at.fsm.explain())
    at.prepare()
    with at.fsm.draft_forward(BATCH):
        behind(at, "block_table", DRAFT, (1, 1), 0)  # request 7's
        at.fsm.draft_step(BATCH)
        assert caught(at, lambda: at.fsm.draft_step(BATCH)).failed == "contents"


# Declarations that are not true.


def declared(**changes: Any) -> Backend:
    """The toy, with one resource declared otherwise."""
    toy = BACKENDS["toy"].make()
    resources = tuple(
        attrs.evolve(each, **changes[each.name]) if each.name in changes else each for each in toy.resources
    )
    return Backend("toy", resources, {"adapter": "the adapter that the requests run with"})


def fill_lengths(view: Any, host: torch.Tensor) -> torch.Tensor:
    host.fill_(-1)
    host[: len(view.batch)] = torch.tensor([length % 6 for length in view.batch.kv_lens])
    return host


FALSE: dict[str, tuple[dict[str, Any], Any]] = {
    "rows": ({"fill": fill_lengths}, 3),  # a Staged, declared to read manager, blocks and batch
    "counters": ({"refresh": lambda view, buffer: buffer.fill_(view.batch.kv_lens[0])}, 9),
    "manager_ref": ({"of": lambda view: view.batch.kv_lens}, (9, 8, 8)),
    "live_rows": ({"derive": lambda rows, view: rows[: 12 - view.batch.kv_lens[0]]}, None),  # a false alias
}


@pytest.mark.parametrize("name", FALSE)
def test_invariant_that_depends_on_an_input_is_disproved(name: str) -> None:
    """Declared not to read lengths, and it does: fresh by its stamp, wrong by its contents (R3)."""
    changes, expected = FALSE[name]
    at = world(declared(**{name: changes}), check="contents")
    at.prepare()
    at.prepare(OTHER["lengths"])
    error = caught(at, at.prepare)
    version = at.fsm.ledger.versions[TARGET][at.fsm.ledger.position["lengths"]]
    assert (error.resource, error.failed, error.moved) == (name, "contents", {"lengths": (version - 1, version)})
    assert expected is None or error.expected == expected
    assert f"declared not to read lengths; lengths moved {version - 1} → {version}" in str(error)
    assert f"add lengths to what {name} reads" in str(error)


def test_true_declaration_of_the_same_is_silent() -> None:
    changes = {"reads": ("manager", "blocks", "batch", "lengths"), "fill": fill_lengths}
    at = world(declared(rows=changes), check="contents")
    at.prepare()
    at.prepare(OTHER["lengths"])
    at.prepare()


def test_every_kind_but_the_opaque_is_compared() -> None:
    kinds = {type(at) for at in BACKENDS["toy"].make().resources if not at.lazy}
    assert {Pointer, Alias, Staged, Table} <= kinds


# What is not recomputed.


def test_published_function_is_not_recomputed_and_its_recipe_readers_are() -> None:
    """The engine wrote rows of its own: nobody knows how. What the launch derives from them must still hold."""
    at = world(check="contents")
    at.prepare()
    at.fsm.value("rows").copy_(torch.tensor([1, 0, 2, -1, -1]))
    at.fsm.publish("rows", at.fsm.value("rows"))
    at.prepare()
    at.prepare()
    behind(at, "block_table", TARGET, (0, 0), 7)
    at.prepare()
    assert caught(at, at.prepare).resource == "block_table"


# Modes, and when it is observed.


class Landing:
    """An event that is complete when the test says so."""

    made: list[Landing]

    def __init__(self) -> None:
        self.done = False
        self.waited = 0
        self.made.append(self)

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waited += 1
        self.done = True


def late() -> tuple[World, list[Landing]]:
    """A target whose table is wrong, validated behind events that have not come."""
    made: list[Landing] = []
    event = type("Landing", (Landing,), {"made": made})
    at = world(check="contents")
    assert at.fsm.validation is not None
    for checks in at.fsm.validation._checks.values():
        checks.landed = event
    at.prepare()
    behind(at, "block_table", TARGET, (1, 2), 40)
    at.prepare()
    return at, made


def test_nothing_waits_until_the_end() -> None:
    """Transitions pass by while the event is pending; the first that finds it complete is refused."""
    at, made = late()
    at.fsm.draft_forward(BATCH)
    at.fsm.draft_step()
    at.fsm.restore()
    assert sum(event.waited for event in made) == 0
    for event in made:
        event.done = True
    assert caught(at, at.prepare).since == "target_prepare"
    assert sum(event.waited for event in made) == 0


@pytest.mark.parametrize("end", ["finish", "settle"])
def test_the_end_waits(end: str) -> None:
    at, made = late()
    error = caught(at, getattr(at.fsm, end))
    assert (error.event, error.failed) == (end, "bounds")
    assert sum(event.waited for event in made) > 0
    at.fsm.settle()
    at.fsm.finish()
    assert at.fsm.state is Phase.IDLE


def test_log_warns_of_each_place_once(caplog: pytest.LogCaptureFixture) -> None:
    at = world(check="contents", mode="log")
    at.prepare()
    behind(at, "block_table", TARGET, (1, 2), 40)
    with caplog.at_level(logging.WARNING, "specfsm"):
        for _ in range(3):
            at.prepare()
    behind(at, "block_table", TARGET, (0, 2), 41)
    at.prepare()
    at.fsm.settle()
    assert [error.index for error in at.fsm.violations] == [(1, 2), (0, 2)]
    assert len(caplog.records) == 2
    assert "toy.block_table [target] at [1, 2] (row 1, column 2, request 3) holds 40" in caplog.text
    assert "refused" not in caplog.text


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match='mode is "raise" or "log", not \'warn\''):
        world(check="contents", mode="warn")


def test_window_is_left_though_its_end_is_refused() -> None:
    """The draft's table is found wrong when the block ends: the target is bound again all the same."""
    at = world(check="contents")
    at.prepare()
    window = at.fsm.draft_forward(BATCH)
    behind(at, "block_table", DRAFT, (0, 0), 9)
    at.fsm.draft_step(BATCH)
    with pytest.raises(ContentsViolated):
        window.__exit__(None, None, None)
    assert (at.fsm.state, at.fsm.domain) == (Phase.RESTORE, TARGET)


def test_window_is_left_though_both_caches_are_wrong() -> None:
    """What the target's validation finds comes with what the draft's does: one is raised, both are kept."""
    at, made = late()
    window = at.fsm.draft_forward(BATCH)
    behind(at, "block_table", DRAFT, (0, 0), 9)
    at.fsm.draft_step(BATCH)
    for event in made:
        event.done = True
    with pytest.raises(ContentsViolated):
        window.__exit__(None, None, None)
    assert (at.fsm.state, at.fsm.domain) == (Phase.RESTORE, TARGET)
    assert [error.domain for error in at.fsm.violations] == [TARGET, DRAFT]


def test_undone_transition_validates_nothing() -> None:
    at = world(check="contents", observe=True)
    at.prepare()
    at.fsm.settle()
    at.fuse.arm("call on_enter_target_prepare")
    with pytest.raises(Injected):
        at.prepare(OTHER["lengths"])
    at.fuse.disarm()
    assert at.fsm.validation is not None
    assert at.fsm.validation.pending == []
    at.fsm.finish()  # which enqueues nothing of its own
    assert at.fsm.validation.pending == []
    at.prepare()
    at.fsm.draft_forward()
    assert [each.event for each in at.fsm.validation.pending] == ["draft_forward"]


def test_lower_levels_do_not_look_at_contents() -> None:
    at = world(check="tensors")
    at.prepare()
    behind(at, "block_table", TARGET, (1, 2), 40)
    at.prepare()
    at.fsm.settle()
    assert at.fsm.violations == ()
