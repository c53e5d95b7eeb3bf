"""The head's draft steps from every start at once, with the keys that the decode loop's draft cache would hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from specfsm.decode.head import MTPHead

ATTENTION = "specfsm_unrolled"
"""Name of `unrolled_attention` in transformers' attention interface."""


def unroll(head: MTPHead, states: Tensor, token_ids: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield the states of draft steps 1 … ``steps`` for a start at every position at once.

    ``states`` [batch, seq, width] are the target's, ``token_ids`` [batch, seq]. Step k at start i takes token i + k
    and its result predicts token i + k + 1. It sees what the decode loop's draft cache would hold: the keys that
    step 1 made of the target's states up to i, then those of its own earlier steps. Starts within ``steps`` of the
    end are padding. The head must have been made with ``attn_implementation=ATTENTION``.
    """
    memory: list[tuple[Tensor, Tensor]] = []
    positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
    for step in range(1, steps + 1):
        inputs = token_ids.roll(-step, dims=1)
        states = head(states, inputs, positions + (step - 1), memory=memory)
        yield states


def unrolled_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    memory: list[tuple[Tensor, Tensor]],
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of draft step k over step 1's keys up to the start and one key of each later step.

    ``query`` [batch, heads, seq, head_dim]; the keys of all steps are concatenated along seq, and the mask is causal
    on the first block, diagonal on the others.
    """
    memory.append((key, value))
    groups = cast("Any", module).num_key_value_groups
    keys = torch.cat([keys for keys, _ in memory], dim=2).repeat_interleave(groups, dim=1)
    values = torch.cat([values for _, values in memory], dim=2).repeat_interleave(groups, dim=1)
    if len(memory) == 1:
        attended = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling)
    else:
        bias = unrolled_bias(query, len(memory))
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scaling)
    return attended.transpose(1, 2).contiguous(), None


def unrolled_bias(query: Tensor, steps: int) -> Tensor:
    """The additive mask [1, 1, seq, steps * seq] of the last of ``steps`` draft steps."""
    seq = query.shape[2]
    causal = torch.ones((seq, seq), dtype=torch.bool, device=query.device).tril()
    own = torch.eye(seq, dtype=torch.bool, device=query.device)
    seen = torch.cat([causal] + [own] * (steps - 1), dim=1)
    return torch.where(seen, 0.0, -math.inf).to(query.dtype)[None, None]


def install() -> None:
    """Register `unrolled_attention` with transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, unrolled_attention)
