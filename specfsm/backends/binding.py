"""One cache domain of a bound backend: its buffers and values, and what its refresh is made of."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import torch

from specfsm.backends.backend import Backend, attribute_in, new_buffer, shape_in
from specfsm.backends.resource import Alias, Buffer, DomainView, Staged
from specfsm.domain import Batch, Domain, KVManager
from specfsm.errors import UnknownMetadata
from specfsm.kernels.refresh import RefreshLaunch
from specfsm.states.resource import Ledger

__all__ = ["Binding"]

EPOCHS = count(1)
"""One count for all bindings, so that none takes another's epoch for its own."""


class Binding:
    """A backend's resources in one domain.

    Args:
        backend: the declaration.
        domain: which of the two.
        metadata: carries the device buffers under the declared attributes.
        manager: the domain's KV manager.
        axes: extents of the symbolic axes in this domain.
        device: where buffers that the metadata does not carry are made.

    Attributes:
        values: by place, what a switch puts on the metadata: buffers, references, views; None where none is made yet.
        hosts: by place, the host half that was filled last, of each Staged whose host half the metadata carries.
        side: the domain as an index.
        most_tokens: tokens of a batch that the buffers have room for; None where none has an entry for each token.
        staged: places of everything that is staged.
        tasks: place of each recipe resource → its bit in the launch's mask.
        before, launched, after: masks of what is refreshed before the launch, in it, and after it.
        sources: for each resource, mask of the buffers whose contents its refresh may read.
        generation, blocks_version: the manager's, when it was last looked at; -1 before.
        epoch: moves with whatever may have moved a buffer or replaced a pointer, and never returns to what it was.

    Raises:
        UnknownMetadata: an attribute is missing, or a buffer has not the declared dtype or shape.
    """

    def __init__(
        self,
        backend: Backend,
        domain: Domain,
        metadata: Any,
        manager: KVManager,
        axes: Mapping[str, int],
        device: torch.device,
    ) -> None:
        self.backend = backend
        self.domain = domain
        self.side = int(domain)
        self.places = {resource.name: place for place, resource in enumerate(backend.resources)}
        self.view = DomainView(domain, manager, manager.geometry, None, axes, self._value)
        self.present = [domain in resource.domains for resource in backend.resources]
        self.values: list[Any] = [None] * len(backend.resources)
        self.hosts: dict[int, torch.Tensor] = {}
        self.generation = self.blocks_version = -1
        self.epoch = next(EPOCHS)
        backend.require_manager(domain, manager)
        offenders = self._bind_buffers(metadata, device)
        if offenders:
            raise UnknownMetadata(
                f"{type(metadata).__qualname__} cannot be switched by {backend.name}",
                tuple(offenders),
                "let backend.allocate(metadata, target, draft, sizes, device) make them, or correct the engine's",
            )
        axes_of = {letter for each in backend.resources if isinstance(each, Buffer) for letter in each.letters}
        self.most_tokens = axes["T"] if "T" in axes_of else None
        self.staged = tuple(
            place
            for place, resource in enumerate(backend.resources)
            if isinstance(resource, Staged) and self.present[place]
        )
        self.tasks = self._tasks()
        self.launch = self._new_launch()
        self.before, self.launched, self.after = self._stages()
        self.sources = self._read_buffers(backend.ledger())

    @property
    def manager(self) -> KVManager:
        return self.view.manager

    @property
    def batch(self) -> Batch | None:
        return self.view.batch

    def _value(self, name: str) -> Any:
        return self.values[self.places[name]]

    def see(self, batch: Batch | None) -> None:
        """Take `batch` as the one that refreshes derive from."""
        view = self.view
        self.view = DomainView(view.domain, view.manager, view.geometry, batch, view.axes, view.value)

    def _bind_buffers(self, metadata: Any, device: torch.device) -> list[str]:
        offenders: list[str] = []
        for place, resource in enumerate(self.backend.resources):
            if not isinstance(resource, Buffer) or not self.present[place]:
                continue
            attribute = attribute_in(resource, self.domain)
            if attribute is None:
                self.values[place] = new_buffer(resource, self.view.axes, device)
            else:
                self.values[place] = getattr(metadata, attribute, None)
                offenders += misfits(resource, attribute, self.values[place], self.view.axes, self.domain)
        return offenders

    def _tasks(self) -> dict[int, int]:
        """Place of each recipe resource → its bit in the launch's mask."""
        places = [
            place
            for place, resource in enumerate(self.backend.resources)
            if isinstance(resource, Buffer) and resource.recipe is not None and self.present[place]
        ]
        return {place: 1 << task for task, place in enumerate(places)}

    def _new_launch(self) -> RefreshLaunch | None:
        resources = self.backend.resources
        recipes = {resources[place].name: resources[place].recipe for place in self.tasks}  # type: ignore[attr-defined]  # _tasks holds Buffers
        tensors = {
            resource.name: value
            for resource, value in zip(resources, self.values, strict=True)
            if isinstance(value, torch.Tensor)
        }
        return RefreshLaunch(recipes, tensors, self.view.geometry) if recipes else None

    def _stages(self) -> tuple[int, int, int]:
        """Masks of what is refreshed before the launch, in it, and after it."""
        before = launched = after = 0
        behind: set[str] = set()
        for place, resource in enumerate(self.backend.resources):
            bit = 1 << place
            sources = {*resource.reads, *((resource.of,) if isinstance(resource, Alias) else ())}
            if place in self.tasks:
                launched |= bit
            elif sources & behind:
                after |= bit
            else:
                before |= bit
                continue
            behind.add(resource.name)
        return before, launched, after

    def _read_buffers(self, ledger: Ledger) -> list[int]:
        """For each resource, the buffers whose contents its refresh may read; what is only dropped reads none."""
        resources = self.backend.resources
        buffers = [resource.name for resource in resources if isinstance(resource, Buffer)]
        return [
            0 if each.lazy else ledger.mask(name for name in buffers if name in ledger.sources[each.name])
            for each in resources
        ]

    def keep(self, place: int, value: Any) -> None:
        """Take `value`, of a kind that a graph bakes in, as the domain's."""
        if value is not self.values[place]:
            self.values[place], self.epoch = value, next(EPOCHS)

    def doubt(self) -> None:
        """A buffer was written by others, who may have moved it in place."""
        self.epoch = next(EPOCHS)

    def put_back(self, view: DomainView, values: list[Any]) -> None:
        """What an undone transition found."""
        self.view, self.values[:] = view, values
        self.doubt()

    def rebind(self, place: int, tensor: torch.Tensor) -> None:
        """Take `tensor` as the domain's buffer from now on."""
        resource = self.backend.resources[place]
        if not isinstance(resource, Buffer):
            raise TypeError(
                f"{resource.name} is a {resource.kind}: only a Table, Staged or Shared has a buffer to bind; "
                f"publish({resource.name!r}, value) gives it another value"
            )
        offenders = misfits(resource, resource.name, tensor, self.view.axes, self.domain)
        if offenders:
            raise ValueError("; ".join(offenders))
        if self.launch is not None and resource.name in self.launch.tensors:
            self.launch.rebind(resource.name, tensor)
        self.keep(place, tensor)


def misfits(resource: Buffer, attribute: str, value: Any, axes: Mapping[str, int], domain: Domain) -> list[str]:
    """What is wrong with the buffer that `attribute` carries: nothing there, dtype, or shape."""
    wanted = shape_in(resource, axes)
    axis_names = ", ".join(str(axis) for axis in resource.shape)
    if not isinstance(value, torch.Tensor):
        return [f"{attribute} [{domain}] is missing: {resource.dtype} [{axis_names}] = {list(wanted)} is due"]
    found = str(value.dtype).removeprefix("torch.")
    faults = []
    if found != resource.dtype:
        faults.append(f"{attribute} [{domain}] has the dtype {found}, not {resource.dtype}")
    if tuple(value.shape) != wanted:
        faults.append(f"{attribute} [{domain}] has the shape {list(value.shape)}, not [{axis_names}] = {list(wanted)}")
    if value.is_inference():
        faults.append(
            f"{attribute} [{domain}] was made in inference mode, which has no version counters; make it outside"
        )
    return faults
