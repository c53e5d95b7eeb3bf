"""A declaration is whole or refused: one small broken backend for each rule; sizes, shapes and the registry."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from specfsm.backends import backend as declarations
from specfsm.backends.backend import (
    CHECKS,
    Backend,
    Sizes,
    backend_for,
    infer_sizes,
    register,
    shape_in,
)
from specfsm.backends.resource import Alias, Pointer, Resource, Shared, Staged, Table
from specfsm.domain import AddressSpace, Domain, Unit
from specfsm.errors import IncompleteBackend, UnknownMetadata
from specfsm.kernels.recipes import ExpandRows, GatherTable
from tests.toys import BACKENDS, RESOURCES, SIZES, Toy, manager

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT


def refresh(_: Any, buffer: torch.Tensor) -> torch.Tensor:
    return buffer


def table(name: str = "table", **changes: Any) -> Table:
    facts = {"reads": ("blocks",), "dtype": "int32", "shape": ("S",), "refresh": refresh, **changes}
    return Table(name, **facts)


def staged(name: str = "staged", **changes: Any) -> Staged:
    facts = {"reads": ("blocks",), "dtype": "int32", "shape": ("S",), "fill": refresh, **changes}
    return Staged(name, **facts)


def shared(**changes: Any) -> Shared:
    return Shared("shared", reads=("blocks",), dtype="int32", shape=("S",), refresh=refresh, **changes)


ENTRIES, ROWS, SLOTS = (AddressSpace("kv", unit) for unit in (Unit.ENTRY, Unit.ROW, Unit.SLOT))
GATHER = GatherTable(base="base", rows="rows", unit=Unit.SLOT)


def gathered(*, base: AddressSpace | None = ENTRIES, space: AddressSpace | None = SLOTS, **changes: Any) -> Any:
    """A base, a row index, and a table decoded from them."""
    facts = {"reads": ("base", "rows"), "refresh": None, "recipe": GATHER, "space": space, **changes}
    return (staged("base", space=base), staged("rows", space=ROWS), table(**facts))


def expanded(space: AddressSpace) -> Any:
    """A table of slots, and its rows repeated in a table that says where its entries point."""
    wide = table("wide", reads=("table",), refresh=None, recipe=ExpandRows(table="table", times=2), space=space)
    return (*gathered(), wide)


class Gadget(Resource):
    """A kind that `ACTIONS` does not know."""


BROKEN: dict[str, list[tuple[tuple[Resource, ...], str]]] = {
    "_names_are_unique": [
        ((table(), staged("table", attribute="other")), "table is declared 2 times"),
        ((table("blocks"),), "blocks is an input's name too"),
    ],
    "_attributes_are_unique": [
        ((table(), table("second", attribute="table", twin="other")), "the attribute table carries 2 resources"),
        ((table(), table("second", twin="table")), "the attribute table carries 2 resources"),
        ((staged(host_attribute="staged"),), "the attribute staged carries 2 resources"),
    ],
    "_attributes_are_names": [
        ((table("kv lens"),), "kv lens is carried by 'kv lens', which cannot be an attribute's name"),
        ((table(attribute="class"),), "table is carried by 'class', which cannot be an attribute's name"),
        ((table(twin="draft.table"),), "table is carried by 'draft.table'"),
        ((staged(host_attribute="a, b"),), "staged is carried by 'a, b'"),
    ],
    "_actions_are_declared": [
        ((Gadget("gadget", reads=("blocks",)),), "gadget is of the kind Gadget, for which ACTIONS says nothing"),
    ],
    "_reads_exist": [
        ((table(reads=("blokcs",)),), "table reads blokcs, which is neither an input nor a resource"),
        (
            (table("first", reads=("second",)), table("second")),
            "first reads second, which is declared after it, or reads it back",
        ),
        ((table(reads=("table",)),), "table reads table, which is declared after it, or reads it back"),
        (
            (Alias("view", of="nothing", derive=refresh),),
            "view reads nothing, which is neither an input nor a resource",
        ),
    ],
    "_something_is_read": [
        ((table(reads=()),), "table reads nothing, so nothing could ever make it stale"),
    ],
    "_buffers_have_one_writer": [
        ((table(refresh=None),), "table has 0 writers; it needs one of recipe, refresh, or (Staged) fill"),
        ((staged(refresh=refresh),), "staged has 2 writers"),
        ((table(dtype="int33"),), "table has the dtype 'int33', which torch does not know"),
        ((table(dtype="Tensor"),), "table has the dtype 'Tensor', which torch does not know"),
    ],
    "_twins_exist": [
        ((table(twin=None),), "table has no draft twin; declare domains=(Domain.TARGET,) if the draft has none"),
    ],
    "_shared_pairs_are_whole": [
        ((shared(save=torch.clone),), "shared has only one of save and load"),
        ((shared(load=refresh),), "shared has only one of save and load"),
    ],
    "_graph_refreshes_are_recipes": [
        ((table(refreshed_by="device"),), "table is refreshed by 'device'; it can be 'host' or 'graph'"),
    ],
    "_recipes_read_what_they_declare": [
        (gathered(reads=("base",)), "table's recipe uses rows, which it does not declare in reads"),
    ],
    "_address_spaces_agree": [
        (gathered(base=None), "table reads base counted in entry, but it holds no address space"),
        (gathered(base=ROWS), "table reads base counted in entry, but it holds kv/row"),
        (gathered(space=None), "table's recipe writes units of slot, but it declares no address space"),
        (gathered(space=ENTRIES), "table's recipe writes units of slot, but it declares kv/entry"),
        (expanded(AddressSpace("kv", Unit.PAGE)), "wide's recipe writes units of slot, but it declares kv/page"),
        (
            expanded(AddressSpace("indexer", Unit.SLOT)),
            "wide points into the pool indexer, but table, which it is derived from, into kv",
        ),
    ],
    "_domains_agree": [
        (
            (table("first", domains=(TARGET,)), table("second", reads=("first",))),
            "second reads first, which does not exist in the draft's cache",
        ),
        (
            (table("first", domains=(DRAFT,)), Alias("view", of="first", derive=refresh, domains=(TARGET,))),
            "view reads first, which does not exist in the target's cache",
        ),
    ],
    "_one_launch_suffices": [
        (
            (
                *gathered(),
                table("between", reads=("table",)),
                table(
                    "second",
                    reads=("table", "between"),
                    refresh=None,
                    recipe=ExpandRows(table="table", times=2),
                    space=SLOTS,
                ),
            ),
            "second needs a second launch: it reads between",
        ),
    ],
    "_padded_rows_are_sane": [
        (
            (table("total", reads=("lengths",), shape=(1,)),),
            "total follows lengths, but not batch: which rows are padded is the batch's",
        ),
        (
            (Pointer("longest", reads=("layout", "lengths"), of=refresh),),
            "longest follows layout and lengths, but not batch",
        ),
        (
            (table("lens", reads=("lengths",), sentinel=0), Alias("view", of="lens", derive=refresh)),
            "view follows lengths, but not batch",
        ),
        (
            (table(reads=("batch", "lengths")),),
            "table has rows that follow lengths, but does not say what padded ones hold: declare its sentinel",
        ),
        (
            (table("lens", reads=("batch", "layout"), sentinel=0), table("each", reads=("lens",), shape=("S*C",))),
            "each has rows that follow layout, but does not say what padded ones hold",
        ),
    ],
    "_sentinels_agree": [
        (gathered(sentinel=-1), "table is padded with -1 by declaration, but with 0 by recipe"),
    ],
}


def test_every_rule_has_a_broken_backend() -> None:
    """A rule without a case is a rule that nobody has seen refuse anything."""
    assert [check.__name__ for check in CHECKS] == list(BROKEN)


CASES = [pytest.param(rule, *case, id=f"{rule}-{i}") for rule, each in BROKEN.items() for i, case in enumerate(each)]


@pytest.mark.parametrize(("rule", "resources", "offence"), CASES)
def test_broken_backend_is_refused(rule: str, resources: tuple[Resource, ...], offence: str) -> None:
    """By the rule that it breaks, with the offender in the message."""
    with pytest.raises(IncompleteBackend) as caught:
        Backend("broken", resources)
    assert any(offence in line for line in caught.value.offenders)
    unchecked = SimpleNamespace(resources=resources, inputs=dict.fromkeys(Toy().inputs, ""))
    assert any(offence in line for line in getattr(declarations, rule)(unchecked))
    assert str(caught.value).startswith("backend broken is not fully declared\n  ")


@pytest.mark.parametrize("rule", BROKEN)
def test_rule_has_nothing_to_say_about_a_sound_backend(rule: str) -> None:
    for flavour in BACKENDS.values():
        assert list(getattr(declarations, rule)(flavour.make())) == []


def test_sentinel_is_said_once() -> None:
    """By the declaration or by its recipe; where no row follows lengths it need not be said."""
    _, _, made = gathered(recipe=GatherTable(base="base", rows="rows", unit=Unit.SLOT, sentinel=-1))
    assert (made.sentinel, made.said_sentinel) == (-1, -1)
    assert (table().sentinel, table().said_sentinel) == (0, None)
    assert table(sentinel=0).said_sentinel == 0
    Backend("sane", (table("total", reads=("batch", "lengths"), shape=(1,)),))


def test_missing_path_is_an_open_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind says for every path what happens, or that nothing applies; silence is refused."""
    actions = {kind: dict(row) for kind, row in declarations.ACTIONS.items()}
    path, _ = actions[Table].popitem()
    monkeypatch.setattr(declarations, "ACTIONS", actions)
    with pytest.raises(
        IncompleteBackend, match=f"table has no action {path.value}, and does not say that none applies"
    ):
        Backend("open", (table(),))


def test_every_offender_is_listed_at_once() -> None:
    with pytest.raises(IncompleteBackend) as caught:
        Backend("broken", (table(reads=("blokcs",), refresh=None, dtype="int33"), shared(save=torch.clone)))
    assert len(caught.value.offenders) == 4


def test_what_has_no_twin_may_say_so() -> None:
    """A table of the target alone, and one that the orchestrator keeps itself."""
    only = Backend("only", (table(domains=(TARGET,)), staged(attribute=None)))
    assert only.by_name["table"].twin is None  # type: ignore[attr-defined]  # a Table


def test_resource_by_name() -> None:
    toy = Toy()
    assert toy.resource("rows").name == "rows"
    with pytest.raises(KeyError, match="toy has no resource 'row'; it has manager_ref, base, rows"):
        toy.resource("row")
    assert repr(toy) == "<Toy toy: 10 resources>"


def test_the_toy_has_every_kind() -> None:
    """The suites claim all seven kinds; this is where the claim is kept."""
    assert {type(each) for each in RESOURCES} == set(declarations.ACTIONS)
    assert len(RESOURCES) == 10


# Sizes and shapes.


@pytest.mark.parametrize("name", BACKENDS)
def test_allocated_metadata_is_what_the_backend_declares(name: str) -> None:
    """Buffers and twins, each of its own domain's extents, filled with the sentinel; sizes are read off them again."""
    flavour = BACKENDS[name]
    made = flavour.make()
    managers = {domain: manager(domain, kv_factor=flavour.kv_factor) for domain in Domain}
    metadata = SimpleNamespace()
    made.allocate(metadata, managers[TARGET], managers[DRAFT], SIZES, "cpu")
    found = 0
    for resource in made.resources:
        if not isinstance(resource, Table) or resource.attribute is None:
            continue
        for domain in resource.domains:
            attribute = resource.attribute if domain is TARGET else resource.twin
            buffer = getattr(metadata, attribute)
            assert tuple(buffer.shape) == shape_in(resource, SIZES.axes(managers[domain]))
            assert str(buffer.dtype) == f"torch.{resource.dtype}"
            assert (buffer == resource.sentinel).all()
            found += 1
    assert found
    sizes, device = infer_sizes(made, metadata)
    assert (sizes.max_sequences, device) == (SIZES.max_sequences, torch.device("cpu"))


def test_axes_of_a_domain() -> None:
    axes = SIZES.axes(manager(DRAFT))
    assert axes == {"S": 5, "T": 16, "C": 4, "P": 1, "R": 6, "Q": 2, "B": 5, "L": 1, "Y": 1}
    assert shape_in(table(shape=("S*C", 3, "B")), axes) == (20, 3, 5)


def test_allocation_without_a_draft() -> None:
    """A unified cache has no twins."""
    metadata = SimpleNamespace()
    Toy().allocate(metadata, manager(TARGET), None, SIZES, "cpu")
    assert not any(name.startswith("draft_") for name in vars(metadata))


def test_sizes_are_solved_from_products() -> None:
    """S*C tells C once S is known."""
    made = Backend("sizes", (table(), table("wide", shape=("S*C", "T"))))
    metadata = SimpleNamespace(table=torch.zeros(5), wide=torch.zeros(20, 9))
    sizes, _ = infer_sizes(made, metadata)
    assert sizes == Sizes(max_sequences=5, max_tokens=9, max_draft_len=3)


def test_size_that_nothing_tells_is_an_error() -> None:
    with pytest.raises(UnknownMetadata, match="no buffer on it tells the extent of axis T") as caught:
        infer_sizes(Backend("sizes", (table(), table("long", shape=("T",)))), SimpleNamespace(table=torch.zeros(5)))
    assert "to mend: let backend.allocate(metadata, target, draft, sizes, device) make the buffers" in str(caught.value)


@pytest.mark.parametrize("limits", [{"max_sequences": 0}, {"max_tokens": 0}, {"max_draft_len": -1}])
def test_impossible_sizes_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        attrs.evolve(SIZES, **limits)


# The registry.


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[type, Callable[[], Backend]]:
    empty: dict[type, Callable[[], Backend]] = {}
    monkeypatch.setattr(declarations, "_REGISTRY", empty)
    return empty


class Metadata:
    pass


class Derived(Metadata):
    pass


@pytest.mark.usefixtures("registry")
def test_backend_is_chosen_by_type() -> None:
    """Registered for a class, found for it and its subclasses."""
    register(Metadata, Toy)
    register(Metadata, Toy)
    assert isinstance(backend_for(Metadata()), Toy)
    assert isinstance(backend_for(Derived()), Toy)


@pytest.mark.usefixtures("registry")
def test_unknown_type_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(UnknownMetadata, match="no backend is registered for Metadata\n  registered types: none"):
        backend_for(Metadata())
    register(Derived, Toy)
    with pytest.raises(UnknownMetadata, match="registered types: Derived\n  to mend: register\\(Metadata, YourBackend"):
        backend_for(Metadata())


@pytest.mark.usefixtures("registry")
def test_type_cannot_be_registered_for_two_backends() -> None:
    register(Metadata, Toy)
    with pytest.raises(ValueError, match=r"Metadata is registered already, .*: pass backend= to the Orchestrator"):
        register(Metadata, BACKENDS["trtllm"].make)


def test_alias_reads_the_contents_of_what_is_no_buffer() -> None:
    """A view of a buffer follows its binding alone; a value derived from a pointer follows the pointer's value."""
    pointer = Pointer("ref", reads=("manager",), of=lambda view: view.manager)
    over_pointer = Alias("address", of="ref", derive=lambda ref, view: ref.pool_pointers[0])
    over_buffer = Alias("view", of="table", reads=("batch",), derive=lambda buffer, view: buffer[:1])
    book = Backend("views", (pointer, over_pointer, table(), over_buffer)).ledger()
    assert book.sources["address"] == ("ref", "manager")
    assert book.sources["view"] == ("batch",)
