"""specfsm: the switch between a target's and a draft's KV cache, as a state machine.

The public names are imported when they are first used, so that `specfsm.states` and `specfsm.domain` stay free of
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specfsm.backends.backend import Backend, Sizes, backend_for, register
    from specfsm.backends.deepseek_v4 import DeepSeekV4
    from specfsm.backends.dsa import DSA
    from specfsm.backends.flash_mla import FlashMLA
    from specfsm.backends.resource import Alias, Cache, Plan, Pointer, Shared, Staged, Table
    from specfsm.backends.trtllm import Trtllm
    from specfsm.contracts.consensus import Consensus
    from specfsm.contracts.content import DraftContent
    from specfsm.contracts.lifetime import Lifetime
    from specfsm.contracts.padding import Padding
    from specfsm.contracts.window import Window
    from specfsm.domain import (
        NOBODY,
        SHARED,
        AddressSpace,
        Batch,
        Domain,
        Geometry,
        KVManager,
        OwningKVManager,
        RowOrder,
        SlidingKVManager,
        TrackingKVManager,
        UnifiedCache,
        Unit,
    )
    from specfsm.errors import (
        ContentsViolated,
        DraftContentInvalid,
        GraphContractBroken,
        IllegalTransition,
        IncompleteBackend,
        InvalidTable,
        NestedEvent,
        NestedPhase,
        PaddingViolated,
        PendingTransfer,
        RankDisagreement,
        RankSilent,
        RefreshDeclined,
        RestoreFailed,
        RetiredRequest,
        SpecFSMError,
        StaleResource,
        TargetMutated,
        UnknownMetadata,
        WindowOverflow,
        WrongThread,
    )
    from specfsm.graph import Graph
    from specfsm.orchestrator import Contract, Orchestrator
    from specfsm.states.phase import Phase
    from specfsm.trace import Trace
    from specfsm.verify import Check

__version__ = "0.1.0"

_HOMES = {
    "backends.backend": ("Backend", "Sizes", "backend_for", "register"),
    "backends.deepseek_v4": ("DeepSeekV4",),
    "backends.dsa": ("DSA",),
    "backends.flash_mla": ("FlashMLA",),
    "backends.resource": ("Alias", "Cache", "Plan", "Pointer", "Shared", "Staged", "Table"),
    "backends.trtllm": ("Trtllm",),
    "contracts.consensus": ("Consensus",),
    "contracts.content": ("DraftContent",),
    "contracts.lifetime": ("Lifetime",),
    "contracts.padding": ("Padding",),
    "contracts.window": ("Window",),
    "domain": (
        "NOBODY",
        "SHARED",
        "AddressSpace",
        "Batch",
        "Domain",
        "Geometry",
        "KVManager",
        "OwningKVManager",
        "RowOrder",
        "SlidingKVManager",
        "TrackingKVManager",
        "UnifiedCache",
        "Unit",
    ),
    "errors": (
        "ContentsViolated",
        "DraftContentInvalid",
        "GraphContractBroken",
        "IllegalTransition",
        "IncompleteBackend",
        "InvalidTable",
        "NestedEvent",
        "NestedPhase",
        "PaddingViolated",
        "PendingTransfer",
        "RankDisagreement",
        "RankSilent",
        "RefreshDeclined",
        "RestoreFailed",
        "RetiredRequest",
        "SpecFSMError",
        "StaleResource",
        "TargetMutated",
        "UnknownMetadata",
        "WindowOverflow",
        "WrongThread",
    ),
    "graph": ("Graph",),
    "orchestrator": ("Contract", "Orchestrator"),
    "states.phase": ("Phase",),
    "trace": ("Trace",),
    "verify": ("Check",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    *_HOME,
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'specfsm' has no attribute {name!r}")
    return getattr(import_module(f"specfsm.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted((*globals(), *_HOME))
