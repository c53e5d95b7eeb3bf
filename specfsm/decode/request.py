"""What a loop is asked to decode, how, and what it answers."""

from __future__ import annotations

import torch
from attrs import define, field, frozen
from attrs.validators import ge, in_, optional

from specfsm.domain import RowOrder

__all__ = ["Emission", "Request", "Settings"]


@frozen(kw_only=True)
class Settings:
    """How a loop is run.

    Args:
        backend: name of an attention backend, see `specfsm.decode.attention.FLAVOURS`.
        draft_len: the largest L, tokens that the draft proposes a step; see `DecodeLoop.draft_len`.
        max_requests: rows of a batch.
        max_tokens: longest request, prompt and output together.
        blocks, draft_blocks: pages of each pool; by default enough for every row at its longest.
        row_order: how the managers order their rows.
        host_blocks: pages of each cache's host pool.
        tokens_per_block, draft_tokens_per_block: page sizes; by default the backend's own.
        graphs: "off", "whole" (target, acceptance and draft in one graph) or "draft" (the draft phase alone).
        graph_sizes: batch sizes that are captured; a batch is padded to the next one, and a larger one runs eagerly.
        kernels: "torch", or "flash_mla" for the real kernel of that backend (a Hopper GPU, bfloat16).
        overlap: the host prepares step n + 1 while the device runs step n.
        chunk: tokens of a prompt that a step prefills at most; by default all of them.
        prefix_cache: a request begins with the pages that an earlier one left of the same prompt.
        unified: the reason why the draft keeps its KV in the target's cache, in layers behind the target's; by default
            it has a cache of its own. Then the pages are the target's, whatever is said of the draft's.
        idles: keep dummies for `DecodeLoop.idle` although nothing is padded to a captured size.
    """

    backend: str = "trtllm"
    draft_len: int = 3
    max_requests: int = 4
    max_tokens: int = 2048
    blocks: int | None = None
    draft_blocks: int | None = None
    row_order: RowOrder = RowOrder.BATCH
    host_blocks: int = 8
    tokens_per_block: int | None = None
    draft_tokens_per_block: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
    graphs: str = field(default="off", validator=in_(("off", "whole", "draft")))
    graph_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    kernels: str = field(default="torch", validator=in_(("torch", "flash_mla")))
    overlap: bool = False
    chunk: int | None = field(default=None, validator=optional(ge(1)))
    prefix_cache: bool = False
    unified: str | None = None
    idles: bool = False

    @property
    def dummies(self) -> int:
        """Requests that are nobody's: enough for a batch of nothing else."""
        return self.max_requests if self.idles or self.graphs != "off" else 0

    @property
    def window(self) -> int:
        """Tokens that may be written past the last one the host knows of: a step verifies 1 + L, then drafts L more."""
        return (self.draft_len + 1) * (2 if self.overlap else 1) + self.draft_len

    def padded(self, rows: int) -> int:
        """Rows that a batch of this many requests is run with."""
        if self.graphs == "off":
            return rows
        return min((size for size in self.graph_sizes if rows <= size <= self.max_requests), default=rows)


@define
class Request:
    """One request.

    Args:
        tokens: prompt and output so far.
        target_rows: how many rows of the target's cache are made from `tokens` and stay valid. (The draft's are counted
            by `DecodeLoop.content`.)
        drafted: what the target verifies next.
        states: the target's states that the draft has not seen yet, [rows, width].
        probs: [L, vocabulary], what `drafted` was drawn from; None when greedy.
    """

    id: int
    tokens: list[int]
    prompt_len: int
    max_new_tokens: int
    target_rows: int = 0
    drafted: list[int] = field(factory=list)
    states: torch.Tensor | None = None
    probs: torch.Tensor | None = None

    @property
    def prefilled(self) -> bool:
        """Whether the target's cache has all of its tokens but the last, which the next step reads."""
        return self.target_rows + 1 == len(self.tokens)

    def speculates(self, draft_len: int) -> bool:
        """Whether it is past its prompt, and its draft is whole."""
        return self.prefilled and len(self.drafted) == draft_len

    def restart(self, rows: int) -> None:
        """Keep the tokens, and of the target's cache the first `rows`; whatever else was made of them is made again."""
        self.target_rows, self.drafted, self.states, self.probs = rows, [], None, None

    @property
    def remaining(self) -> int:
        return self.max_new_tokens - (len(self.tokens) - self.prompt_len)


@frozen
class Emission:
    """What one step wrote for one request.

    Args:
        tokens: in order; the first `accepted` of them were drafted.
        proposed: tokens that the draft had proposed.
        finished: nothing follows.
    """

    request: int
    tokens: tuple[int, ...]
    accepted: int
    proposed: int
    finished: bool
