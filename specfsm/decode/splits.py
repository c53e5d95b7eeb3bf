"""FlashMLA's schedule in plain torch: which blocks of which request each worker attends to.

FlashMLA deals a fixed number of workers out over all requests; here each request gets the same number of workers, so
that the schedule has one shape for a batch and is made on the device, without the host reading a length.
"""

from __future__ import annotations

import torch
from attrs import frozen

__all__ = ["Splits", "plan_splits"]

WORKERS = 2
"""Workers of each request."""


def plan_splits(lens: torch.Tensor, page: int, workers: int = WORKERS) -> tuple[torch.Tensor, torch.Tensor]:
    """Deal every request's blocks out over its workers.

    Args:
        lens: int [n], KV length of each request.
        page: tokens a block.

    Returns:
        tile scheduler metadata, i32 [n x workers, 8]: a worker's request, its first block, its request again, the
        block after its last, then zeros, in the column order of FlashMLA's own.
        number of splits, i32 [n + 1]: pieces of all requests before each.
    """
    blocks = -(-lens // page)
    share = -(-blocks // workers)
    worker = torch.arange(workers, device=lens.device)
    begin = torch.minimum(share[:, None] * worker, blocks[:, None])
    end = torch.minimum(begin + share[:, None], blocks[:, None])
    request = torch.arange(lens.shape[0], device=lens.device)[:, None].expand_as(begin)
    tiles = torch.zeros((begin.numel(), 8), dtype=torch.int32, device=lens.device)
    for column, values in enumerate((request, begin, request, end)):
        tiles[:, column] = values.flatten()
    num_splits = torch.arange(lens.shape[0] + 1, dtype=torch.int32, device=lens.device) * workers
    return tiles, num_splits


@frozen(eq=False)
class Splits:
    """A schedule, unpacked into m pieces of one request each.

    Args:
        request: [m], whose piece it is.
        begin, end: [m], its first block and the one after its last.
        width: blocks of the longest piece, or more.
    """

    request: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    width: int

    @classmethod
    def read(cls, tiles: torch.Tensor, num_splits: torch.Tensor, blocks: int) -> Splits:
        """Unpack the tile scheduler metadata.

        Args:
            blocks: blocks of the longest request, or more.
        """
        workers = tiles.shape[0] // (num_splits.shape[0] - 1)
        columns = tiles.long()
        return cls(columns[:, 0], columns[:, 1], columns[:, 3], -(-blocks // workers))

    def join(self, partial: torch.Tensor, lse: torch.Tensor, count: int) -> torch.Tensor:
        """Pieces [m, Q, H, V] with their log-sum-exps [m, Q, H] → requests [count, Q, H, V]."""
        index = self.request[:, None, None].expand_as(lse)
        highest = lse.new_full((count, *lse.shape[1:]), float("-inf")).scatter_reduce_(0, index, lse, "amax")
        weight = (lse - highest[self.request]).exp().nan_to_num(0.0)
        total = torch.zeros_like(highest).index_add_(0, self.request, weight)
        out = partial.new_zeros((count, *partial.shape[1:])).index_add_(0, self.request, partial * weight[..., None])
        return out / total[..., None].clamp(min=torch.finfo(out.dtype).tiny)
