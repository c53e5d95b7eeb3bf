"""The ledger runs every resource machine as bit masks; here it is held against the table, state by state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specfsm.domain import Domain
from specfsm.errors import IllegalTransition
from specfsm.states.machine import Compiled
from specfsm.states.resource import RESOURCE, Freshness, Ledger, bits

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT
INPUTS = ("blocks", "lengths")
READS = {
    "base": ("blocks",),
    "lens": ("lengths",),
    "table": ("base",),
    "mapping": ("table", "lens"),
    "fixed": ("blocks",),
}


def ledger() -> Ledger:
    return Ledger(INPUTS, READS)


def one() -> Ledger:
    return Ledger(("blocks",), {"table": ("blocks",)})


OPERATIONS: dict[str, Callable[[Ledger, Domain], None]] = {
    "bind": lambda book, domain: book.bind(domain, 0),
    "unbind": lambda book, domain: book.unbind(domain, 1),
    "move": lambda book, domain: book.move(domain, "blocks"),
    "publish": lambda book, domain: book.publish(domain, 1),
    "decline": lambda book, domain: book.publish(domain, 0),  # nothing was written: nothing is stamped
}

WAYS: dict[Freshness, tuple[str, ...]] = {
    Freshness.UNBOUND: (),
    Freshness.STALE: ("bind",),
    Freshness.FRESH: ("bind", "publish"),
}


def test_every_event_has_an_operation() -> None:
    assert set(OPERATIONS) == set(RESOURCE.events)
    assert set(WAYS) == set(Freshness)


LISTED = [(state, move) for state, move in RESOURCE.moves()]


@pytest.mark.parametrize(("state", "move"), LISTED, ids=lambda each: getattr(each, "event", getattr(each, "name", "")))
def test_ledger_follows_every_row(state: Freshness, move: object) -> None:
    """In one domain the listed move happens; in the other nothing does."""
    book = one()
    for event in WAYS[state]:
        OPERATIONS[event](book, DRAFT)
    assert book.state(DRAFT, "table") is state
    OPERATIONS[move.event](book, DRAFT)  # type: ignore[attr-defined]  # a Move
    assert book.state(DRAFT, "table") is move.to  # type: ignore[attr-defined]
    assert book.state(TARGET, "table") is Freshness.UNBOUND


STEPS = st.lists(
    st.tuples(
        st.sampled_from(tuple(Domain)),
        st.sampled_from(("bind", "unbind", "move", "edit", "publish", "decline", "save", "load")),
        st.sampled_from(tuple(READS)),
        st.sampled_from(INPUTS),
    ),
    max_size=40,
)


@given(STEPS)
def test_ledger_agrees_with_a_machine_for_each_pair(steps: list[tuple[Domain, str, str, str]]) -> None:
    """Random operations: every (resource, domain) is where a machine of its own, driven by the table, would be."""
    book = ledger()
    machines = {(domain, name): Compiled(RESOURCE) for domain in Domain for name in READS}
    saved = (book.save(), {pair: machine.state for pair, machine in machines.items()})

    def readers(source: str) -> list[str]:
        return [name for name in READS if source in closed(name)]

    for domain, operation, name, source in steps:
        machine = machines[domain, name]
        if operation == "save":
            saved = (book.save(), {pair: each.state for pair, each in machines.items()})
        elif operation == "load":
            book.load(saved[0])
            for pair, state in saved[1].items():
                machines[pair].state = state
        elif operation == "move":
            book.move(domain, source)
            for reader in readers(source):
                machines[domain, reader].fire("move")
        elif operation == "edit":
            book.move(domain, name)
            for reader in (name, *readers(name)):
                machines[domain, reader].fire("move")
        elif operation in RESOURCE.legal(machine.state):
            machine.fire(operation)
            if operation == "bind":
                book.bind(domain, book.index[name])
            elif operation == "unbind":
                book.unbind(domain, book.mask([name]))
            elif operation == "publish":
                book.publish(domain, book.mask([name]))
            if operation in ("bind", "publish"):
                for reader in readers(name):
                    machines[domain, reader].fire("move")
        for (each, resource), expected in machines.items():
            assert book.state(each, resource) is expected.state, (each, resource)


def closed(name: str) -> set[str]:
    """What a resource is derived from, by the definition."""
    direct = set(READS.get(name, ()))
    return direct.union(*(closed(each) for each in direct))


def test_sources_are_closed_in_order_of_first_mention() -> None:
    book = ledger()
    assert book.sources["mapping"] == ("table", "base", "blocks", "lens", "lengths")
    assert all(set(book.sources[name]) == closed(name) for name in READS)


def test_moved_names_what_moved_since_the_last_refresh() -> None:
    """Inputs before resources, with the version consumed and the version now."""
    book = ledger()
    for place in range(len(READS)):
        book.bind(TARGET, place)
    book.publish(TARGET, book.mask(READS))
    assert book.moved(TARGET, "mapping") == {}
    book.move(TARGET, "lengths")
    book.move(TARGET, "lengths")
    assert book.moved(TARGET, "mapping") == {"lengths": (0, 2)}
    assert book.moved(TARGET, "table") == {}
    assert book.moved(DRAFT, "mapping") == {"blocks": (0, 0), "lengths": (0, 0)}, "never refreshed: all its inputs"


def test_refreshing_a_producer_makes_its_readers_stale() -> None:
    """A table decoded from a base that was refreshed since is old news."""
    book = ledger()
    for place in range(len(READS)):
        book.bind(TARGET, place)
    book.publish(TARGET, book.mask(READS))
    book.publish(TARGET, book.mask(["base"]))
    assert [name for name in READS if book.state(TARGET, name) is Freshness.STALE] == ["table", "mapping"]


def test_editing_several_is_editing_each() -> None:
    """They are stale, their readers too, and the version of each has moved once."""
    books = ledger(), ledger()
    for book in books:
        for place in range(len(READS)):
            book.bind(TARGET, place)
        book.publish(TARGET, book.mask(READS))
    together, apart = books
    together.edit(TARGET, together.mask(["base", "mapping"]))
    for name in ("base", "mapping"):
        apart.move(TARGET, name)
    assert [name for name in READS if together.state(TARGET, name) is Freshness.STALE] == ["base", "table", "mapping"]
    assert together.save() == apart.save()


def test_refreshing_a_producer_leaves_alone_what_is_not_bound() -> None:
    """A plan that was dropped in the same transition as its producer was refreshed is not stale: there is none."""
    book = ledger()
    for place in range(len(READS)):
        book.bind(TARGET, place)
    book.unbind(TARGET, book.mask(["mapping"]))
    book.publish(TARGET, book.mask(["base", "table"]))
    assert book.state(TARGET, "mapping") is Freshness.UNBOUND
    assert not book.stale[TARGET] & book.mask(["mapping"])


def test_binding_makes_views_and_their_readers_stale() -> None:
    """A view follows the binding of what it views; its readers follow the view."""
    book = Ledger(("batch",), {"rows": ("batch",), "live": ("batch",), "plan": ("live",)}, {"live": ("rows",)})
    for place in range(3):
        book.bind(TARGET, place)
    book.publish(TARGET, 0b111)
    book.bind(TARGET, 0)
    assert [book.state(TARGET, name) for name in ("rows", "live", "plan")] == [Freshness.STALE] * 3


def test_contents_of_a_viewed_buffer_leave_the_view_fresh() -> None:
    """A refresh writes the buffer in place: the view shows it without being derived again."""
    book = Ledger(("batch",), {"rows": ("batch",), "live": ("batch",)}, {"live": ("rows",)})
    for place in range(2):
        book.bind(TARGET, place)
    book.publish(TARGET, 0b11)
    book.publish(TARGET, 0b01)
    assert book.state(TARGET, "live") is Freshness.FRESH


def test_save_copies_nothing_until_something_changes() -> None:
    """Remembering costs a hot path nothing while nothing moved, and what was saved does not follow later moves."""
    book = one()
    book.bind(TARGET, 0)
    first = book.save()
    assert book.save() is first
    book.publish(TARGET, 1)
    assert book.save() is not first
    book.load(first)
    assert book.state(TARGET, "table") is Freshness.STALE
    assert book.save() is first


@pytest.mark.parametrize("mask", [0, 0b1, 0b1010, 1 << 70])
def test_bits(mask: int) -> None:
    assert sum(1 << place for place in bits(mask)) == mask
    assert list(bits(mask)) == sorted(bits(mask))


def test_what_the_table_refuses_the_ledger_never_does() -> None:
    """Publishing what is not bound is no row: the machine refuses it."""
    machine = Compiled(RESOURCE)
    with pytest.raises(IllegalTransition):
        machine.fire("publish")
