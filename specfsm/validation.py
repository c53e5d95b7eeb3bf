"""Check level "contents": what the tables hold is recomputed after every refresh, and compared.

Nothing waits for it. A validation is enqueued behind the refresh of a phase, over everything that the phase may read;
what it finds goes to the host behind an event, and is looked at in the first transition that finds the event complete:
that one is refused (or, in mode "log", a warning is written). By then kernels may have read what was wrong, so it is a
means to find a bug, not to survive it.

What is compared with what:

- a table with a recipe: each element with a recomputation by another arithmetic, the pool's bounds, the sentinel where
  there is no place, and the request that owns the page, where the manager tells;
- a `Staged`, and any other buffer with a function: with what the function writes into a scratch buffer now; a `Staged`
  in its host half too;
- a `Pointer` or `Alias`: with what its function gives now.

What the engine published is not recomputed (nobody knows how it was made), unless it has a recipe. A `Plan` or `Cache`
is opaque. What a graph refreshes itself is not validated: its replay left it behind its own inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import define, frozen

from specfsm.backends.backend import new_buffer
from specfsm.backends.resource import Alias, Buffer, Pointer, Resource, Staged
from specfsm.backends.staging import Event, events
from specfsm.domain import NOBODY, Batch, Domain, OwningKVManager, Unit
from specfsm.errors import ContentsViolated
from specfsm.graph import Graph, bake
from specfsm.kernels.validate import KINDS, ValidateLaunch, difference, unravel
from specfsm.states.resource import bits

if TYPE_CHECKING:
    from enum import Enum

    from specfsm.backends.binding import Binding
    from specfsm.backends.script import Script
    from specfsm.orchestrator import Orchestrator

__all__ = ["Mode", "Validation"]

Mode = Literal["raise", "log"]
RECORD, DIFFERENCE = 7, 4
"""Numbers in a record of the launch, and in one of a buffer with a function."""

log = logging.getLogger("specfsm")


@frozen
class _Finding:
    """What was found of one resource.

    Args:
        failed, index, found, expected, owner, request: see `ContentsViolated`.
    """

    place: int
    failed: str
    index: tuple[int, ...]
    found: Any
    expected: Any
    owner: int | None = None
    request: int | None = None


@define(eq=False)
class _Pending:
    """One validation that the host has not looked at.

    Args:
        event: after whose refresh it was enqueued.
        findings: what the host compared by itself.
        results: on the host behind `landed`: the launch's record, if there was one, then each buffer's difference.
        places: of those buffers.
        versions, stamps: the ledger's for the domain, when it was enqueued.
        rows: manager's row → request.
    """

    event: str
    binding: Binding
    batch: Batch | None
    findings: list[_Finding]
    results: torch.Tensor
    places: list[int]
    launched: bool
    landed: Event
    versions: list[int]
    stamps: list[list[int] | None]
    rows: dict[int, int]


class Validation:
    """The validations of an orchestrator.

    Args:
        fsm: whose resources are validated.
        mode: "raise" refuses the transition that observes a violation; "log" warns of each once.
        event: makes the events behind which findings come to the host; for tests.

    Attributes:
        written: for each domain, mask of what the machine wrote last, and the engine has not published since.
        violations: what was found so far, in order; in mode "log" each place in a resource once.
    """

    def __init__(self, fsm: Orchestrator, mode: Mode, event: Callable[[], Event] | None = None) -> None:
        if mode not in ("raise", "log"):
            raise ValueError(f'mode is "raise" or "log", not {mode!r}')
        self.fsm, self.mode = fsm, mode
        self.written = [0 for _ in Domain]
        self.violations: list[ContentsViolated] = []
        self.enqueued: list[_Pending] = []
        self.pending: list[_Pending] = []
        self._told: set[tuple[Any, ...]] = set()
        self._checks = {binding.side: _Checks(binding, event) for binding in dict.fromkeys(fsm.bindings)}

    @property
    def unowned(self) -> tuple[str, ...]:
        """The resources whose pages are compared with no owner, with their domain: the manager does not tell."""
        return tuple(name for checks in self._checks.values() for name in checks.unowned)

    # Enqueue.

    def validate(self, event: str, binding: Binding, steps: Script, graph: Graph | None) -> None:
        """Enqueue the validation of all that the phase, or the graph, may read, once it is known to be fresh."""
        target = self.fsm.switch.target
        if graph is None:
            self._enqueue(event, binding, steps.required)
            return
        self._enqueue(event, binding, steps.required & graph.needs(binding.domain))
        if target is not binding:
            self._enqueue(event, target, graph.needs(target.domain))

    def _enqueue(self, event: str, binding: Binding, mask: int) -> None:
        ledger, side = self.fsm.ledger, binding.side
        mask &= ledger.bound[side] & ~ledger.stale[side]
        if mask:
            checks = self._checks[side]
            made = checks.run(mask, mask & self.written[side], ledger.stale[side])
            versions, stamps = ledger.versions[side], ledger.stamps[side]  # replaced when they move, never changed
            self.enqueued.append(_Pending(event, binding, binding.batch, *made, versions, stamps, checks.rows))

    def commit(self) -> None:
        """The transition that enqueued them is through: they count. What one that was undone enqueued never does."""
        self.pending += self.enqueued
        self.enqueued = []

    # Observe.

    def observe(self, event: str, to: Enum | None = None, *, wait: bool = False) -> None:
        """Look at what has come to the host, before `event` changes anything. Not while a graph is recorded: a refusal
        would spoil the capture.

        Args:
            wait: for what has not, too.

        Raises:
            ContentsViolated: in mode "raise". Later validations of that domain are dropped: they saw the same.
        """
        self.enqueued = []  # by a transition that was undone
        while self.pending and self.fsm.recording is None:
            first = self.pending[0]
            if wait:
                first.landed.synchronize()
            elif not first.landed.query():
                return
            del self.pending[0]
            finding = self._first(first)
            if finding is not None:
                self._report(self._violation(first, finding, event, to), first)

    def _report(self, error: ContentsViolated, pending: _Pending) -> None:
        if self.mode == "raise":
            self.pending = [each for each in self.pending if each.binding is not pending.binding]
            self.violations.append(error)
            raise error
        place = (error.resource, error.domain, error.failed, error.index)
        if place not in self._told:
            self._told.add(place)
            self.violations.append(error)
            log.warning("%s", "\n  ".join(error.reasons()))

    def _first(self, pending: _Pending) -> _Finding | None:
        """The finding of the resource that stands first in the backend: producers before consumers."""
        findings = [*pending.findings, *self._checks[pending.binding.side].read(pending)]
        return min(findings, key=lambda finding: finding.place, default=None)

    def _violation(self, pending: _Pending, finding: _Finding, event: str, to: Enum | None) -> ContentsViolated:
        fsm, place = self.fsm, finding.place
        resource = fsm.backend.resources[place]
        row, column, request = _whereabouts(resource, finding, pending)
        return ContentsViolated(
            fsm.state,
            event,
            to,
            backend=fsm.backend.name,
            resource=resource.name,
            domain=pending.binding.domain,
            failed=finding.failed,
            index=finding.index,
            row=row,
            column=column,
            request=request,
            found=finding.found,
            expected=finding.expected,
            owner=finding.owner,
            since=pending.event,
            moved=self._undeclared(pending, place) if finding.failed == "contents" else {},
        )

    def _undeclared(self, pending: _Pending, place: int) -> dict[str, tuple[int, int]]:
        """The inputs that moved since the last refresh. It is fresh all the same: it declares to read none of them."""
        stamp, names = pending.stamps[place], self.fsm.ledger.inputs
        if stamp is None:
            return {}
        moves = ((name, stamp[at], pending.versions[at]) for at, name in enumerate(names))
        return {name: (was, now) for name, was, now in moves if was != now}


class _Checks:
    """How one domain is validated.

    Attributes:
        rows: manager's row → request, of the batch that was validated last.
        unowned: see `Validation.unowned`.
    """

    def __init__(self, binding: Binding, event: Callable[[], Event] | None) -> None:
        self.binding = binding
        self.resources: Sequence[Resource] = binding.backend.resources
        self.device = binding.launch.device if binding.launch is not None else torch.device("cpu")
        self.landed = event or events(self.device)
        self.rows: dict[int, int] = {}
        self._known: tuple[Any, ...] = ()
        pools = dict(self._pools())
        self.launch = None if binding.launch is None else ValidateLaunch(binding.launch, pools)
        recipes = () if binding.launch is None else binding.launch.recipes
        self.unowned = tuple(f"{name} [{binding.domain}]" for name in recipes if name not in pools)
        self.operands = {place: self._operands(place) for place in binding.tasks}

    def _pools(self) -> Iterator[tuple[str, str]]:
        """Each output with the pool whose owners the manager tells."""
        manager: Any = self.binding.manager
        for place in self.binding.tasks:
            resource: Any = self.resources[place]
            owning = isinstance(manager, OwningKVManager) and resource.space is not None
            if owning and manager.page_owners(resource.space.pool) is not None:
                yield resource.name, resource.space.pool

    def _operands(self, place: int) -> int:
        """Mask of the buffers that a recipe is recomputed from."""
        assert self.launch is not None, "only what a launch writes has operands"
        recipes = self.launch.refresh.recipes
        name = self.resources[place].name
        operands = recipes[name].operands(name, recipes)[:-1]
        return sum(1 << self.binding.places[each] for each in {operand.name for operand in operands})

    # On the way there.

    def run(self, mask: int, written: int, stale: int) -> tuple[list[_Finding], torch.Tensor, list[int], bool, Event]:
        """Compare on the host what lies there, enqueue the rest; see `_Pending`."""
        findings: list[_Finding] = []
        differences: list[torch.Tensor] = []
        places: list[int] = []
        for place in bits(written):
            resource = self.resources[place]
            if isinstance(resource, Pointer | Alias):
                findings += self._value(place, resource)
            elif isinstance(resource, Buffer) and resource.recipe is None:
                expected = self._rewritten(resource, place, findings)
                if expected is not None:
                    found = self.binding.values[place]
                    differences.append(difference(found, expected, *_bounds(resource, self.binding)))
                    places.append(place)
        record = self._launch(mask, stale)
        device = [*(() if record is None else (record,)), *differences]
        results, landed = self._sent(device)
        return findings, results, places, record is not None, landed

    def _launch(self, mask: int, stale: int) -> torch.Tensor | None:
        ready = [
            task for place, task in self.binding.tasks.items() if mask >> place & 1 and not self.operands[place] & stale
        ]
        if self.launch is None or not ready:
            return None
        self._know(self.launch)
        return self.launch(sum(ready))

    def _know(self, launch: ValidateLaunch) -> None:
        """Tell the launch whose rows and pages these are, if that may have changed."""
        binding = self.binding
        known = (binding.generation, binding.blocks_version, binding.batch)
        if len(self._known) == 3 and self._known[:2] == known[:2] and self._known[2] is known[2]:
            return
        ids = binding.batch.request_ids if binding.batch is not None else ()
        self.rows = dict(zip(binding.view.rows(), ids, strict=True))
        requests = torch.full(launch.requests.shape, NOBODY)
        for row, request in self.rows.items():
            requests[row] = request
        manager: Any = binding.manager
        owners = {pool: self._pinned(manager.page_owners(pool)) for pool in launch.owners}
        launch.know(self._pinned(requests), owners)
        self._known = known

    def _value(self, place: int, resource: Pointer | Alias) -> Iterator[_Finding]:
        binding, found = self.binding, self.binding.values[place]
        if isinstance(resource, Pointer):
            expected = resource.of(binding.view)
        else:
            expected = resource.derive(binding.values[binding.places[resource.of]], binding.view)
        if expected is not None and not _same(found, expected):
            yield _Finding(place, "contents", (), _shown(found), _shown(expected))

    def _rewritten(self, resource: Buffer, place: int, findings: list[_Finding]) -> torch.Tensor | None:
        """What the resource's function writes now into a buffer full of the sentinel, on the device; None if it
        declines."""
        binding = self.binding
        if not isinstance(resource, Staged):
            assert resource.refresh is not None, "a buffer without recipe or fill has a refresh: checked at declaration"
            scratch = new_buffer(resource, binding.view.axes, self.device)
            return None if resource.refresh(binding.view, scratch) is None else scratch
        host = self._pinned(new_buffer(resource, binding.view.axes, "cpu"))
        if resource.fill(binding.view, host) is None:
            return None
        half = binding.hosts.get(place)
        if resource.host_attribute is not None and half is not None and not torch.equal(half, host):
            _, at, found, expected = difference(half, host, *_bounds(resource, binding)).tolist()
            findings.append(_Finding(place, "contents", unravel(at, tuple(host.shape)), found, expected))
        return host.to(self.device, non_blocking=True)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def _sent(self, device: list[torch.Tensor]) -> tuple[torch.Tensor, Event]:
        """One copy of all findings to the host, and the event behind it."""
        landed = self.landed()
        joined = torch.cat(device) if device else torch.empty(0, dtype=torch.int64)
        results = joined if not joined.is_cuda else torch.empty_like(joined, device="cpu", pin_memory=True)
        if results is not joined:
            results.copy_(joined, non_blocking=True)
        landed.record()
        return results, landed

    # And back.

    def read(self, pending: _Pending) -> Iterator[_Finding]:
        """What the device found, once it is on the host."""
        results = pending.results
        if pending.launched:
            assert self.launch is not None, "there is a record only where there is a launch"
            found = self.launch.read(results[:RECORD])
            if found is not None:
                place = self.binding.places[found.output]
                yield _Finding(
                    place, found.failed, found.index, found.found, found.expected, found.owner, found.request
                )
            results = results[RECORD:]
        for place, (kind, at, own, other) in zip(pending.places, results.view(-1, DIFFERENCE).tolist(), strict=True):
            if kind:
                buffer, resource = self.binding.values[place], self.resources[place]
                own, other = (_number(each, buffer.dtype) for each in (own, other))
                yield _Finding(place, _named(kind, resource, other), unravel(at, tuple(buffer.shape)), own, other)


def _bounds(resource: Buffer, binding: Binding) -> tuple[int, int, int]:
    """(smallest, largest) value that points into the domain, and the sentinel, which need not."""
    everything = (-(2**63), 2**63 - 1, resource.sentinel)
    if resource.space is None:
        return everything
    blocks, unit = binding.view.geometry.blocks_in_primary_pool, resource.space.unit
    if unit is Unit.ENTRY:  # -1, or bit 31 for the secondary pool: negative ones are no places
        return -(2**31), blocks * binding.view.geometry.index_scale - 1, resource.sentinel
    limits = {Unit.ROW: binding.view.axes["R"], Unit.REQUEST: binding.view.axes["S"]}
    if unit in (Unit.SLOT, Unit.PAGE, Unit.TOKEN):
        limits[unit] = blocks * binding.view.geometry.scale(unit)
    return (0, limits[unit] - 1, resource.sentinel) if unit in limits else everything


def _named(kind: int, resource: Resource, expected: Any) -> str:
    """Where the sentinel of an index is due, that is what failed."""
    failed = KINDS[kind]
    indexed = isinstance(resource, Buffer) and resource.space is not None and expected == resource.sentinel
    return "sentinel" if failed == "contents" and indexed else failed


def _number(bits_of: int, dtype: torch.dtype) -> int | float:
    """A number as `difference` gives it."""
    if not dtype.is_floating_point:
        return bits_of
    return float(torch.tensor(bits_of).view(torch.float64))


def _whereabouts(resource: Resource, finding: _Finding, pending: _Pending) -> tuple[int | None, int | None, int | None]:
    """(row, column, request) of an element."""
    axes = resource.shape if isinstance(resource, Buffer) else ()
    at = dict(zip(axes, finding.index, strict=False))
    row, request = at.get("S", at.get("S*C", at.get("R"))), finding.request
    ids = pending.batch.request_ids if pending.batch is not None else ()
    if request is None and isinstance(resource, Buffer) and resource.recipe is None:
        if resource.space is not None and resource.space.unit is Unit.ROW:
            request = pending.rows.get(finding.expected)
        elif "R" in at:
            request = pending.rows.get(at["R"])
        elif "S" in at and at["S"] < len(ids):
            request = ids[at["S"]]
    return row, at.get("B"), request


def _same(one: Any, other: Any) -> bool:
    """Whether two references, numbers or views are the same."""
    mine, its = bake(one), bake(other)
    return one is other or (type(mine) is type(its) and bool(mine == its))


def _shown(value: Any) -> Any:
    """A value as a message can bear it."""
    if isinstance(value, torch.Tensor):
        return f"a view {list(value.shape)} at {value.data_ptr():#x}"
    return value
