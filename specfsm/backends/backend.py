"""A backend is a declared tuple of resources, checked when it is built and chosen by the metadata's type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from keyword import iskeyword
from typing import Any

import torch
from attrs import field, frozen
from attrs.validators import ge, gt

from specfsm.backends.resource import ACTIONS, Alias, Buffer, Path, Resource, Shared, Staged, Table
from specfsm.domain import INPUTS, AddressSpace, Domain, KVManager, UnifiedCache
from specfsm.errors import IncompleteBackend, UnknownMetadata
from specfsm.states.resource import Ledger

__all__ = ["Backend", "Sizes", "backend_for", "register"]


@frozen(kw_only=True)
class Sizes:
    """The engine's own limits, which every symbolic shape is resolved with.

    Args:
        max_sequences: S, rows of a batch, padding included.
        max_tokens: T, tokens of a forward.
        max_draft_len: L, draft tokens of a step; C = 1 + L.
    """

    max_sequences: int = field(validator=gt(0))
    max_tokens: int = field(validator=gt(0))
    max_draft_len: int = field(default=1, validator=ge(0))

    def axes(self, manager: KVManager) -> dict[str, int]:
        """Axis → extent in the domain of `manager`."""
        pools, rows, planes, blocks = manager.host_block_offsets.shape
        return {
            "S": self.max_sequences,
            "T": self.max_tokens,
            "C": 1 + self.max_draft_len,
            "P": pools,
            "R": rows,
            "Q": planes,
            "B": blocks,
            "L": manager.geometry.num_layers,
            "Y": manager.geometry.sliding_types,
        }


class Backend:
    """What one attention backend's metadata holds, as data.

    Args:
        name: stands before every resource in errors.
        resources: producers before consumers.
        inputs: inputs of its own, beside `specfsm.domain.INPUTS`: name → what moves it.
        unified: a reason to keep the draft in the target's cache whatever the engine passes, if there is one.
        managers: for each domain that asks more of its manager than `KVManager`, the protocol that does.

    Raises:
        IncompleteBackend: with every offender, when the declaration leaves something open.
    """

    def __init__(
        self,
        name: str,
        resources: tuple[Resource, ...],
        inputs: Mapping[str, str] | None = None,
        unified: UnifiedCache | None = None,
        managers: Mapping[Domain, type] | None = None,
    ) -> None:
        self.name = name
        self.resources = tuple(resources)
        self.inputs = {**INPUTS, **(inputs or {})}
        self.unified = unified
        self.managers = dict(managers or {})
        offenders = [offence for check in CHECKS for offence in check(self)]
        if offenders:
            raise IncompleteBackend(name, tuple(offenders))
        self.by_name = {resource.name: resource for resource in self.resources}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {len(self.resources)} resources>"

    def resource(self, name: str) -> Resource:
        """The resource of this name, or a `KeyError` that lists them all."""
        try:
            return self.by_name[name]
        except KeyError:
            raise KeyError(f"{self.name} has no resource {name!r}; it has {', '.join(self.by_name)}") from None

    def require_manager(self, domain: Domain, manager: KVManager) -> None:
        """Refuse a manager that lacks what this domain's resources are derived from."""
        protocol = self.managers.get(domain, KVManager)
        if not isinstance(manager, protocol):
            lacking = ", ".join(name for name in dir(protocol) if name[0] != "_" and not hasattr(manager, name))
            raise UnknownMetadata(
                f"the {domain} manager {type(manager).__qualname__} cannot serve {self.name}",
                (f"it lacks {lacking}",),
                f"give it what specfsm.{protocol.__name__} names, or declare a backend that does not need it",
            )

    def ledger(self) -> Ledger:
        """A ledger of these resources, nothing bound."""
        reads = {resource.name: _content_reads(self.by_name, resource) for resource in self.resources}
        views = {resource.name: (resource.of,) for resource in self.resources if isinstance(resource, Alias)}
        return Ledger(tuple(self.inputs), reads, views)

    def allocate(self, metadata: Any, target: KVManager, draft: KVManager | None, sizes: Sizes, device: Any) -> None:
        """Put every declared device buffer, and its draft twin, on `metadata`, filled with its sentinel.

        An engine that owns its buffers skips this and sets the attributes itself; their shapes are checked either way.
        """
        for resource in self.resources:
            if not isinstance(resource, Buffer) or resource.attribute is None:
                continue
            for domain, manager in ((Domain.TARGET, target), (Domain.DRAFT, draft)):
                attribute = attribute_in(resource, domain)
                if manager is not None and attribute is not None and domain in resource.domains:
                    setattr(metadata, attribute, new_buffer(resource, sizes.axes(manager), device))


def attribute_in(resource: Buffer, domain: Domain) -> str | None:
    """The metadata's attribute from which a domain's buffer is taken when the backend is bound."""
    if domain is Domain.DRAFT and isinstance(resource, Table):
        return resource.twin
    return resource.attribute


def shape_in(resource: Buffer, axes: Mapping[str, int]) -> tuple[int, ...]:
    """The resource's shape in a domain; an axis such as "S*C" is a product."""
    return tuple(_extent(axis, axes) for axis in resource.shape)


def _extent(axis: str | int, axes: Mapping[str, int]) -> int:
    if isinstance(axis, int):
        return axis
    extent = 1
    for letter in axis.split("*"):
        extent *= axes[letter]
    return extent


def new_buffer(resource: Buffer, axes: Mapping[str, int], device: Any) -> torch.Tensor:
    """A device buffer of the declared dtype and shape, filled with the sentinel."""
    shape, dtype = shape_in(resource, axes), getattr(torch, resource.dtype)
    return torch.full(shape, resource.sentinel, dtype=dtype, device=device)


def infer_sizes(backend: Backend, metadata: Any) -> tuple[Sizes, torch.device]:
    """The engine's limits and device, read off the buffers that the metadata carries for the target.

    Raises:
        UnknownMetadata: no carried buffer tells how long an axis is that the backend needs.
    """
    extents: dict[str, int] = {}
    device = torch.device("cpu")
    for resource in backend.resources:
        buffer = getattr(metadata, resource.attribute, None) if resource.attribute else None
        if not isinstance(resource, Buffer) or not isinstance(buffer, torch.Tensor):
            continue
        device = buffer.device
        for axis, extent in zip(resource.shape, buffer.shape, strict=False):
            _solve(str(axis), extent, extents)
    needed = {letter for each in backend.resources if isinstance(each, Buffer) for letter in each.letters}
    lacking = sorted(needed & {"S", "T", "C"} - extents.keys())
    if lacking:
        raise UnknownMetadata(
            f"{type(metadata).__qualname__} cannot be switched by {backend.name}",
            tuple(f"no buffer on it tells the extent of axis {axis}" for axis in lacking),
            "let backend.allocate(metadata, target, draft, sizes, device) make the buffers, or set the engine's own",
        )
    limits = (extents.get("S", 1), extents.get("T", 1), extents.get("C", 1) - 1)
    return Sizes(max_sequences=limits[0], max_tokens=limits[1], max_draft_len=limits[2]), device


def _solve(axis: str, extent: int, extents: dict[str, int]) -> None:
    """Learn the one letter of `axis` that is not known yet."""
    unknown = [letter for letter in axis.split("*") if letter not in extents and letter.isalpha()]
    if len(unknown) == 1:
        known = _extent(axis, {**extents, unknown[0]: 1})
        extents[unknown[0]] = extent // known


def _content_reads(by_name: Mapping[str, Resource], resource: Resource) -> tuple[str, ...]:
    """What the contents follow. An alias of a buffer is a view: it follows its binding alone."""
    if isinstance(resource, Alias) and isinstance(by_name[resource.of], Buffer):
        return tuple(read for read in resource.reads if read != resource.of)
    if isinstance(resource, Alias):
        return (*resource.reads, resource.of)
    return resource.reads


_REGISTRY: dict[type, Callable[[], Backend]] = {}


def register(metadata_type: type, backend: Callable[[], Backend]) -> None:
    """Say which backend switches metadata of this type (and of its subclasses)."""
    known = _REGISTRY.get(metadata_type)
    if known is not None and known is not backend:
        raise ValueError(
            f"{metadata_type.__qualname__} is registered already, for {known}: pass backend= to the Orchestrator"
        )
    _REGISTRY[metadata_type] = backend


def backend_for(metadata: Any) -> Backend:
    """The backend registered for the type of `metadata`. An unknown type is an error, never a pass."""
    for base in type(metadata).__mro__:
        if base in _REGISTRY:
            return _REGISTRY[base]()
    known = ", ".join(sorted(kind.__qualname__ for kind in _REGISTRY)) or "none"
    raise UnknownMetadata(
        f"no backend is registered for {type(metadata).__qualname__}",
        (f"registered types: {known}",),
        f"register({type(metadata).__qualname__}, YourBackend), or pass backend= to the Orchestrator",
    )


# One function a rule of a complete declaration, each yielding its offenders.


def _names_are_unique(backend: Backend) -> Iterator[str]:
    for name, count in Counter(resource.name for resource in backend.resources).items():
        if count > 1:
            yield f"{name} is declared {count} times: give each resource a name of its own"
        if name in backend.inputs:
            yield f"{name} is an input's name too: rename one of them"


def _attributes_are_unique(backend: Backend) -> Iterator[str]:
    carried: dict[str, list[str]] = {}
    for resource in backend.resources:
        twin = resource.twin if isinstance(resource, Table) else None
        for attribute in (*resource.attributes, *filter(None, (twin,))):
            carried.setdefault(attribute, []).append(resource.name)
    for attribute, names in carried.items():
        if len(names) > 1:
            yield f"the attribute {attribute} carries {len(names)} resources ({', '.join(names)}): give each its own"


def _attributes_are_names(backend: Backend) -> Iterator[str]:
    """The exchange of the attributes is compiled from their names."""
    for resource in backend.resources:
        twin = resource.twin if isinstance(resource, Table) else None
        for attribute in (*resource.attributes, *((twin,) if twin is not None else ())):
            if not attribute.isidentifier() or iskeyword(attribute):
                yield f"{resource.name} is carried by {attribute!r}, which cannot be an attribute's name"


def _actions_are_declared(backend: Backend) -> Iterator[str]:
    for resource in backend.resources:
        row = ACTIONS.get(type(resource))
        if row is None:
            yield f"{resource.name} is of the kind {resource.kind}, for which ACTIONS says nothing"
            continue
        for path in Path:
            if path not in row:
                yield f"{resource.name} has no action {path.value}, and does not say that none applies"


def _reads_exist(backend: Backend) -> Iterator[str]:
    declared = set(backend.inputs)
    later = {resource.name for resource in backend.resources}
    for resource in backend.resources:
        sources = (*resource.reads, *((resource.of,) if isinstance(resource, Alias) else ()))
        for source in sources:
            if source in declared:
                continue
            why = "is declared after it, or reads it back" if source in later else "is neither an input nor a resource"
            yield f"{resource.name} reads {source}, which {why}"
        declared.add(resource.name)


def _something_is_read(backend: Backend) -> Iterator[str]:
    for resource in backend.resources:
        if not resource.reads and not isinstance(resource, Alias):
            yield f"{resource.name} reads nothing, so nothing could ever make it stale: name what it is derived from"


def _buffers_have_one_writer(backend: Backend) -> Iterator[str]:
    for resource in backend.resources:
        if not isinstance(resource, Buffer):
            continue
        writers = [resource.recipe, resource.refresh, resource.fill if isinstance(resource, Staged) else None]
        count = sum(writer is not None for writer in writers)
        if count != 1:
            yield f"{resource.name} has {count} writers; it needs one of recipe, refresh, or (Staged) fill"
        if not isinstance(getattr(torch, resource.dtype, None), torch.dtype):
            yield f"{resource.name} has the dtype {resource.dtype!r}, which torch does not know"


def _twins_exist(backend: Backend) -> Iterator[str]:
    for resource in backend.resources:
        if not isinstance(resource, Table) or resource.attribute is None or Domain.DRAFT not in resource.domains:
            continue
        if resource.twin is None:
            yield f"{resource.name} has no draft twin; declare domains=(Domain.TARGET,) if the draft has none"


def _shared_pairs_are_whole(backend: Backend) -> Iterator[str]:
    for resource in backend.resources:
        if isinstance(resource, Shared) and (resource.save is None) != (resource.load is None):
            yield f"{resource.name} has only one of save and load"


def _graph_refreshes_are_recipes(backend: Backend) -> Iterator[str]:
    for resource in backend.resources:
        if resource.refreshed_by not in ("host", "graph"):
            yield f"{resource.name} is refreshed by {resource.refreshed_by!r}; it can be 'host' or 'graph'"


def _recipes_read_what_they_declare(backend: Backend) -> Iterator[str]:
    for resource in backend.resources:
        if isinstance(resource, Buffer) and resource.recipe is not None:
            for operand in resource.recipe.reads:
                if operand not in resource.reads:
                    yield f"{resource.name}'s recipe uses {operand}, which it does not declare in reads: add it there"


def _address_spaces_agree(backend: Backend) -> Iterator[str]:
    spaces: dict[str, AddressSpace | None] = {
        resource.name: resource.space for resource in backend.resources if isinstance(resource, Buffer)
    }
    for resource in backend.resources:
        if not isinstance(resource, Buffer) or resource.recipe is None:
            continue
        for operand, unit in resource.recipe.expects.items():
            space = spaces.get(operand)
            if operand in spaces and (space is None or space.unit is not unit):
                yield (
                    f"{resource.name} reads {operand} counted in {unit.value}, but it holds {_held(space)}: "
                    "translate it first, or correct its space"
                )
        source = spaces.get(resource.recipe.pool_of or "")
        held = resource.recipe.holds or (None if source is None else source.unit)
        if held is not None and (resource.space is None or resource.space.unit is not held):
            yield f"{resource.name}'s recipe writes units of {held.value}, but it declares {_held(resource.space)}"
        if source is not None and resource.space is not None and resource.space.pool != source.pool:
            yield (
                f"{resource.name} points into the pool {resource.space.pool}, but {resource.recipe.pool_of}, which it "
                f"is derived from, into {source.pool}"
            )


def _domains_agree(backend: Backend) -> Iterator[str]:
    """A value of one cache is never made from the other's, so each source exists wherever its reader does."""
    domains = {resource.name: resource.domains for resource in backend.resources}
    for resource in backend.resources:
        for source in (*resource.reads, *((resource.of,) if isinstance(resource, Alias) else ())):
            lacking = [
                str(domain) for domain in resource.domains if domain not in domains.get(source, resource.domains)
            ]
            if lacking:
                yield f"{resource.name} reads {source}, which does not exist in the {' or '.join(lacking)}'s cache"


def _held(space: AddressSpace | None) -> str:
    return "no address space" if space is None else f"{space}"


def _one_launch_suffices(backend: Backend) -> Iterator[str]:
    """A host-side refresh may feed the launch or read from it, but not both: the launch cannot be cut in two."""
    recipes = {r.name for r in backend.resources if isinstance(r, Buffer) and r.recipe is not None}
    after: set[str] = set()
    for resource in backend.resources:
        behind = {read for read in resource.reads if read in recipes or read in after}
        if resource.name not in recipes and behind:
            after.add(resource.name)
        if resource.name in recipes and behind & after:
            yield f"{resource.name} needs a second launch: it reads {', '.join(sorted(behind & after))}"


def _padded_rows_are_sane(backend: Backend) -> Iterator[str]:
    """Padding is part of the batch: what follows lengths without following the batch keeps the padding of an older one,
    a sum that leaves padded rows out among it. And a row that is nobody's holds something harmless."""
    sources = _sources(backend)
    for resource in backend.resources:
        lengths = " and ".join(sorted({"lengths", "layout"} & sources[resource.name]))
        if lengths and "batch" not in sources[resource.name]:
            yield f"{resource.name} follows {lengths}, but not batch: which rows are padded is the batch's"
        if not isinstance(resource, Buffer) or resource.recipe is not None:
            continue
        if lengths and resource.follows_rows and resource.said_sentinel is None:
            yield (
                f"{resource.name} has rows that follow {lengths}, but does not say what padded ones hold: "
                "declare its sentinel"
            )


def _sentinels_agree(backend: Backend) -> Iterator[str]:
    """A sentinel is said once: what the recipe writes is what the declaration promises."""
    for resource in backend.resources:
        if isinstance(resource, Buffer):
            written = getattr(resource.recipe, "sentinel", None)
            if written is not None and written != resource.sentinel:
                yield f"{resource.name} is padded with {resource.sentinel} by declaration, but with {written} by recipe"


def _sources(backend: Backend) -> dict[str, set[str]]:
    """Resource → all that it is derived from, through whatever resource; producers stand first."""
    sources: dict[str, set[str]] = {}
    for resource in backend.resources:
        direct = {*resource.reads, *((resource.of,) if isinstance(resource, Alias) else ())}
        sources[resource.name] = direct.union(*(sources.get(read, set()) for read in direct))
    return sources


CHECKS: tuple[Callable[[Backend], Iterator[str]], ...] = (
    _names_are_unique,
    _attributes_are_unique,
    _attributes_are_names,
    _actions_are_declared,
    _reads_exist,
    _something_is_read,
    _buffers_have_one_writer,
    _twins_exist,
    _shared_pairs_are_whole,
    _graph_refreshes_are_recipes,
    _recipes_read_what_they_declare,
    _address_spaces_agree,
    _domains_agree,
    _one_launch_suffices,
    _padded_rows_are_sane,
    _sentinels_agree,
)
