"""Two capture engines behind one interface: `torch.cuda.CUDAGraph`, and on a CPU a recording with the same semantics.

Recording executes nothing that anybody could see; a replay runs what was recorded, on the recording's addresses. So a
replay after an attribute was rebound reads the old buffer, and one after an in-place update reads the new contents.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from attrs import frozen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specfsm.backends.refresher import no_collection

__all__ = ["CaptureError", "CudaEngine", "GraphEngine", "RecordedEngine", "engine_for"]


class CaptureError(RuntimeError):
    """What was run cannot be captured, or was replayed before it was."""


class GraphEngine(Protocol):
    """Captures what runs inside `capture`, once, and repeats it."""

    def capture(self) -> AbstractContextManager[None]:
        """Record everything inside; nothing of it takes effect."""

    def replay(self) -> None:
        """Run what was recorded, on the addresses of the recording."""


def engine_for(device: torch.device | str) -> GraphEngine:
    """The engine of a device."""
    return CudaEngine() if torch.device(device).type == "cuda" else RecordedEngine()


class CudaEngine:
    """A CUDA graph."""

    def __init__(self) -> None:
        self.graph: Any = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        _require_fresh(self.graph)
        graph = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.graph(graph):
            yield
        self.graph = graph

    def replay(self) -> None:
        _require_captured(self.graph)
        self.graph.replay()


@frozen(eq=False)
class _Call:
    """One recorded operation.

    Args:
        fresh: (place among the outputs, the tensor that the recording made there): a temporary of the graph's own.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: tuple[tuple[int, torch.Tensor], ...]

    def run(self) -> None:
        outputs = tree_leaves(self.function(*self.args, **self.kwargs))
        for place, tensor in self.fresh:
            tensor.copy_(outputs[place])


class RecordedEngine:
    """Operations recorded with their actual tensors, and run again on the same storage."""

    def __init__(self) -> None:
        self.calls: list[_Call] | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        _require_fresh(self.calls)
        recorder = _Recorder()
        try:
            with _HostAccess(), recorder:
                yield
        finally:
            recorder.put_back()
        self.calls = recorder.calls

    @torch.no_grad()
    def replay(self) -> None:
        _require_captured(self.calls)
        assert self.calls is not None
        for call in self.calls:
            call.run()


def _require_fresh(captured: Any) -> None:
    if captured is not None:
        raise CaptureError("this engine holds a capture already: make another one with engine_for(device)")


def _require_captured(captured: Any) -> None:
    if captured is None:
        raise CaptureError("nothing was captured: run the phases once inside engine.capture()")


SYNCHRONISING = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
HOST_ACCESS = {
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.as_tensor,
    torch.from_numpy,
    torch.tensor,
}
"""What takes values from the device to the host or back without an operation that a recorder on a CPU would see."""
INDEXING = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_unsafe_index"}


class _HostAccess(TorchFunctionMode):
    """Refuses what waits for a device, though not for a CPU that stands in for one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_ACCESS:
            raise _waits(func.__name__)
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Notes every operation that writes or makes memory; views need no replay, since they share what they view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.calls: list[_Call] = []
        self.made: dict[int, torch.UntypedStorage] = {}
        self.saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _require_capturable(func, args, kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = _written(func, args, kwargs)
        for tensor in written:
            self._save(tensor)
        out = func(*args, **kwargs)
        known = {_key(tensor) for tensor in inputs}
        fresh = tuple(
            (place, leaf)
            for place, leaf in enumerate(tree_leaves(out))
            if isinstance(leaf, torch.Tensor) and _key(leaf) not in known
        )
        for _, tensor in fresh:
            self.made[_key(tensor)] = tensor.untyped_storage()
        if written or fresh:
            self.calls.append(_Call(func, args, kwargs, fresh))
        return out

    def _save(self, tensor: torch.Tensor) -> None:
        """Keep what a storage from before the capture held, before the capture first writes it."""
        key = _key(tensor)
        if key not in self.made and key not in self.saved:
            storage = tensor.untyped_storage()
            self.saved[key] = (storage, storage.clone())  # type: ignore[no-untyped-call]  # torch's

    def put_back(self) -> None:
        """Undo every write to memory from before the capture."""
        for storage, contents in self.saved.values():
            storage.copy_(contents)


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """The value that an operation was given for one of its arguments; None where it has no such argument."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name, argument.default_value)
    return None


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation writes in place."""
    aliased = (each for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write)
    values = [_argument(func, args, kwargs, each.name) for each in aliased]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _require_capturable(func: Any, args: Any, kwargs: Any) -> None:
    name = func._schema.name
    masks = name in INDEXING and any(
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )
    sized_by_contents = name == "aten::repeat_interleave" and _argument(func, args, kwargs, "output_size") is None
    if name in SYNCHRONISING or masks or sized_by_contents:
        raise _waits(name)
    if torch.Tag.nondeterministic_seeded in func.tags and _argument(func, args, kwargs, "dropout_p") != 0:
        raise CaptureError(f"{name} draws random numbers, which a replay would repeat: pass them in as a tensor")


def _waits(name: str) -> CaptureError:
    return CaptureError(
        f"{name} makes host and device wait for each other, which a captured phase cannot do: "
        "keep the value on the device, or compute it before the capture"
    )
