"""A target of no use but for tests: random, with bytes for tokens."""

from __future__ import annotations

from typing import Any

import torch


def tiny_target(seed: int) -> tuple[Any, Any]:
    """A random two-layer target and a byte tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    tokenizer_class: Any = PreTrainedTokenizerFast
    tokenizer = tokenizer_class(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = "{% for m in messages %}>{{ m['content'] }}<|end|>{% endfor %}"
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target: Any = LlamaForCausalLM(config)
    return target.train(False).requires_grad_(False), tokenizer
