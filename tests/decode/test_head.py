"""The head takes and gives states, keeps the target's modules to the target, and survives a trip to disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from specfsm.decode.head import MTPHead
from specfsm.decode.training.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> Any:
    """A random two-layer Llama of width 48."""
    return tiny_target(0)[0]


@pytest.fixture
def head(target: Any) -> MTPHead:
    """A head that starts from that target, in eval mode."""
    torch.manual_seed(1)
    return MTPHead(target.config).start_from(target).attach(target).train(False)


def inputs(target: Any, batch: int = 2, seq: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States [batch, seq, width], token ids [batch, seq], position ids [batch, seq]."""
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, target.config.vocab_size, (batch, seq + 1), generator=generator)
    states = target.model(input_ids=token_ids[:, :-1]).last_hidden_state
    return states, token_ids[:, 1:], torch.arange(seq).expand(batch, seq)


@torch.no_grad()
def test_both_layouts_agree(target: Any, head: MTPHead) -> None:
    """[tokens, width] runs as a batch of one of [batch, seq, width]."""
    states, token_ids, position_ids = inputs(target)
    padded = head(states, token_ids, position_ids)
    assert padded.shape == states.shape
    torch.testing.assert_close(head(states[1], token_ids[1], position_ids[1]), padded[1])


@torch.no_grad()
def test_positions_count_only_relatively(target: Any, head: MTPHead) -> None:
    """Any numbering that grows by one gives the same states, so callers may count from either token."""
    states, token_ids, position_ids = inputs(target)
    shifted = head(states, token_ids, position_ids + 11)
    torch.testing.assert_close(shifted, head(states, token_ids, position_ids), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_later_tokens_are_not_seen(target: Any, head: MTPHead) -> None:
    """The default attention is causal: another last token changes only the last state."""
    states, token_ids, position_ids = inputs(target)
    other = token_ids.clone()
    other[:, -1] = (other[:, -1] + 1) % target.config.vocab_size
    before, after = head(states, token_ids, position_ids), head(states, other, position_ids)
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])


def test_any_registered_attention_is_used(target: Any) -> None:
    """The layer calls the function of that name, as layer 0, with the keyword arguments given to the head."""
    seen: list[tuple[int, torch.Size, object]] = []

    def spy(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any) -> Any:
        seen.append((module.layer_idx, key.shape, kwargs["pages"]))
        return torch.zeros_like(query).transpose(1, 2), None

    AttentionInterface.register("test_spy", spy)
    before = target.config._attn_implementation
    head = MTPHead(target.config, attn_implementation="test_spy").attach(target)
    states, token_ids, position_ids = inputs(target)
    head(states[0], token_ids[0], position_ids[0], pages="mine")
    assert seen == [(0, torch.Size([1, 2, 7, 8]), "mine")]
    assert target.config._attn_implementation == before


def test_shared_modules_stay_the_targets(target: Any, head: MTPHead) -> None:
    """Embedding, final norm and lm_head are neither saved, nor moved, nor trained with the head."""
    names = {name.split(".")[0] for name in head.state_dict()}
    assert names == {"state_norm", "token_norm", "fuse", "layer"}
    assert not {id(parameter) for parameter in head.parameters()} & {id(parameter) for parameter in target.parameters()}


@torch.no_grad()
def test_start_is_the_targets_last_layer(target: Any, head: MTPHead) -> None:
    """A wider MLP starts as the same function: its extra columns add nothing."""
    wide = MTPHead(target.config, mlp_width=160).start_from(target).attach(target)
    torch.testing.assert_close(wide(*inputs(target)), head(*inputs(target)))
    assert torch.equal(head.layer.self_attn.q_proj.weight, target.model.layers[-1].self_attn.q_proj.weight)


@torch.no_grad()
@pytest.mark.parametrize("mlp_width", [None, 160])
def test_round_trip(target: Any, tmp_path: Path, mlp_width: int | None) -> None:
    """A loaded head drafts the same, to bf16's precision, and knows what was said about it."""
    head = MTPHead(target.config, mlp_width=mlp_width).start_from(target).attach(target)
    head.save(tmp_path / "head.safetensors", {"seed": 3, "target": "tiny"})
    loaded = MTPHead.load(tmp_path / "head.safetensors").attach(target)
    assert loaded.metadata == {"seed": "3", "target": "tiny"}
    assert {value.dtype for value in load_file(tmp_path / "head.safetensors").values()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    for name, value in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16().float()), name
    assert torch.equal(loaded.rotary.inv_freq, head.rotary.inv_freq)


def test_without_target_is_an_error(target: Any) -> None:
    """A head that shares nothing says what to call."""
    head = MTPHead(target.config)
    with pytest.raises(RuntimeError, match=r"head\.attach"):
        head(*inputs(target))
    with pytest.raises(RuntimeError, match=r"head\.attach"):
        head.logits(inputs(target)[0])


def test_another_vocabulary_is_refused(target: Any) -> None:
    """A head does not fit a target with other tokens, and says which command mends it."""
    sizes = {"hidden_size": 48, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 6}
    other = LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes))
    with pytest.raises(ValueError, match=r"vocabulary of 257 .* the target has 99 and 48: .*specfsm train-draft"):
        MTPHead(target.config).attach(other)


def test_other_files_are_refused(tmp_path: Path) -> None:
    """A missing file, and one that is no head, each give one line."""
    with pytest.raises(FileNotFoundError, match="specfsm train-draft --output"):
        MTPHead.load(tmp_path / "none.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is no draft head"):
        MTPHead.load(tmp_path / "other.safetensors")
