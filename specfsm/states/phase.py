"""The phase machine: which cache the metadata serves, and how it may change.

Read a row as: in this state, this event leads there; on the way the metadata is bound to `activates`, whatever is
stale in `refreshes` is refreshed (and, where the engine says what will run there next, in `ahead`), and all of
`requires` must then hold, or the event is refused and undone.
`fault` and `reset` are the machine's own: a failed undo leads to FAULTED, and only `reset` leaves it.
"""

from __future__ import annotations

from enum import unique

from specfsm.domain import Domain
from specfsm.states.table import Move, Requirement, States, Table

__all__ = ["PHASE", "Phase"]

TARGET, DRAFT = Domain.TARGET, Domain.DRAFT
FRESH_TARGET, FRESH_DRAFT = Requirement.FRESH_TARGET, Requirement.FRESH_DRAFT
TARGET_INTACT, GRAPH = Requirement.TARGET_INTACT, Requirement.GRAPH


@unique
class Phase(States):
    IDLE = "idle"
    TARGET_PREPARE = "target_prepare"
    DRAFT_FORWARD = "draft_forward"
    DRAFT_REPLAY = "draft_replay"
    RESTORE = "restore"
    FAULTED = "faulted"


TARGET_PREPARE = Move(
    "target_prepare",
    Phase.TARGET_PREPARE,
    activates=TARGET,
    refreshes=(TARGET,),
    ahead=DRAFT,
    requires=(FRESH_TARGET,),
    why="a new step: the target's tables follow the new batch before its forward",
)
DRAFT_FORWARD = Move(
    "draft_forward",
    Phase.DRAFT_FORWARD,
    activates=DRAFT,
    refreshes=(DRAFT,),
    requires=(FRESH_DRAFT,),
    why="the draft model runs next: every table, pointer and plan follows to its cache",
)
DRAFT_STEP = Move(
    "draft_step",
    Phase.DRAFT_FORWARD,
    refreshes=(DRAFT,),
    requires=(FRESH_DRAFT,),
    why="the next draft token: lengths and layout moved, what reads them is derived again",
)
DRAFT_REPLAY = Move(
    "draft_replay",
    Phase.DRAFT_REPLAY,
    activates=DRAFT,
    refreshes=(DRAFT,),
    requires=(GRAPH, FRESH_DRAFT),
    why="a captured graph runs next: its addresses are baked, so their contents must be the draft's and fresh",
)
RESTORE = Move(
    "restore",
    Phase.RESTORE,
    activates=TARGET,
    requires=(TARGET_INTACT,),
    why="the draft is done: the originals return and nothing is refilled, since the target kept its own buffers",
)
FINISH = Move("finish", Phase.IDLE, why="the loop ends or pauses: no phase is active")
FAULT = Move("fault", Phase.FAULTED, why="an undo failed: the metadata is neither target's nor draft's")
RESET = Move("reset", Phase.IDLE, why="the engine repaired the metadata: the target is bound, all is stale")

PHASE = Table(
    name="phase",
    initial=Phase.IDLE,
    rows=(
        (Phase.IDLE, (TARGET_PREPARE, FAULT)),
        (Phase.TARGET_PREPARE, (TARGET_PREPARE, DRAFT_FORWARD, DRAFT_REPLAY, FINISH, FAULT)),
        (Phase.DRAFT_FORWARD, (DRAFT_STEP, DRAFT_REPLAY, RESTORE, FAULT)),
        (Phase.DRAFT_REPLAY, (DRAFT_REPLAY, RESTORE, FAULT)),
        (Phase.RESTORE, (TARGET_PREPARE, FINISH, FAULT)),
        (Phase.FAULTED, (RESET,)),
    ),
)
