"""Rank agreement: all ranks take the same event, graph, batch and draft length, in the same step, or none does.

Ranks that run one model together meet in its collectives. One that skips the draft, or replays another graph, leaves
the others waiting there for ever. So each rank votes before it acts, in one small collective of its own, and whoever
differs is found on every rank at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import asdict, evolve, fields, frozen

from specfsm.domain import Batch
from specfsm.errors import RankDisagreement, RankSilent
from specfsm.states.phase import PHASE

if TYPE_CHECKING:
    from specfsm.orchestrator import Orchestrator

__all__ = ["POLICIES", "Consensus", "Vote"]

POLICIES: Mapping[str, tuple[str, ...]] = {
    "every step": ("target_prepare", "draft_forward", "draft_replay", "record", "skip"),
    "on recording": ("record",),
    "off": (),
}
"""Policy → the events that are voted on. ``draft_step`` is none of them: its window was agreed on as a whole. Nor are
phases inside a recording, which was."""

BYTES = 256
"""Of a vote in the collective: every rank's has the same size, whatever its graph key is."""
KEY = 120


@frozen
class Vote:
    """What one rank is about to do.

    Args:
        step: which step of the engine.
        event: the event's name; "record", or "skip" for a step that goes without the draft.
        graph: the graph's key in words; empty where no graph is recorded or replayed.
        batch: rows, padding included.
        draft_len: tokens that the draft proposes.
    """

    step: int
    event: str
    graph: str = ""
    batch: int = 0
    draft_len: int = 0

    def __str__(self) -> str:
        graph = f", graph {self.graph}" if self.graph else ""
        return f"step {self.step}: {self.event}, batch {self.batch}, draft length {self.draft_len}{graph}"

    def encode(self) -> torch.Tensor:
        """uint8 [BYTES]."""
        text = json.dumps(list(asdict(self).values())).encode()
        return torch.frombuffer(bytearray(text.ljust(BYTES)), dtype=torch.uint8)

    @classmethod
    def decode(cls, encoded: bytes) -> Vote:
        return cls(*json.loads(encoded))


def key_in_words(key: Hashable) -> str:
    """A graph's key, the same on every rank whose key reads the same; a long one is cut and told apart by a digest."""
    words = ascii(key)
    if len(words) <= KEY:
        return words
    digest = hashlib.sha256(words.encode()).hexdigest()[:16]
    return f"{words[: KEY - len(digest) - 3]}...{digest}"


class Consensus:
    """Votes before an event, and refuses it on every rank unless all votes are equal.

    Give it to the orchestrator as the *last* contract, so that what one rank refuses by itself is refused before it
    votes; such a rank tells the others with `skip`.

    Args:
        policy: "every step", "on recording" or "off".
        draft_len: tokens that the draft proposes; an engine whose draft length changes sets it before the step.
        group: the ranks that act together; by default a gloo group of all, made here: every rank makes its `Consensus`
            at the same point of its program. A group of another backend needs its `device`, and votes cost what a
            collective and a copy to the host cost there.
        timeout: seconds to wait for the others' votes.
        clock: the engine's own count of steps; by default the ``target_prepare`` events that were agreed on.

    Attributes:
        step: the step that was agreed on last; 0 before the first.

    Raises:
        ValueError: an unknown policy.
        RuntimeError: `torch.distributed` has no process group yet.
    """

    def __init__(
        self,
        policy: str = "every step",
        *,
        draft_len: int = 0,
        group: dist.ProcessGroup | None = None,
        timeout: float = 30.0,
        clock: Callable[[], int] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown policy {policy!r}: it is one of {', '.join(POLICIES)}")
        self.policy, self.draft_len = policy, draft_len
        self.events = POLICIES[policy]
        self.timeout, self.clock, self.device = timedelta(seconds=timeout), clock, device
        self.step = self._rounds = 0
        self._agreed: Vote | None = None
        self._silent: RankSilent | None = None
        if not self.events:
            return
        if not dist.is_initialized():
            raise RuntimeError("ranks cannot vote before torch.distributed.init_process_group; or use policy='off'")
        self.group: Any = group or dist.new_group(backend="gloo", timeout=self.timeout)
        self.ranks = dist.get_process_group_ranks(self.group)
        self.rank = dist.get_rank()

    def admit(self, fsm: Orchestrator, event: str, batch: Batch | None) -> None:
        """Vote for `event`. The phases inside a recording are none: it was voted on as a whole, and a capture can wait
        for no vote.

        Raises:
            RankDisagreement: votes differ; raised on every rank, with everyone's.
            RankSilent: a rank did not vote in time.
        """
        if fsm.recording is not None:
            return
        move = PHASE.find(fsm.state, event)
        step = self.clock() if self.clock is not None else self.step + (event == "target_prepare")
        vote = Vote(
            step,
            event,
            "" if fsm.asked is None else key_in_words(fsm.asked.key),
            0 if batch is None else batch.rows,
            self.draft_len,
        )
        self._decide(vote, fsm.state, move.to if move else None)

    def skip(self, fsm: Orchestrator, batch: Batch | None = None) -> None:
        """Vote for going without the draft in this step: because this rank's draft was refused, or need not run.

        Raises:
            RankDisagreement: another rank is about to draft. No rank does, then.
            RankSilent: a rank did not vote in time.
        """
        if "skip" in self.events:
            step = self.clock() if self.clock is not None else self.step
            rows = fsm.batch() if batch is None else batch
            self._decide(Vote(step, "skip", "", len(rows or ()), self.draft_len), fsm.state, None)

    def agreed(self, fsm: Orchestrator, step: int) -> Vote:
        """What the ranks agreed on last, if it was for this step.

        Raises:
            RankDisagreement: this step's vote was not taken yet: what is there belongs to another step.
        """
        if self._agreed is None or self._agreed.step != step:
            votes = {} if self._agreed is None else {self.rank: self._agreed}
            raise RankDisagreement(fsm.state, "agreed", rank=self.rank, votes=votes, fields=("step",), step=step)
        return self._agreed

    def _decide(self, vote: Vote, state: Any, to: Any) -> None:
        if self._silent is not None:
            raise evolve(self._silent, state=state, event=vote.event, to=to, broken=True)
        votes = self._gather(vote, state, to)
        differing = tuple(
            each.name for each in fields(Vote) if len({getattr(other, each.name) for other in votes.values()}) > 1
        )
        if differing:
            raise RankDisagreement(state, vote.event, to, rank=self.rank, votes=votes, fields=differing)
        self.step, self._agreed = vote.step, vote

    def _gather(self, vote: Vote, state: Any, to: Any) -> dict[int, Vote]:
        """Every rank's vote, in one collective."""
        own = vote.encode().to(self.device)
        gathered = [torch.empty_like(own) for _ in self.ranks]
        self._rounds += 1
        try:
            work: Any = dist.all_gather(gathered, own, group=self.group, async_op=True)
            work.wait(self.timeout)
        except RuntimeError as error:
            votes = self._roll_call(vote)
            missing = tuple(rank for rank in self.ranks if rank not in votes)
            self._silent = RankSilent(
                state,
                vote.event,
                to,
                rank=self.rank,
                votes=votes,
                missing=missing,
                timeout=self.timeout.total_seconds(),
            )
            raise self._silent from error
        return {rank: Vote.decode(bytes(each.tolist())) for rank, each in zip(self.ranks, gathered, strict=True)}

    def _roll_call(self, vote: Vote) -> dict[int, Vote]:
        """The collective failed, and does not say because of whom. Whoever is there leaves its vote in the store."""
        store: Any = self.group.get_group_store()
        keys = {rank: f"specfsm vote {self._rounds} of {rank}" for rank in self.ranks}
        store.set(keys[self.rank], bytes(vote.encode().tolist()))
        try:
            store.wait(list(keys.values()), self.timeout)
        except RuntimeError:
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        return {rank: Vote.decode(store.get(key)) for rank, key in keys.items()}
