"""Targets and drafts: what each spec makes, that weights are shared and caches are not, and the mistakes in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specfsm.decode.attention import ATTENTION
from specfsm.decode.head import MTPHead, default_head
from specfsm.decode.loop import DecodeLoop
from specfsm.decode.model import HeadDraft, Model, default_draft, early_exit, make_draft
from specfsm.domain import Batch
from tests.decode.conftest import VOCABULARY, draft, llama, plain, prompt, reference, settings, target

PLACE: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


def made(spec: str, load: Any = None) -> Any:
    return make_draft(spec, target(), load, **PLACE)


def test_self_is_the_target() -> None:
    """The same object: only the cache is the draft's own."""
    assert made("self") is target()
    loop = DecodeLoop(target(), made("self"), settings())
    assert loop.draft_cache is not None
    assert loop.draft_cache.pool.data_ptr() != loop.cache.pool.data_ptr()


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_early_exit_is_the_first_layers(layers: int) -> None:
    """It writes what a model made of these layers alone would, on the very weights of the target."""
    short = made(f"early-exit:{layers}")
    assert (short.layers, short.config.num_hidden_layers, short.shift) == (layers, layers, 0)
    theirs = {id(parameter) for parameter in target().lm.parameters()}
    assert {id(parameter) for parameter in short.lm.parameters()} < theirs
    loop = DecodeLoop(short, None, settings())
    loop.submit(prompt(1, 7), 8)
    cut = llama(1, damped=2)
    cut.model.layers = cut.model.layers[:layers]
    tokens = torch.tensor([prompt(1, 7)])
    expected = cut.generate(tokens, max_new_tokens=8, do_sample=False, use_cache=False, pad_token_id=0)
    assert loop.run() == {1: expected[0, 7:].tolist()}


def test_early_exit_leaves_the_target_whole() -> None:
    """Neither its layers nor its config change."""
    early_exit(target(), 1)
    assert (target().layers, len(target().lm.model.layers), target().config.num_hidden_layers) == (4, 4, 4)
    loop = DecodeLoop(target(), None, settings())
    loop.submit(prompt(2, 5), 6)
    assert loop.run() == {1: reference(prompt(2, 5), 6)}


@torch.no_grad()
def test_packed_tokens_are_each_requests_own() -> None:
    """States and logits of a packed batch are those that transformers gives each request alone."""
    prompts = [prompt(3, 7), prompt(4, 2), prompt(5, 8)]
    loop = DecodeLoop(target(), None, settings())
    lens = [len(each) for each in prompts]
    for request, length in enumerate(lens):
        loop.lifetime.begin(request)
        loop.cache.add(request)
        loop.cache.reserve(request, length)
    batch = Batch(range(3), lens, lens, num_contexts=3)
    loop.fsm.target_prepare(batch)
    forward_pass = loop.flavour.forward_pass(loop.metadata, batch, loop.fsm.publish)
    states = target()(torch.tensor([token for each in prompts for token in each]), None, forward_pass)
    for each, own in zip(prompts, torch.split(states, lens), strict=True):
        expected = plain()(input_ids=torch.tensor([each]), output_hidden_states=True)
        torch.testing.assert_close(own, expected.hidden_states[-1][0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(target().logits(own), expected.logits[0], atol=1e-4, rtol=1e-4)


def test_head_drafts_from_states() -> None:
    """One layer, shifted by one; it needs the target's states."""
    head = draft("head")
    assert (head.layers, head.shift) == (1, 1)
    assert isinstance(head, HeadDraft)
    assert head.head.config._attn_implementation == ATTENTION
    with pytest.raises(AssertionError, match="drafts from the target's states"):
        head(torch.tensor([1]), None, None)  # type: ignore[arg-type]  # no pass is needed to refuse


@pytest.mark.parametrize("file", [True, False])
def test_saved_head_is_loaded(tmp_path: Path, file: bool) -> None:
    """mtp:FILE gives the head of that file; a missing one is an error that names the command which trains one."""
    head: Any = draft("head")
    if not file:
        with pytest.raises(FileNotFoundError, match="specfsm train-draft"):
            made(f"mtp:{tmp_path / 'head.safetensors'}")
        return
    head.head.save(tmp_path / "head.safetensors")
    loaded = made(f"mtp:{tmp_path / 'head.safetensors'}")
    assert torch.equal(loaded.head.fuse.weight, head.head.fuse.weight.bfloat16().float())


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("early-exit", "early-exit needs a number of layers, as in early-exit:8, not 'early-exit'"),
        ("early-exit:two", "early-exit needs a number of layers, as in early-exit:8, not 'early-exit:two'"),
        ("early-exit:0", "early-exit:0 needs a number of layers from 1 to 3"),
        ("early-exit:4", "early-exit:4 needs a number of layers from 1 to 3"),
        ("/nowhere", "no draft '/nowhere': it is self, early-exit:K, mtp, mtp:FILE, or a transformers model's folder"),
    ],
)
def test_bad_specs_say_what_there_is(spec: str, says: str) -> None:
    """One line each."""
    with pytest.raises(ValueError, match=says) as caught:
        made(spec)
    assert "\n" not in str(caught.value)


def test_draft_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """Its token ids would mean something else; the same holds for a head."""
    head = MTPHead(llama(0, vocab_size=90).config)
    head.save(tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match="head is for a vocabulary of 90 and width 64, the target has 97 and 64"):
        made(f"mtp:{tmp_path / 'head.safetensors'}")
    with pytest.raises(ValueError, match=f"has a vocabulary of 90, the target one of {VOCABULARY}: a draft must share"):
        made(str(tmp_path), lambda path: llama(0, vocab_size=90))


def test_folder_of_the_same_vocabulary_is_a_draft(tmp_path: Path) -> None:
    """Whatever its shape; the loader is given the path."""
    asked: list[str] = []
    found = made(str(tmp_path), lambda path: asked.append(path) or llama(0, num_hidden_layers=1))
    assert isinstance(found, Model)
    assert (found.layers, asked) == (1, [str(tmp_path)])


def test_head_width_that_is_not_hidden_over_heads() -> None:
    """The cache takes the model's own head width."""
    wide = llama(5, head_dim=24, num_hidden_layers=2)
    loop = DecodeLoop(Model(wide), None, settings())
    assert loop.cache.geometry.head_dim == 24
    loop.submit(prompt(6, 5), 4)
    [output] = loop.run().values()
    alone = llama(5, head_dim=24, num_hidden_layers=2)
    expected = alone.generate(torch.tensor([prompt(6, 5)]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert output == expected[0, 5:].tolist()


@pytest.mark.parametrize(
    ("name", "spec"),
    [("/cache/SmolLM2-135M-Instruct.Q4_1-0.1.2-50ee2aebbd58", "mtp"), ("/models/another", "self"), ("", "self")],
)
def test_default_draft_is_the_shipped_head_for_its_target(name: str, spec: str) -> None:
    """Any other target drafts for itself."""
    lm = llama(0)
    lm.config.name_or_path = name
    assert default_draft(Model(lm)) == spec


def test_shipped_head_fits_its_target() -> None:
    """The file is in the package, small, and made for SmolLM2-135M's vocabulary and width."""
    assert default_head().stat().st_size < 12e6
    head = MTPHead.load(default_head())
    assert (head.config.vocab_size, head.config.hidden_size, head.metadata["nextn"]) == (49152, 576, "3")
