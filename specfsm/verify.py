"""What a transition must find true: freshness by masks, and at level "tensors" that nobody went behind its back."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

from specfsm.backends.resource import Buffer, Resource, Shared
from specfsm.errors import GraphContractBroken, IllegalTransition, RefreshDeclined, StaleResource, TargetMutated
from specfsm.states.phase import Phase
from specfsm.states.resource import bits

if TYPE_CHECKING:
    from specfsm.backends.binding import Binding
    from specfsm.domain import Batch
    from specfsm.graph import Graph
    from specfsm.orchestrator import Orchestrator
    from specfsm.states.table import Move

__all__ = ["Check"]


class Check(IntEnum):
    """How much is verified. Each level includes the ones before it."""

    OFF = 0  # nothing: a missed refresh is silent again
    STAMPS = 1  # freshness: integers only
    TENSORS = 2  # and identity and in-place version counters of every bound tensor
    CONTENTS = 3  # and what the tensors hold: see `specfsm.validation`

    @classmethod
    def named(cls, name: str | Check) -> Check:
        try:
            return name if isinstance(name, Check) else cls[name.upper()]
        except KeyError:
            levels = ", ".join(level.name.lower() for level in cls)
            raise ValueError(f"unknown check level {name!r}; it is one of {levels}") from None


TENSORS = Check.TENSORS  # looking an enum's member up takes 0.2 µs


def staleness(fsm: Orchestrator, move: Move, binding: Binding, stale: int, missing: int) -> StaleResource:
    """The error for what is stale, or did not follow the switch: it names the first that no other one explains."""
    ledger, domain = fsm.ledger, binding.domain
    mask = missing or stale
    roots = [place for place in bits(mask) if not _explained(fsm, place, mask)]
    declined = [place for place in roots if fsm.declined[domain] >> place & 1]
    place = (declined or roots)[0]
    name = ledger.names[place]
    return (RefreshDeclined if declined else StaleResource)(
        fsm.state,
        move.event,
        move.to,
        backend=fsm.backend.name,
        resource=name,
        domain=domain,
        moved=ledger.moved(domain, name),
        never=ledger.stamps[domain][place] is None,
        misbound=bool(missing) and fsm.recording is None,
        recording="" if fsm.recording is None else _unrecordable(fsm.backend.resources[place]),
        resources=tuple(ledger.names[each] for each in bits(stale | missing)),
    )


def _unrecordable(resource: Resource) -> str:
    """Why a recording cannot hold a resource that is stale in it; see `StaleResource.recording`."""
    if isinstance(resource, Shared):
        return "shared"
    return "inside" if isinstance(resource, Buffer) else "baked"


def no_recording(fsm: Orchestrator, event: str, key: Any) -> IllegalTransition:
    """The error for a recording or a replay that cannot begin here: graphs are recorded one at a time, from outside of
    the draft phase, and hold no replay."""
    if fsm.recording is None:
        why, mend = "the draft phase is active", "restore() first; the recording enters the phase by itself"
    else:
        why = f"graph {fsm.recording.key} is being recorded"
        mend = "end that recording first: a graph holds no other graph"
    return IllegalTransition(fsm.state, event, subject=f"graph {key}", why=why, mend=mend)


def _explained(fsm: Orchestrator, place: int, mask: int) -> bool:
    """Whether a producer of this resource is stale too: then that one is the news."""
    names = fsm.ledger.names
    return any(names[other] in fsm.ledger.sources[names[place]] for other in bits(mask) if other != place)


def mutation(fsm: Orchestrator, move: Move, place: int, how: str = "written") -> TargetMutated:
    name = fsm.ledger.names[place]
    return TargetMutated(fsm.state, move.event, move.to, backend=fsm.backend.name, resource=name, how=how)


def require_contract(fsm: Orchestrator, move: Move, graph: Graph, batch: Batch | None) -> None:
    """Refuse a replay whose graph would run on other addresses, shapes or bounds than it was recorded with. From level
    "tensors" on each address is looked at; below it, only where something was bound, published or refreshed since."""
    assert batch is not None, "a batch is required before contracts are asked"
    if fsm.check < TENSORS and graph.holds(fsm.bindings, batch):
        return
    broken = tuple(graph.breaches(fsm.bindings, batch))
    if broken:
        elsewhere = [each for each in graph.baked if each.differs(fsm.bindings[each.domain])]
        resources = tuple((fsm.ledger.names[each.place], each.domain) for each in elsewhere)
        raise GraphContractBroken(fsm.state, move.event, move.to, key=graph.key, broken=broken, resources=resources)


def require_untampered(fsm: Orchestrator, move: Move, entered: Binding) -> None:
    """Refuse `move` if a fresh buffer was rebound or written behind the machine's back, in the domain that is left or
    in the one that is entered."""
    for binding in dict.fromkeys((fsm.switch.active, entered)):
        for place, how in _tampered(fsm, binding):
            if move.event == "restore" and binding is fsm.switch.target:
                raise mutation(fsm, move, place, how)
            name = fsm.ledger.names[place]
            raise StaleResource(
                fsm.state,
                move.event,
                move.to,
                backend=fsm.backend.name,
                resource=name,
                domain=binding.domain,
                tampered=how,
                resources=(name,),
            )


def _tampered(fsm: Orchestrator, binding: Binding) -> Any:
    fresh = fsm.ledger.bound[binding.domain] & ~fsm.ledger.stale[binding.domain]
    if binding is not fsm.switch.active:
        fresh &= ~sum(1 << place for place in fsm.switch.shared)  # their contents are saved, and the draft's are there
    for place in bits(fresh):
        resource, value = fsm.backend.resources[place], binding.values[place]
        if resource.attribute in _shown(fsm, binding) and getattr(fsm.metadata, resource.attribute) is not value:
            yield place, "rebound"
        elif isinstance(resource, Buffer) and value._version != fsm.seen[binding.domain][place]:
            yield place, "written"


def _shown(fsm: Orchestrator, binding: Binding) -> tuple[str, ...]:
    """The attributes that show the values of `binding` now. A replay rebinds too little to tell."""
    if binding is not fsm.switch.active or fsm.state is Phase.DRAFT_REPLAY:
        return ()
    return fsm.carried
