"""The loss: cross entropy of each draft step's tokens against the target's distribution."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Distilled(NamedTuple):
    """Of every step and row: the loss [step, row], its gradient by the student's state, where the argmaxes agree."""

    loss: Tensor
    grad: Tensor
    agree: Tensor


Rows = Callable[[Tensor, Tensor, Tensor], Distilled]
"""`distill_rows` with its ``soft`` given: students, teacher, lm_head → losses."""


def distill_rows(students: Tensor, teacher: Tensor, lm_head: Tensor, soft: float) -> Distilled:
    """Cross entropy of the students' tokens against the teacher's: states [step, row, width] and [row, width].

    The goal is ``soft`` times the teacher's distribution plus the rest on its argmax, which is what greedy decoding
    accepts. The gradient is made at once, softmax minus goal: nothing of the size of the vocabulary is kept.
    """
    logits = (students @ lm_head.T).float()
    wanted = (teacher @ lm_head.T).float()
    best = wanted.argmax(-1)
    hit = torch.arange(wanted.shape[-1], device=wanted.device) == best[:, None]
    goal = soft * wanted.softmax(-1) + (1 - soft) * hit
    log_probs = logits.log_softmax(-1)
    grad = (log_probs.exp() - goal).to(lm_head.dtype)
    return Distilled(-(goal * log_probs).sum(-1), grad @ lm_head, logits.argmax(-1) == best)


class Distill(torch.autograd.Function):
    """`distill_rows` over any number of rows, in chunks of a fixed size, as one differentiable operation."""

    @staticmethod
    def forward(
        ctx: Any, students: Tensor, teacher: Tensor, lm_head: Tensor, chunk: int, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        count = len(teacher)
        padding = (0, 0, 0, -count % chunk)
        parts = zip(
            torch.split(F.pad(students.to(lm_head.dtype), padding), chunk, dim=1),
            torch.split(F.pad(teacher, padding), chunk),
            strict=True,
        )
        done = [rows(ours.contiguous(), theirs, lm_head) for ours, theirs in parts]
        loss, grad, agree = (torch.cat(each, dim=1)[:, :count] for each in zip(*done, strict=True))
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(agree)
        return loss, agree

    @staticmethod
    def backward(ctx: Any, weight: Tensor, _agree: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0] * weight[..., None], None, None, None, None


distill: Callable[..., tuple[Tensor, Tensor]] = Distill.apply
"""(students, teacher, lm_head, chunk, rows) → the loss and the agreement, each [step, row]."""


def distiller(target: Any, soft: float, steps: int, chunk: int) -> Rows:
    """`distill_rows` for a target, compiled where that pays: it fuses many passes over the logits into a few."""

    def rows(students: Tensor, teacher: Tensor, lm_head: Tensor) -> Distilled:
        return distill_rows(students, teacher, lm_head, soft)

    if target.device.type != "cuda":
        return rows
    compiled = torch.compile(rows, dynamic=False)
    lm_head = target.lm_head.weight
    states = lm_head.new_zeros((steps, chunk, lm_head.shape[1]))
    try:
        with torch.no_grad(), precision(target):  # as in training: it is compiled anew for another mode
            compiled(states, states[0], lm_head)
    except Exception as error:  # whatever the compiler lacks here, the plain function does the same, slower
        print(f"not compiled ({type(error).__name__}): training is slower", file=sys.stderr)
        return rows
    return compiled


def precision(target: Any) -> contextlib.AbstractContextManager[Any]:
    """The head's parameters stay float32; on CUDA its matrix products are bf16.

    To be entered anew after every optimizer step: inside, the bf16 copies of the parameters are made only once.
    """
    return torch.autocast("cuda", torch.bfloat16) if target.device.type == "cuda" else contextlib.nullcontext()
