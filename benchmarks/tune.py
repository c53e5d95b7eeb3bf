import sys, torch
from benchmarks import refresh as r
from specfsm.kernels.refresh import Tile, RefreshLaunch

dev = torch.device("cuda", 0)
e = r.empty_launch(dev)
print("empty", r.event_time(e), r.replay_time(e), flush=True)


class L(RefreshLaunch):
    warps = 4

    def _launch(self, mask):
        self._kernel[(self.programs,)](*self._arguments, mask, *self._sizes, num_warps=self.warps)


for make, width in ((r.sliding, 512), (r.sliding, 64), (r.dsa, 64), (r.dsa, 512)):
    w = make(dev, 256, width)
    for tile in ((16, 128, 256), (8, 128, 256), (4, 128, 128), (8, 64, 128), (16, 256, 256)):
        for warps in (1, 2, 4, 8):
            if tile[0] * tile[1] / warps > 1024 * 1.1 or tile[0] * tile[1] / warps < 128:
                continue
            L.warps = warps
            l = L(w.recipes, w.tensors, w.geometry, engine="triton", tile=Tile(*tile))
            if warps == 4:
                r.check(w, l)
            print(
                w.name,
                width,
                tile,
                warps,
                "replay %.2f" % r.replay_time(l),
                "events %.2f" % r.event_time(l),
                flush=True,
            )
