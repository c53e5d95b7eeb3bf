"""Recipes, and the kernels that execute them. Each kernel `name.py` has its torch reference in `name_reference.py`."""

from specfsm.kernels.recipes import ExpandRows, GatherTable, Recipe, SlidingTable, SlotMapping, validate_bindings
from specfsm.kernels.refresh import RefreshLaunch
from specfsm.kernels.refresh_reference import refresh_reference

__all__ = [
    "ExpandRows",
    "GatherTable",
    "Recipe",
    "RefreshLaunch",
    "SlidingTable",
    "SlotMapping",
    "refresh_reference",
    "validate_bindings",
]
