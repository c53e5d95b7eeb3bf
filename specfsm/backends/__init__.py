"""The attention backends by name. Naming one imports it, and torch with it; the list of names does not."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specfsm.backends.backend import Backend

__all__ = ["BACKENDS", "named"]

BACKENDS = {
    "trtllm": "Trtllm",
    "flash_mla": "FlashMLA",
    "dsa": "DSA",
    "deepseek_v4": "DeepSeekV4",
}
"""Name of a backend, which is its module's too → its class."""


def named(name: str) -> Backend:
    """The backend of this name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}: it is one of {', '.join(BACKENDS)}")
    make: Any = getattr(import_module(f"specfsm.backends.{name}"), BACKENDS[name])
    backend: Backend = make()
    return backend
