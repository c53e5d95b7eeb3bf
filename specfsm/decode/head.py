"""A one-layer multi-token-prediction head: the draft model of the reference decode loop.

    state of token i ──norm──┐
                             ├─ concatenate ─ linear ─ one decoder layer ─ target's final norm ─▶ next state
    token i + 1 ─embed─norm──┘                          (own KV cache)                              │
                                                                        target's lm_head ─▶ token i + 2

A *state* is what the target's ``lm_head`` reads: the last hidden state after the final norm, transformers'
``last_hidden_state``. The head takes states and returns states, so it is applied to its own output to draft further
(``mtp_nextn`` > 1), and its drafts are ``lm_head(state)``. Embedding, final norm and ``lm_head`` are the target's.

After DeepSeek-V3's multi-token prediction (arXiv:2412.19437) and EAGLE (arXiv:2401.15077).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedModel

FORMAT = "specfsm-mtp-1"


class _Shared(NamedTuple):
    """The target's modules that the head calls. A tuple, so that they do not become the head's own parameters."""

    embedding: nn.Module
    norm: nn.Module
    lm_head: nn.Module


class MTPHead(nn.Module):
    """The draft head of a Llama target with this config.

    ``mlp_width`` is the width of the layer's MLP, by default the target's. ``attn_implementation`` is a name in
    transformers' attention interface, by default the target's; it is called as for any transformers layer, with the
    layer's index 0.
    """

    def __init__(
        self, config: LlamaConfig, *, mlp_width: int | None = None, attn_implementation: str | None = None
    ) -> None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

        super().__init__()
        width = config.hidden_size
        self.config = _one_layer(config, mlp_width, attn_implementation)
        self.state_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.token_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.fuse = nn.Linear(2 * width, width, bias=False)
        self.layer = LlamaDecoderLayer(self.config, layer_idx=0)
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.metadata: dict[str, str] = {}
        self._shared: _Shared | None = None

    def attach(self, target: PreTrainedModel) -> MTPHead:
        """Share this target's embedding, final norm and ``lm_head``; returns the head."""
        model: Any = target
        vocabulary, width = model.get_input_embeddings().weight.shape
        if (vocabulary, width) != (self.config.vocab_size, self.config.hidden_size):
            raise ValueError(
                f"the draft head is for a vocabulary of {self.config.vocab_size} and width {self.config.hidden_size}, "
                f"the target has {vocabulary} and {width}: train a head for it with `specfsm train-draft --target …`"
            )
        self._shared = _Shared(model.get_input_embeddings(), model.model.norm, model.get_output_embeddings())
        return self

    def forward(
        self,
        states: torch.Tensor,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        **attention_kwargs: Any,
    ) -> torch.Tensor:
        """Return the next states, shaped as ``states``.

        Axes: ``states`` [batch, seq, width] or [tokens, width], a state for each token i; ``token_ids`` [batch, seq]
        or [tokens], token i + 1; ``position_ids`` likewise, any numbering that grows by one a token. Two-axis input
        runs as a batch of one, so a paged attention function sees [1, heads, tokens, head_dim].
        ``attention_kwargs`` reach the attention function; ``attention_mask`` is its mask.
        """
        if states.dim() == 2:
            return self.forward(states[None], token_ids[None], position_ids[None], **attention_kwargs)[0]
        shared = self._shared
        if shared is None:
            raise RuntimeError("the draft head has no target: call head.attach(target) first")
        embedded = shared.embedding(token_ids)
        fused = self.fuse(torch.cat((self.state_norm(states), self.token_norm(embedded)), dim=-1))
        rotary = self.rotary(fused, position_ids)
        hidden = self.layer(fused, position_ids=position_ids, position_embeddings=rotary, **attention_kwargs)
        return cast("torch.Tensor", shared.norm(hidden))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The target's ``lm_head`` over states: [..., width] → [..., vocabulary]."""
        if self._shared is None:
            raise RuntimeError("the draft head has no target: call head.attach(target) first")
        return cast("torch.Tensor", self._shared.lm_head(states))

    def start_from(self, target: PreTrainedModel) -> MTPHead:
        """Start the layer as the target's last one, its input as state plus token; returns the head.

        With a wider MLP than the target's, the added columns start as noise that adds nothing yet.
        """
        model: Any = target
        with torch.no_grad():
            for name, ours in self.layer.named_parameters():
                theirs = model.model.layers[-1].get_parameter(name).to(ours)
                if ours.shape != theirs.shape and name.endswith("down_proj.weight"):
                    ours.zero_()
                ours[tuple(slice(size) for size in theirs.shape)] = theirs
            eye = torch.eye(self.config.hidden_size)
            self.fuse.weight.copy_(torch.cat((eye, eye), dim=1))
        return self

    def save(self, file: Path | str, metadata: Mapping[str, object] = {}) -> None:
        """Write the weights as bf16 safetensors; ``metadata`` (target, seed, nextn trained, …) travels with them."""
        from safetensors.torch import save_file

        state = {name: value.to("cpu", torch.bfloat16).contiguous() for name, value in self.state_dict().items()}
        config = self.config.to_dict() | {"_attn_implementation": None}
        facts = {name: str(value) for name, value in {**self.metadata, **metadata}.items()}
        save_file(state, str(file), metadata=facts | {"format": FORMAT, "config": json.dumps(config, default=str)})

    @classmethod
    def load(
        cls,
        file: Path | str,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        attn_implementation: str | None = None,
    ) -> MTPHead:
        """Read what `save` wrote, in eval mode. The facts saved with it are in ``metadata``."""
        from safetensors import safe_open
        from transformers import LlamaConfig

        if not Path(file).is_file():
            raise FileNotFoundError(f"no such draft head: {file}; train one with `specfsm train-draft --output {file}`")
        with safe_open(str(file), framework="pt") as opened:
            facts = dict(opened.metadata() or {})
            state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
        if facts.pop("format", None) != FORMAT:
            raise ValueError(f"{file} is no draft head of format {FORMAT}")
        head = cls(LlamaConfig.from_dict(json.loads(facts.pop("config"))), attn_implementation=attn_implementation)
        head.load_state_dict(state)
        head.metadata = facts
        for parameter in head.parameters():
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(False)
        return head.train(False).to(device)


def default_head() -> Path:
    """The head that the package ships, trained for the default target."""
    return Path(__file__).parent / "heads" / "smollm2-135m-mtp.safetensors"


def _one_layer(config: LlamaConfig, mlp_width: int | None, attn_implementation: str | None) -> LlamaConfig:
    from transformers import LlamaConfig

    values = config.to_dict() | {"num_hidden_layers": 1, "intermediate_size": mlp_width or config.intermediate_size}
    copied = LlamaConfig.from_dict(values)
    copied._attn_implementation = attn_implementation or config._attn_implementation or "sdpa"
    return copied
