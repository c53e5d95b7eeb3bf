"""Real processes, joined by gloo, that run what a test gives them. None can hang: each has a deadline of its own."""

from __future__ import annotations

import faulthandler
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["PATIENCE", "Ranks"]

PATIENCE = 60.0
"""Seconds after which a scenario that hangs is a failure, and its processes end."""


def serve(rank: int, count: int, path: str, inbox: Any, outbox: Any) -> None:
    """What a rank runs: one scenario after another. An error is an answer."""
    torch.set_num_threads(1)
    store = dist.FileStore(path, count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    while (scenario := inbox.get()) is not None:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        function, arguments = scenario
        try:
            outbox.put(("is", function(rank, *arguments)))
        except Exception as error:  # whatever it is, the test is told
            outbox.put(("raised", f"{error!r}: {error}"))
        faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


class Ranks:
    """So many processes, each waiting for scenarios.

    Args:
        count: how many.
        folder: where they meet.
    """

    def __init__(self, count: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.count = count
        self.inboxes, self.outboxes = ([context.Queue() for _ in range(count)] for _ in "io")
        self.processes = [
            context.Process(target=serve, args=(rank, count, str(folder / "store"), *pipes), daemon=True)
            for rank, pipes in enumerate(zip(self.inboxes, self.outboxes, strict=True))
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def run(self, scenario: Callable[..., Any], *arguments: Any, dead: tuple[int, ...] = ()) -> list[Any]:
        """What the scenario gives on each rank, but for those that it kills."""
        for inbox in self.inboxes:
            inbox.put((scenario, arguments))
        answers = [outbox.get(timeout=PATIENCE) for rank, outbox in enumerate(self.outboxes) if rank not in dead]
        raised = [answer for how, answer in answers if how == "raised"]
        assert not raised, raised
        return [answer for _, answer in answers]
