"""Triton decides once, when a kernel is decorated, whether it is interpreted: so before anything imports one."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
