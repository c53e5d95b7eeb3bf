"""Rules beyond freshness, each a contract that an orchestrator asks before anything changes.

What they judge is what only the engine knows: room in the pools, the life of a request, what the draft's cache holds,
what the other ranks do. The engine reports it; the contract refuses the event that does not fit.
"""

from __future__ import annotations
