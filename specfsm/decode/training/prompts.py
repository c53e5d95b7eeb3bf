"""The prompts: templates of ``prompts.toml`` filled with its words, and user turns that the target writes."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

_TABLES = tomllib.loads(Path(__file__).with_name("prompts.toml").read_text(encoding="utf-8"))
WORDS: dict[str, list[str]] = _TABLES["words"]
"""What the templates' slots are filled with. The last quarter of each list is held out."""
TEMPLATES: dict[str, list[str]] = _TABLES["templates"]
"""The kinds of prompt. The last three templates of each kind are held out."""
HELD_OUT_TEMPLATES = 3
HELD_OUT_SHARE = 4
ASKED = "asked by the target"
"""The kind of the prompts that the target writes."""

Prompt = tuple[str, list[int]]
"""A kind, and the tokens of a chat up to where the answer begins."""


def held(items: Sequence[str], count: int, held_out: bool) -> Sequence[str]:
    """The last ``count`` items if ``held_out``, else the others."""
    return items[-count:] if held_out else items[:-count]


def make_prompts(count: int, seed: int, *, held_out: bool = False) -> list[tuple[str, str]]:
    """Up to ``count`` different pairs (kind, prompt), the kinds in turn; fewer only if the combinations run out."""
    rng = random.Random(f"{seed} {held_out}")
    words = {name: held(items, max(2, len(items) // HELD_OUT_SHARE), held_out) for name, items in WORDS.items()}
    kinds = list(TEMPLATES)
    found: dict[str, str] = {}
    for attempt in range(4 * count):
        if len(found) == count:
            break
        kind = kinds[attempt % len(kinds)]
        template = rng.choice(held(TEMPLATES[kind], HELD_OUT_TEMPLATES, held_out))
        found.setdefault(re.sub(r"{(\w+)}", lambda slot: rng.choice(words[slot[1]]), template), kind)
    return [(kind, prompt) for prompt, kind in found.items()]


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of chats with one user turn each, up to where the answer begins."""
    before, after = _around(tokenizer)
    return _ids(tokenizer, [before + text + after for text in texts])


def user_turn(tokenizer: Any) -> list[int]:
    """The token ids of a chat up to where the user begins to write."""
    before, _ = _around(tokenizer)
    return _ids(tokenizer, [before])[0]


def _around(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before and after a user's turn."""
    messages = [{"role": "user", "content": "\0"}]
    chat: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    before, after = chat.split("\0")
    return before, after


def _ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return cast("list[list[int]]", tokenizer(texts, add_special_tokens=False)["input_ids"])
