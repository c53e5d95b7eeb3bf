"""One class for each mistake. Each carries its facts as attributes; its message says what would mend it.

Definition time: `InvalidTable`, `IncompleteBackend`, `UnknownMetadata`. Run time, all `IllegalTransition`: the
machine refused, and state, metadata and stamps are as they were. Terminal: `RestoreFailed`, an exception group.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from attrs import define, field, fields

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "ContentsViolated",
    "DraftContentInvalid",
    "GraphContractBroken",
    "IllegalTransition",
    "IncompleteBackend",
    "InvalidTable",
    "NestedEvent",
    "NestedPhase",
    "PaddingViolated",
    "PendingTransfer",
    "RankDisagreement",
    "RankSilent",
    "RefreshDeclined",
    "RestoreFailed",
    "RetiredRequest",
    "SpecFSMError",
    "StaleResource",
    "TargetMutated",
    "UnknownMetadata",
    "WindowOverflow",
    "WrongThread",
]


class SpecFSMError(Exception):
    """Everything that specfsm raises of its own. Never raised itself: catch it to catch all."""


@define(auto_exc=True, eq=False)
class InvalidTable(SpecFSMError, ValueError):
    """A machine does not keep the rules of `specfsm.states.table`.

    Raised when a table is built, and when an `Orchestrator` is given an observer with a hook that fits no state or
    event.

    Attributes:
        table: the machine's name: phase, resource, graph or transfer.
        offenders: one line for each rule that is broken.
    """

    table: str
    offenders: tuple[str, ...]

    def __str__(self) -> str:
        return _lines(f"the {self.table} machine cannot be built as declared", self.offenders)


@define(auto_exc=True, eq=False)
class IncompleteBackend(SpecFSMError, TypeError):
    """A backend's declaration leaves something open: an action, a name, an input, an address space.

    Raised when a `Backend` is built, with every offender at once.

    Attributes:
        backend: its name.
        offenders: one line for each, which says what is wrong with which resource.
    """

    backend: str
    offenders: tuple[str, ...]

    def __str__(self) -> str:
        return _lines(f"backend {self.backend} is not fully declared", self.offenders)


@define(auto_exc=True, eq=False)
class UnknownMetadata(SpecFSMError, TypeError):
    """The metadata (or a manager) is not one that a backend can switch. Never passed over in silence.

    Raised when an `Orchestrator` is built; and by a phase that finds that a manager's geometry has changed, since every
    buffer was made for the old one.

    Attributes:
        subject: what cannot be switched, or whose geometry changed.
        offenders: one line for each attribute, dtype, shape or member that does not fit.
        remedy: what would mend it.
    """

    subject: str
    offenders: tuple[str, ...]
    remedy: str

    def __str__(self) -> str:
        return _lines(self.subject, (*self.offenders, f"to mend: {self.remedy}"))


@define(auto_exc=True, eq=False)
class IllegalTransition(SpecFSMError, RuntimeError):
    """An event was refused. State, metadata and stamps are as they were.

    Raised itself, not as one of its subclasses, where the table has no such row, and where a contract of the engine
    refuses without saying more.

    Attributes:
        state: the state the machine is (still) in.
        event: the event that was refused.
        to: the state it would have led to; None where the table has no such row.
        legal: the events that the state accepts; None where that is not the reason.
        subject: what the event was fired for: a resource with its domain, a graph; empty where nothing needs naming.
        why: what stands against it, beside the table.
        mend: what would mend it.
    """

    state: Enum
    event: str
    to: Enum | None = None
    legal: tuple[str, ...] | None = field(default=None, kw_only=True)
    subject: str = field(default="", kw_only=True)
    why: str = field(default="", kw_only=True)
    mend: str = field(default="", kw_only=True)

    @property
    def arrow(self) -> str:
        return f"{self.state.name} --{self.event}--> {self.to.name if self.to else '?'} refused"

    def reasons(self) -> tuple[str, ...]:
        """What was found, one fact a line, then what would mend it."""
        subject, mend = self.subject and f"{self.subject}: ", self.mend
        if self.why:
            cause = self.why
        elif self.legal is None:
            cause = "a contract refused it and gave no reason"
            mend = mend or "let the contract raise a subclass of IllegalTransition whose reasons() say why"
        else:
            cause = f"{self.state.name} accepts {', '.join(self.legal) or 'nothing: the state has no exits'}"
            mend = mend or ("fire one of these first; the trace tells what led here" if self.legal else "")
        return (f"{subject}{cause}", *((f"to mend: {mend}",) if mend else ()))

    def __str__(self) -> str:
        return _lines(self.arrow, self.reasons())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied by its facts, so that an engine's worker can send it to whoever decides."""
        return _raised, (type(self), {each.name: getattr(self, each.name) for each in fields(type(self))})


@define(auto_exc=True, eq=False)
class NestedPhase(IllegalTransition):
    """The draft phase was entered while it is active. The first entry's originals would be lost.

    Raised by `draft_forward` in DRAFT_FORWARD and DRAFT_REPLAY: mostly an earlier step was left by an exception, and
    nobody restored.
    """

    def reasons(self) -> tuple[str, ...]:
        return (
            "the draft phase is active already; entering it again would record draft tables as the target's",
            "to mend: leave it first (end the with block, or call restore()); draft_step() makes the next draft token",
        )


@define(auto_exc=True, eq=False)
class NestedEvent(IllegalTransition):
    """An event was fired while another was under way: by an observer, a contract, or a refresh.

    Raised by any event; the traceback shows the one that was under way.
    """

    def reasons(self) -> tuple[str, ...]:
        return (
            "another event is under way: one fired inside it could not be undone with it",
            "to mend: fire it when the first has returned",
        )


@define(auto_exc=True, eq=False)
class WrongThread(IllegalTransition):
    """An event came from a thread other than the one that drives this orchestrator.

    Raised by any event.

    Attributes:
        owner: the name of the thread that drives it.
        caller: the name of the thread that fired the event.
    """

    owner: str = field(default="", kw_only=True)
    caller: str = field(default="", kw_only=True)

    def reasons(self) -> tuple[str, ...]:
        return (
            f"thread {self.caller!r} fired it, but thread {self.owner!r} drives this orchestrator",
            "one metadata object serves one cache at a time",
            "to mend: use one thread, or hand it over with fsm.adopt() in IDLE",
        )


@define(auto_exc=True, eq=False)
class StaleResource(IllegalTransition):
    """A resource that the event needs was not refreshed since one of its inputs moved.

    Raised by every event that requires freshness: `target_prepare`, `draft_forward`, `draft_step`, `draft_replay`; by
    `restore` for what did not follow the switch back; and while a graph is recorded.

    Attributes:
        backend: the backend's name.
        resource, domain: what is stale.
        moved: input → (version at the last refresh, version now).
        never: it was never refreshed at all.
        misbound: the metadata still carries the other cache's value.
        tampered: "written" or "rebound" without the machine being told (check level "tensors").
        recording: empty, or why a graph that is being recorded cannot hold it: "shared" (one buffer for both caches),
            "baked" (a Python value that is not there yet, or no longer true), "inside" (what goes stale within a
            recording only the graph can mend).
        resources: every stale resource, this one first.
    """

    backend: str = field(default="", kw_only=True)
    resource: str = field(default="", kw_only=True)
    domain: Any = field(default=None, kw_only=True)
    moved: dict[str, tuple[int, int]] = field(factory=dict, kw_only=True)
    never: bool = field(default=False, kw_only=True)
    misbound: bool = field(default=False, kw_only=True)
    tampered: str = field(default="", kw_only=True)
    recording: str = field(default="", kw_only=True)
    resources: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def place(self) -> str:
        return f"{self.backend}.{self.resource} [{self.domain}]"

    @property
    def cause(self) -> str:
        if self.tampered:
            return f"was {self.tampered} behind the machine's back since its last refresh"
        if self.recording == "shared":
            return "is one buffer for both caches: a recording can neither save it nor give it back"
        if self.misbound:
            return "still holds the other cache's value: its switch did not happen"
        if self.never:
            return f"was never refreshed (it is derived from {', '.join(self.moved)})"
        moves = ", ".join(f"{name} moved {was} → {now}" for name, (was, now) in self.moved.items())
        return f"is stale: {moves or 'it was edited'} since its last refresh"

    def reasons(self) -> tuple[str, ...]:
        others = [name for name in self.resources if name != self.resource]
        also = (f"stale beside it: {', '.join(others)}",) if others else ()
        return (f"{self.place} {self.cause}", *also, f"to mend: {self.remedy}")

    @property
    def remedy(self) -> str:
        if self.tampered:
            return f"declare it: dirty({self.resource!r}) for an edit, publish for a refresh, bind for another buffer"
        if self.recording:
            return self._remedy_in_a_recording
        if self.misbound:
            return f"let the transition switch {self.resource}; do not drop its action"
        return (
            f"refresh it before this event: drop no refresh of {self.resource}, or, if the engine writes it itself, "
            f"publish({self.resource!r}, tensor, domain={str(self.domain).upper()})"
        )

    @property
    def _remedy_in_a_recording(self) -> str:
        if self.recording == "shared":
            return f"give {self.resource} a twin (declare it a Table), or run this phase eagerly"
        if self.recording == "baked":
            return "run the phase once with this batch before the recording: what is baked in must be there, and true"
        return (
            f"let the graph mend it: write it there and publish({self.resource!r}, tensor) before this event, or "
            'declare refreshed_by="graph"; a recording refreshes nothing from the host'
        )


@define(auto_exc=True, eq=False)
class RefreshDeclined(StaleResource):
    """A resource's refresh ran and returned nothing: it wrote nothing, so the resource is as stale as before.

    Raised by the event that ran the refresh, or, where the engine refreshes by itself, by the first that needs what was
    published as None.
    """

    def reasons(self) -> tuple[str, ...]:
        return (
            f"{self.place} {self.cause}",
            "its refresh ran and returned nothing (declined)",
            "to mend: make the refresh return what it wrote, or find out why it could not write",
        )


@define(auto_exc=True, eq=False)
class ContentsViolated(IllegalTransition):
    """What a fresh resource holds is not what it must hold (check level "contents"). Observed at a later transition
    than the one that validated it, and reported once for each validation that finds it.

    Raised by any event, by `finish` and `settle` at the latest; in mode "log" it is only warned of.

    Attributes:
        backend: the backend's name.
        resource, domain: what was validated.
        failed: "bounds" (no place of this domain's pool), "owner" (another request's page), "sentinel" (a padded row or
            column holds something) or "contents" (another value than a recomputation gives).
        index: which element; empty for a value that is no buffer.
        row, column: of the table; None where it has no such axis.
        request: whose row it is; None for a padded one, or where rows are no requests.
        found, expected: what it holds, and what the recomputation gives.
        owner: whose page was found, where the manager tells; None for nobody's, or one that several requests share.
        since: the event after whose refresh it was validated.
        moved: input → (version at the last refresh, version then) of what moved though the resource declares that it
            does not read it: an invariant or alias that is none.
    """

    backend: str = field(default="", kw_only=True)
    resource: str = field(default="", kw_only=True)
    domain: Any = field(default=None, kw_only=True)
    failed: str = field(default="contents", kw_only=True)
    index: tuple[int, ...] = field(default=(), kw_only=True)
    row: int | None = field(default=None, kw_only=True)
    column: int | None = field(default=None, kw_only=True)
    request: int | None = field(default=None, kw_only=True)
    found: Any = field(default=None, kw_only=True)
    expected: Any = field(default=None, kw_only=True)
    owner: int | None = field(default=None, kw_only=True)
    since: str = field(default="", kw_only=True)
    moved: dict[str, tuple[int, int]] = field(factory=dict, kw_only=True)

    @property
    def place(self) -> str:
        at = "" if not self.index else f" at {list(self.index)}"
        names = {"row": self.row, "column": self.column, "request": self.request}
        known = ", ".join(f"{name} {value}" for name, value in names.items() if value is not None)
        return f"{self.backend}.{self.resource} [{self.domain}]{at}" + (f" ({known})" if known else "")

    @property
    def cause(self) -> str:
        why = {
            "bounds": "which is no place of this domain's pool",
            "owner": "a page of " + ("nobody" if self.owner is None else f"request {self.owner}"),
            "sentinel": "though nothing may stand there",
            "contents": "though its stamp is fresh",
        }
        return f"{why[self.failed]}; recomputed from its inputs it is {self.expected}"

    def reasons(self) -> tuple[str, ...]:
        moves = (
            f"declared not to read {name}; {name} moved {was} → {now} since its last refresh"
            for name, (was, now) in self.moved.items()
        )
        return (
            f"{self.place} holds {self.found}, {self.cause}",
            f"found by the validation after {self.since}: what ran since may have read it",
            *moves,
            f"to mend: {self.remedy}",
        )

    @property
    def remedy(self) -> str:
        if self.moved:
            return f"add {' or '.join(self.moved)} to what {self.resource} reads, if it does"
        return (
            f"find what writes it (or frees its pages) without a report; to go on now: dirty({self.resource!r}, "
            f"{str(self.domain).upper()}), and the next phase of that cache writes it again"
        )


@define(auto_exc=True, eq=False)
class TargetMutated(IllegalTransition):
    """A target resource was written, rebound or edited while the draft phase was active.

    Raised by `restore`: from level "stamps" on where the write was reported, or both caches share an address; at level
    "tensors" for any write that moved a tensor's version counter.

    Attributes:
        backend: the backend's name.
        resource: which of the target's.
        how: "written" or "rebound".
    """

    backend: str = field(default="", kw_only=True)
    resource: str = field(default="", kw_only=True)
    how: str = field(default="written", kw_only=True)

    def reasons(self) -> tuple[str, ...]:
        return (
            f"{self.backend}.{self.resource} [target] was {self.how} during the draft phase",
            "the target would read what the draft left there",
            "to mend: write the draft's twin instead",
            f"to go on now: dirty({self.resource!r}, TARGET), then restore(); the next target_prepare rewrites it",
        )


@define(auto_exc=True, eq=False)
class GraphContractBroken(IllegalTransition):
    """A graph would read something else than it was recorded with.

    Raised by `draft_replay`, before anything is refreshed that the graph cannot run on.

    Attributes:
        key: the graph's key.
        broken: one line for each (resource, domain) or bound that differs.
        resources: (resource, domain) of each that has another address, shape, stride, dtype or value.
    """

    key: Any = field(default=None, kw_only=True)
    broken: tuple[str, ...] = field(default=(), kw_only=True)
    resources: tuple[tuple[str, Any], ...] = field(default=(), kw_only=True)

    def reasons(self) -> tuple[str, ...]:
        return (
            *(f"graph {self.key}: {line}" for line in self.broken),
            "to mend: record the graph again, or run eagerly",
        )


@define(auto_exc=True, eq=False)
class PendingTransfer(IllegalTransition):
    """A staging buffer was written, or its event armed again, while its copy is in flight.

    Raised by code that drives a `StagingBuffer` itself; the machine's own refreshes wait instead.

    Attributes:
        resource: whom the buffer serves: a resource, or all of a backend's.
    """

    resource: str = field(default="", kw_only=True)

    def reasons(self) -> tuple[str, ...]:
        if self.event == "submit":
            return (
                f"the event behind the copy of {self.resource} was armed already, and the copy has not landed",
                "armed again, or counted on for a later copy, it would tell whoever waits of the wrong one",
                "to mend: send what is copied next from another buffer, or wait for this one",
            )
        return (
            f"the staging buffer of {self.resource} still feeds a copy that has not landed",
            "writing it now would change what the device receives",
            "to mend: wait for its event, or stage into the other buffer of the ring",
        )


@define(auto_exc=True, eq=False)
class WindowOverflow(IllegalTransition):
    """A request lacks pages for what the phase, or the draft window behind it, would write.

    Raised by the contract `Window`.

    Attributes:
        request, domain: the first that lacks room, and in which cache.
        short: (request, domain, tokens needed, tokens that fit its pages), one for each that lacks room.
    """

    short: tuple[tuple[int, Any, int, int], ...] = field(kw_only=True)

    @property
    def request(self) -> int:
        """The first request that lacks room."""
        return self.short[0][0]

    @property
    def domain(self) -> Any:
        """The cache in which it does."""
        return self.short[0][1]

    def reasons(self) -> tuple[str, ...]:
        return (
            *(
                f"request {request} needs room for {needed} tokens in the {domain}'s cache, but its pages hold {fits}"
                for request, domain, needed, fits in self.short
            ),
            "writing on would land in whatever the table holds behind its last page",
            "to mend: allocate its pages for the whole window first, shorten the window, or go without a draft",
        )


@define(auto_exc=True, eq=False)
class PaddingViolated(IllegalTransition):
    """A row that is nobody's, padded or a dummy's, would read and write pages that are not its own.

    Raised by the contract `Padding`.

    Attributes:
        domain: the cache in which it would.
        reached: (row, request, page, owner), one for each page. `request` is None for padded rows, `page` is None where
            a dummy has none for a token of its own, and `owner` is None where nobody holds the page, "several" where
            more than one request does.
    """

    domain: Any = field(kw_only=True)
    reached: tuple[tuple[int, int | None, int | None, int | str | None], ...] = field(kw_only=True)

    @property
    def row(self) -> int:
        """The first such row."""
        return self.reached[0][0]

    @property
    def request(self) -> int | None:
        """The dummy whose row it is; None for a padded row."""
        return self.reached[0][1]

    @property
    def page(self) -> int | None:
        """The first page that it would reach."""
        return self.reached[0][2]

    @property
    def owner(self) -> int | str | None:
        """Whose that page is."""
        return self.reached[0][3]

    def _line(self, row: int, request: int | None, page: int | None, owner: int | str | None) -> str:
        who = f"padded row {row}" if request is None else f"row {row}, the dummy {request},"
        if page is None:
            return f"{who} has no page in the {self.domain}'s cache for a token that it writes"
        held = {
            None: "which is free, and whose rows may be wanted again",
            "several": "which several requests hold",
        }.get(owner, f"which request {owner} holds")  # type: ignore[arg-type]  # a request's id has no entry
        return f"{who} resolves to page {page} of the {self.domain}'s cache, {held}"

    def reasons(self) -> tuple[str, ...]:
        lines = (self._line(*each) for each in self.reached)
        if self.request is None:
            remedy = f"keep page {self.page} from requests, pad with a sentinel that is no page, or pad with dummies"
        else:
            remedy = "give each dummy pages of its own in both caches, for every token that its row may write"
        return (*lines, "what the row writes there is read as the owner's", f"to mend: {remedy}")


@define(auto_exc=True, eq=False)
class DraftContentInvalid(IllegalTransition):
    """The draft would read, or an engine would save, rows that the draft's cache does not hold.

    Raised by the contract `DraftContent`: for a draft phase, and from `require` for a save (event "finalise").

    Attributes:
        request: the first that lacks rows.
        short: (request, rows that are valid in the draft's cache, rows that are needed), one for each request.
    """

    short: tuple[tuple[int, int, int], ...] = field(kw_only=True)

    @property
    def request(self) -> int:
        """The first request that lacks rows."""
        return self.short[0][0]

    def reasons(self) -> tuple[str, ...]:
        if self.event == "finalise":
            request, valid, needed = self.short[0]
            return (
                f"{needed} rows of request {request} would be saved, but the draft's cache holds {valid} for certain",
                "what is saved before the draft phase is over holds rubbish for the draft when it is loaded",
                "to mend: save it from finalise(request, length, hook), or after restore and wrote",
            )
        return (
            *(
                f"request {request} has {valid} valid rows in the draft's cache, but the draft would read {needed}"
                for request, valid, needed in self.short
            ),
            "its pages may be there (a prefix hit, a load-back), but no draft forward has filled them",
            "to mend: begin the draft's pass at the first row that is missing, so that it re-fills them",
        )


@define(auto_exc=True, eq=False)
class RankDisagreement(IllegalTransition):
    """Ranks that act together were about to act differently.

    Raised by the contract `Consensus` on every one of them; and from `agreed` where this step's vote was not taken yet.

    Attributes:
        rank: this rank.
        votes: rank → what it was about to do.
        fields: in what they differ.
        step: for an agreed value that was asked for, the step it was asked for.
    """

    rank: int = field(default=0, kw_only=True)
    votes: dict[int, Any] = field(factory=dict, kw_only=True)
    fields: tuple[str, ...] = field(default=(), kw_only=True)
    step: int | None = field(default=None, kw_only=True)

    @property
    def lines(self) -> tuple[str, ...]:
        """Each vote, with the ranks that cast it."""
        ranks: dict[str, list[str]] = {}
        for rank, vote in self.votes.items():
            ranks.setdefault(str(vote), []).append(str(rank))
        return tuple(f"rank {', '.join(each)}: {vote}" for vote, each in ranks.items())

    def reasons(self) -> tuple[str, ...]:
        if self.event == "agreed":
            last = "; ".join(str(vote) for vote in self.votes.values()) or "nothing"
            return (
                f"the ranks have not agreed on step {self.step} yet; the last that they agreed on is {last}",
                "to mend: vote first (fire the event, or skip), then read what was agreed",
            )
        return (
            f"the ranks differ in {', '.join(self.fields)}; this is rank {self.rank}",
            *self.lines,
            "to mend: decide from what all ranks know alike; a rank that goes without the draft says so with skip()",
        )


@define(auto_exc=True, eq=False)
class RankSilent(RankDisagreement):
    """A rank did not vote in time: it is dead, hangs, or took a path on which it does not vote.

    Raised by the contract `Consensus` on the ranks that did, and on the one that comes late.

    Attributes:
        missing: the ranks that did not; empty on the one that came late, when the others had given up.
        timeout: seconds that were waited.
        broken: the group was given up at an earlier event.
    """

    missing: tuple[int, ...] = field(default=(), kw_only=True)
    timeout: float = field(default=0.0, kw_only=True)
    broken: bool = field(default=False, kw_only=True)

    def reasons(self) -> tuple[str, ...]:
        who = f"rank {', '.join(map(str, self.missing))} did not vote within {self.timeout:g} s"
        if not self.missing:
            who = f"rank {self.rank} voted when the others had given up, after {self.timeout:g} s"
        return (
            who + (", at an earlier event: the group is broken since" if self.broken else ""),
            *self.lines,
            "to mend: find what that rank was doing; then make another Consensus on every rank",
        )


@define(auto_exc=True, eq=False)
class RetiredRequest(IllegalTransition):
    """A request's life is over, or is not: its results, its place in a batch or its pages were used against that.

    Raised by the contract `Lifetime` for a batch, and from `claim`, `require_free` and `begin`.

    Attributes:
        request: its id.
        generation: the life that is spoken of; None for one that never began, or whose pages are freed.
        steps: for a result, the step that computed it; else the steps in flight that may write to its pages.
        drafting: whether the draft phase that is active may.
    """

    request: int = field(kw_only=True)
    generation: int | None = field(default=None, kw_only=True)
    steps: tuple[int, ...] = field(default=(), kw_only=True)
    drafting: bool = field(default=False, kw_only=True)

    @property
    def named(self) -> str:
        return f"request {self.request}" + ("" if self.generation is None else f" (generation {self.generation})")

    def reasons(self) -> tuple[str, ...]:
        if self.event == "claim":
            return (
                f"{self.named} was retired while step {self.steps[0]} computed this result: it is nobody's",
                "to mend: drop this row; flight.live() gives the rows that still count",
            )
        if self.event in ("free", "begin"):
            return (
                f"the pages of {self.named} cannot be given away: {self.holders}",
                "to mend: retire it, and free its pages (or begin it anew) when fence() names it",
            )
        return (
            f"the batch names {self.named}, which does not live: its pages are, or will be, another's",
            "to mend: leave it out of the batch; begin() starts a new life",
        )

    @property
    def holders(self) -> str:
        """What keeps its pages from being freed."""
        flights = f"step {', '.join(map(str, self.steps))} in flight may write to them" if self.steps else ""
        phase = "the draft phase that is active may write to them" if self.drafting else ""
        return " and ".join(filter(None, (flights, phase))) or f"it is {self.state.value}, and fence() has not named it"


class RestoreFailed(SpecFSMError, ExceptionGroup):
    """A transition failed, and undoing it failed too. The machine is FAULTED; both errors are in the group.

    Raised by any event that activates or refreshes.

    Attributes:
        event: the event that failed.
        exceptions: the error of the transition, that of the undo, and any of an observer that was told.
    """

    def __new__(cls, event: str, errors: Sequence[Exception]) -> Self:
        message = (
            f"{event} failed and could not be undone: the metadata is neither target's nor draft's"
            " (to mend: rebuild or repair the metadata, then reset())"
        )
        group = super().__new__(cls, message, errors)
        group.event = event
        return group

    def __init__(self, event: str, errors: Sequence[Exception]) -> None:
        super().__init__(event, errors)

    event: str

    def __reduce__(self) -> tuple[Any, ...]:
        return RestoreFailed, (self.event, list(self.exceptions))

    def derive(self, excs: Sequence[Exception]) -> RestoreFailed:  # type: ignore[override]  # a group of Exceptions
        return RestoreFailed(self.event, excs)


def _raised(kind: type[IllegalTransition], facts: dict[str, Any]) -> IllegalTransition:
    return kind(**facts)


def _lines(head: str, facts: Sequence[str]) -> str:
    return "\n  ".join((head, *facts))
