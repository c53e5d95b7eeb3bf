"""FlashMLA's schedule in plain torch: which part of which request each of a fixed number of workers attends to."""

from __future__ import annotations

import torch
from attrs import frozen

__all__ = ["Splits", "plan_splits"]

PARTS = 8
"""Workers; on a GPU the multiprocessor count decides."""


def plan_splits(lens: torch.Tensor, page: int, parts: int = PARTS) -> tuple[torch.Tensor, torch.Tensor]:
    """Deal the blocks of all requests out evenly.

    Args:
        lens: int [n], KV length of each request.
        page: tokens a block.

    Returns:
        tile scheduler metadata, i32 [parts, 8]: first request and block of each worker, last request and the block
        after its last, then zeros; a worker without work starts at n and ends at -1.
        number of splits, i32 [n + 1]: pieces of all requests before each.
    """
    blocks = [-(-int(length) // page) for length in lens.tolist()]
    share = max(1, -(-sum(blocks) // parts))
    tiles = torch.zeros((parts, 8), dtype=torch.int32)
    tiles[:, 0], tiles[:, 2] = len(blocks), -1
    pieces = [0] * len(blocks)
    request = block = 0
    for part in range(parts):
        left = share
        if request == len(blocks):
            break
        tiles[part, 0], tiles[part, 1] = request, block
        while left and request < len(blocks):
            taken = min(left, blocks[request] - block)
            left, block = left - taken, block + taken
            pieces[request] += 1
            tiles[part, 2], tiles[part, 3] = request, block
            if block == blocks[request]:
                request, block = request + 1, 0
    num_splits = torch.tensor([0, *pieces], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return tiles.to(lens.device), num_splits.to(lens.device)


@frozen(eq=False)
class Splits:
    """A schedule, unpacked into m pieces of one request each.

    Args:
        request: [m], whose piece it is.
        begin, end: [m], its first block and the one after its last.
    """

    request: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor

    @classmethod
    def read(cls, tiles: torch.Tensor, blocks: torch.Tensor) -> Splits:
        """Unpack the tile scheduler metadata.

        Args:
            blocks: [n], blocks of each request now. As in FlashMLA's kernel they end every request that a worker
                passes, but not the one it stops in: there a schedule made for other lengths stops where it was made.
        """
        pieces = [
            (request, begin if request == first else 0, end if request == last else int(blocks[request]))
            for first, begin, last, end, *_ in tiles.tolist()
            for request in range(first, last + 1)
        ]
        columns = torch.tensor(pieces, dtype=torch.long, device=tiles.device).reshape(-1, 3)
        return cls(columns[:, 0], columns[:, 1], columns[:, 2])

    def join(self, partial: torch.Tensor, lse: torch.Tensor, count: int) -> torch.Tensor:
        """Pieces [m, Q, H, V] with their log-sum-exps [m, Q, H] → requests [count, Q, H, V]."""
        index = self.request[:, None, None].expand_as(lse)
        highest = lse.new_full((count, *lse.shape[1:]), float("-inf")).scatter_reduce_(0, index, lse, "amax")
        weight = (lse - highest[self.request]).exp().nan_to_num(0.0)
        total = torch.zeros_like(highest).index_add_(0, self.request, weight)
        out = partial.new_zeros((count, *partial.shape[1:])).index_add_(0, self.request, partial * weight[..., None])
        return out / total[..., None].clamp(min=torch.finfo(out.dtype).tiny)
