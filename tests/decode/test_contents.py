"""Level "contents" and poison in every mode of the loop, on a CPU and, where there is one, on a GPU."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch

from specfsm.decode.attention import FLAVOURS
from specfsm.decode.loop import DecodeLoop
from specfsm.decode.model import Draft, Model, early_exit
from specfsm.errors import ContentsViolated
from tests.decode.conftest import llama, prompt, settings
from tests.decode.planted import refreshing_anothers_row

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")),
]
MODES = [*itertools.product(("off", "whole", "draft"), (False, True))]


@cache
def models(device: str) -> tuple[Model, Draft]:
    target = Model(llama(3, damped=2).to(device))
    return target, early_exit(target, 2)


def decode(draft: bool, backend: str, device: str, machine: dict[str, Any], **changes: Any) -> dict[int, list[int]]:
    target, drafts = models(device)
    options = settings(backend, device=device, graph_sizes=(3,), **changes)
    loop = DecodeLoop(target, drafts if draft else None, options, **machine)
    for seed in (1, 2, 3):
        loop.submit(prompt(seed, 9), 20)
    outputs = loop.run()
    loop.fsm.settle()
    assert loop.fsm.violations == ()
    assert bool(loop.replays) == (draft and options.graphs != "off")
    return outputs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", FLAVOURS)
def test_sound_loop_is_silent_and_lossless(backend: str, device: str) -> None:
    alone = decode(False, backend, device, {})
    for (graphs, overlap), poison in itertools.product(MODES, (False, True)):
        machine = {"check": "contents", "poison": poison}
        assert decode(True, backend, device, machine, graphs=graphs, overlap=overlap) == alone, (graphs, overlap)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("graphs", ["off", "whole"])
@pytest.mark.parametrize("backend", ["trtllm", "flash_mla", "dsa"])
def test_row_of_another_request_is_found(backend: str, graphs: str, device: str) -> None:
    with refreshing_anothers_row(), pytest.raises(ContentsViolated) as caught:
        decode(True, backend, device, {"check": "contents"}, graphs=graphs)
    assert (caught.value.failed, caught.value.row, caught.value.request, caught.value.owner) == ("owner", 0, 1, 2)
