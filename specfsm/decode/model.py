"""Target and drafts: transformers models, run over packed tokens with paged attention."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Protocol

import torch

from specfsm.decode.attention import ATTENTION, Pass, install
from specfsm.decode.head import MTPHead, default_head

__all__ = ["Draft", "HeadDraft", "Model", "default_draft", "early_exit", "make_draft"]


class Draft(Protocol):
    """What proposes tokens, with a KV cache of its own.

    Attributes:
        config: transformers' own; its KV heads and their width are those of the cache.
        layers: layers that keep keys and values.
        shift: 0 where cache row i is made from token i; 1 where it is made from the state of token i and token i + 1.
    """

    config: Any
    layers: int
    shift: int

    def __call__(self, tokens: torch.Tensor, states: torch.Tensor | None, forward_pass: Pass) -> torch.Tensor:
        """Tokens [T], and with shift 1 states [T, width] → states [T, width]."""

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """States [n, width] → [n, vocabulary]."""


class Model:
    """A causal language model over packed tokens.

    Args:
        lm: from transformers; its attention is replaced by the paged one.
    """

    shift = 0

    def __init__(self, lm: Any) -> None:
        install()
        lm.set_attn_implementation(ATTENTION)
        self.lm = lm.eval()
        self.config = lm.config
        self.layers = int(lm.config.num_hidden_layers)

    def __call__(self, tokens: torch.Tensor, states: torch.Tensor | None, forward_pass: Pass) -> torch.Tensor:
        """Tokens [T] → states [T, width], after the final norm."""
        out = self.lm.base_model(
            input_ids=tokens[None],
            position_ids=forward_pass.positions[None],
            attention_mask=torch.ones_like(tokens[None]),  # without one transformers looks for packing on the host
            use_cache=False,
            forward_pass=forward_pass,
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        head: Any = self.lm.get_output_embeddings()
        scores: torch.Tensor = head(states)
        return scores


class HeadDraft:
    """A trained multi-token-prediction head on the target's states."""

    layers = 1
    shift = 1

    def __init__(self, head: MTPHead, target: Model) -> None:
        head.config._attn_implementation = ATTENTION
        self.head = head.attach(target.lm)
        self.config = head.config

    def __call__(self, tokens: torch.Tensor, states: torch.Tensor | None, forward_pass: Pass) -> torch.Tensor:
        assert states is not None, "a head drafts from the target's states"
        kwargs: dict[str, Any] = {"forward_pass": forward_pass, "attention_mask": None}
        return self.head.forward(states, tokens, forward_pass.positions, **kwargs)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.head.logits(states)


def early_exit(target: Model, layers: int) -> Model:
    """The target's first layers under its own norm and head; the weights are shared, the cache is not."""
    if not 0 < layers < target.layers:
        raise ValueError(f"early-exit:{layers} needs a number of layers from 1 to {target.layers - 1}")
    lm = copy.copy(target.lm)
    lm._modules = dict(lm._modules)
    body = copy.copy(lm.base_model)
    body._modules = dict(body._modules)
    body.layers = body.layers[:layers]
    body.config = copy.copy(body.config)
    body.config.num_hidden_layers = layers
    setattr(lm, lm.base_model_prefix, body)
    lm.config = body.config
    return Model(lm)


SHIPPED_FOR = "SmolLM2-135M-Instruct"
"""The target that the shipped head was trained for, as the name of its folder begins."""


def default_draft(target: Model) -> str:
    """The draft of a target where none is named: the shipped head for its own target, else the target itself."""
    return "mtp" if Path(target.config.name_or_path or "").name.startswith(SHIPPED_FOR) else "self"


def make_draft(spec: str, target: Model, load: Any, *, dtype: torch.dtype, device: str) -> Draft:
    """The draft that ``--draft`` names.

    Args:
        spec: "self", "early-exit:K", "mtp", "mtp:FILE", or the path of a transformers model.
        load: ``path → model``, for the last.

    Raises:
        ValueError: the spec names nothing, or a model of another vocabulary.
    """
    if spec == "self":
        return target
    kind, _, argument = spec.partition(":")
    if kind == "early-exit":
        if not argument.isdigit():
            raise ValueError(f"early-exit needs a number of layers, as in early-exit:8, not {spec!r}")
        return early_exit(target, int(argument))
    if kind == "mtp":
        file = Path(argument) if argument else default_head()
        return HeadDraft(MTPHead.load(file, dtype=dtype, device=device, attn_implementation=ATTENTION), target)
    if not Path(spec).exists():
        raise ValueError(
            f"no draft {spec!r}: it is self, early-exit:K, mtp, mtp:FILE, or a transformers model's folder"
        )
    draft = Model(load(spec))
    if draft.config.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"the draft {spec} has a vocabulary of {draft.config.vocab_size}, the target one of "
            f"{target.config.vocab_size}: a draft must share the target's tokenizer"
        )
    return draft
