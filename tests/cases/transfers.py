"""R7: a host source stays alive and unwritten until its copy has landed."""

from __future__ import annotations

import torch

from specfsm import PendingTransfer
from specfsm.backends.staging import StagingBuffer
from tests.cases.case import Case


class Copy:
    """An event that guards a copy which has not landed yet."""

    passed = False

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


def staging(resource: str) -> StagingBuffer:
    return StagingBuffer(resource, [torch.zeros(4, dtype=torch.int32)], Copy())


def send(buffer: StagingBuffer, value: int) -> None:
    """Write the host buffer, enqueue its copy, and arm the event behind it."""
    buffer.fill()[0].fill_(value)
    buffer.submit()


class PinnedBufferRewritten(Case):
    """The block offsets of the next step are written into the pinned buffer while the copy of this step's is still
    pending. The device receives some of each."""

    rule, name, refused = "R7", "TensorRT-LLM #15546", PendingTransfer
    facts = {"resource": "host_kv_cache_block_offsets", "event": "fill"}
    words = ("the staging buffer of host_kv_cache_block_offsets still feeds a copy that has not landed", "of the ring")

    def faulty(self) -> None:
        offsets = staging("host_kv_cache_block_offsets")
        send(offsets, 1)
        with self.refusing():
            send(offsets, 2)

    def corrected(self) -> None:
        offsets = staging("host_kv_cache_block_offsets")
        send(offsets, 1)
        offsets.wait()
        send(offsets, 2)
        assert offsets.tensors[0].tolist() == [2] * 4


class SecondPlanOverTheFirst(Case):
    """Two plans are made one after the other through one pinned workspace. The second overwrites it before the copy of
    the first has left."""

    rule, name, refused = "R7", "mini-sglang #103", PendingTransfer
    facts = {"resource": "plan workspace", "event": "fill"}
    words = ("the staging buffer of plan workspace still feeds a copy", "stage into the other buffer")

    def faulty(self) -> None:
        workspace = staging("plan workspace")
        send(workspace, 1)
        with self.refusing():
            send(workspace, 2)

    def corrected(self) -> None:
        first, second = staging("plan workspace"), staging("plan workspace")
        send(first, 1)
        send(second, 2)
        assert (first.tensors[0][0], second.tensors[0][0]) == (1, 2)


class EventArmedAgain(Case):
    """An event is used again for the next copy before the one who waits for the first copy has bound to it. He waits
    for the wrong one, or for none."""

    rule, name, refused = "R7", "SGLang #31072", PendingTransfer
    facts = {"resource": "kv_lens", "event": "submit"}
    words = ("the event behind the copy of kv_lens was armed already", "from another buffer")

    def faulty(self) -> None:
        lens = staging("kv_lens")
        send(lens, 1)
        with self.refusing():
            lens.submit()

    def corrected(self) -> None:
        lens, tables = staging("kv_lens"), staging("block_table")
        send(lens, 1)
        send(tables, 2)
        assert not lens.poll()
