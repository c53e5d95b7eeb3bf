"""The benchmarks run, and what they compare leaves and writes the same. Never how fast they are."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bookkeeping, decode, handwritten, host_part, levels, phase_switch, whole_loop
from specfsm.domain import Batch, Domain
from tests.decode import conftest as tiny

CPU = torch.device("cpu")
CONTENDERS = {"generation 1", "generation 2", *phase_switch.OURS, "batch object", "copy"}


@pytest.mark.parametrize("backend", phase_switch.BACKENDS)
def test_every_contender_is_timed_and_counted(backend: str, tmp_path: Path) -> None:
    """`measure` compares the tables before and after it times anything, and ends the run if they differ."""
    words = ["--device", "cpu", "--backends", backend, "--batches", "2", "--rounds", "1", "--warm", "0"]
    assert phase_switch.main([*words, "--json", str(tmp_path / "report.json")]) == 0
    facts, rows = phase_switch.read(tmp_path / "report.json")
    assert {row.contender for row in rows} == CONTENDERS
    assert facts["versions"]["torch"] == torch.__version__
    by = {row.contender: row.counts for row in rows}
    assert all(counts.bytecodes > 0 for counts in by.values())
    assert by["nothing stale"].launches == by["nothing stale"].copies == 0
    assert by["generation 1"].copies > by["generation 2"].copies or backend == "trtllm"
    assert by["typical"].copied_bytes == by["typical, ahead"].copied_bytes > 0


@pytest.mark.parametrize("backend", phase_switch.BACKENDS)
def test_refill_that_is_forgotten_is_found(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(handwritten.REFILLS, backend, lambda metadata, step: None)
    with pytest.raises(SystemExit, match=r"generation 1 differs"):
        phase_switch.World(backend, 2, CPU).require_equal()


@pytest.mark.parametrize("backend", phase_switch.BACKENDS)
@pytest.mark.parametrize("generation", ["generation 1", "generation 2"])
def test_hand_written_switch_gives_the_target_its_own_back(backend: str, generation: str) -> None:
    world = phase_switch.World(backend, 2, CPU)
    switch = world.by_hand[generation]
    tables = phase_switch.TABLES[backend]
    if backend == "flash_mla" and generation == "generation 1":  # its restore is a refill
        switch.refill(switch.metadata, world.step)
    before = {name: (getattr(switch.metadata, name), getattr(switch.metadata, name).clone()) for name in tables}
    switch.prepare_for_draft_forward(world.step)
    assert switch.metadata.kv_cache_manager is world.caches[1]
    switch.restore_after_draft_forward()
    assert switch.metadata.kv_cache_manager is world.caches[0]
    for name, (buffer, contents) in before.items():
        assert getattr(switch.metadata, name) is buffer
        assert torch.equal(buffer, contents)


def test_typical_step_moves_lengths_and_a_few_rows() -> None:
    world = phase_switch.World("dsa", 16, CPU)
    version = world.caches[1].blocks_version
    world.advance()
    world.prepare()
    assert world.caches[1].blocks_version == version + 1
    assert 0 < len(world.caches[1].changed) < 16
    world.fsm.trace.clear()
    world.switch()
    names = [world.fsm.backend.resources[place].name for place in places(next(iter(world.fsm.trace)).refreshed)]
    assert {"base_block_offsets", "kv_lens_cuda", "block_table", "slot_mapping_fp8"} <= {*names}
    assert not {"_seq_lens_cuda", "req_idx_per_token", "kv_cache_manager"} & {*names}


def places(mask: int) -> list[int]:
    return [place for place in range(mask.bit_length()) if mask >> place & 1]


def test_executed_bytecodes_are_the_same_each_time() -> None:
    world = phase_switch.World("dsa", 2, CPU)

    def nothing_stale() -> int:
        world.prepare()
        return phase_switch.bytecodes(world.switch)

    nothing_stale()
    assert nothing_stale() == nothing_stale() > 0


def test_plot_without_matplotlib_says_so(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    phase_switch.plot([], tmp_path / "plot.svg")
    assert "matplotlib is not installed" in capsys.readouterr().err
    assert not (tmp_path / "plot.svg").exists()


def test_aims_are_judged_by_ratio() -> None:
    def row(backend: str, batch: int, contender: str, host: float) -> phase_switch.Row:
        return phase_switch.Row(
            backend, batch, contender, (host,) * 3, (2 * host,) * 3, (1.0,) * 3, phase_switch.Counts()
        )

    rows = [
        row("dsa", 64, "generation 1", 400.0),
        row("dsa", 64, "typical", 20.0),
        row("dsa", 64, "typical, ahead", 10.0),
        row("dsa", 64, "all stale", 50.0),
        row("dsa", 1024, "typical", 40.0),
    ]
    found = {what: verdict for what, _, _, verdict, _ in phase_switch.verdicts(rows)}
    assert found == {
        "dsa, batch 64, typical, against generation 1": "met",
        "dsa, batch 64, typical, ahead, against generation 1": "met",
        "dsa, batch 64, all stale, against generation 1": "missed",
        "dsa, typical, batch 1024 / 64": "missed",
    }
    assert json.loads(json.dumps(phase_switch.report(rows, CPU)))["rows"][0]["contender"] == "generation 1"


# The whole loop.

WORDS = ["--device", "cpu", "--tiny", "--dtype", "float32", "--batches", "2", "--blocks", "1", "--draft-len", "2"]


def test_whole_loop_is_timed_with_every_switch(tmp_path: Path) -> None:
    """`measure` ends the run if the tokens differ. What only a GPU tells is said not to be measured."""
    assert whole_loop.main([*WORDS, "--json", str(tmp_path / "report.json")]) == 0
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [(row["contender"], row["overlap"]) for row in rows] == [
        (name, overlap) for overlap in (False, True) for name in whole_loop.CONTENDERS
    ]
    assert all(0 < row["switch"] < row["step"] and row["idle"] is None for row in rows)


def test_switch_that_refills_nothing_writes_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is added meanwhile: whoever compares the tokens sees that its table was not refilled."""
    monkeypatch.setattr(whole_loop, "COMPARED", ("machine", "none"))
    bench = whole_loop.Bench(whole_loop.parse([*WORDS[:-4], "--blocks", "4"]))
    with pytest.raises(SystemExit, match="do not write the same tokens"):
        whole_loop.measure(bench, 2, overlap=False)


def test_busy_time_is_the_union_of_what_ran() -> None:
    assert whole_loop.union([]) == 0
    assert whole_loop.union([(5, 7), (0, 2), (1, 3), (1, 2), (7, 8)]) == 6


# The host's part.


def test_host_executes_the_same_whatever_the_batch() -> None:
    """No Python loop over requests in a switch: the counts are those of a batch sixteen times as large."""
    small, large = (host_part.measure("dsa", batch, rounds=1) for batch in (4, 64))
    assert [(row.bytecodes, row.c_calls) for row in small] == [(row.bytecodes, row.c_calls) for row in large]


def test_host_executes_little() -> None:
    """What was measured, and a third more for other versions of Python: a switch that does much more is noticed."""
    counts = {row.contender: (row.bytecodes, row.c_calls) for row in host_part.measure("dsa", 4, rounds=1)}
    limits = {"all stale": (6500, 90), "typical": (4700, 60), "nothing stale": (1500, 18), "typical, ahead": (1500, 18)}
    for contender, limit in limits.items():
        assert all(0 < count <= most for count, most in zip(counts[contender], limit, strict=True)), counts


# Bookkeeping.


def test_bookkeeping_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """With few repetitions: whether it runs, over backends that are still whole."""
    timed = bookkeeping.timed
    monkeypatch.setattr(bookkeeping, "timed", lambda body, rounds, repeats, calls=1: timed(body, rounds, 3, calls))
    assert bookkeeping.main(["--rounds", "2", "--json", str(tmp_path / "book.json")]) == 0
    figures = json.loads((tmp_path / "book.json").read_text())["figures"]
    assert [each["what"] for each in figures][3] == "step, 10 resources (ten), checks stamps"
    assert "under 5 µs" in capsys.readouterr().out


# A decode loop.


@pytest.mark.parametrize("backend", ["trtllm", "dsa"])
def test_machine_and_both_switches_by_hand_write_the_same(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lockstep` asserts it, over a round that warms up and one that counts."""
    ready = (tiny.target(), tiny.draft("early-exit"), tiny.settings(backend), tiny.prompt(1, 5))
    monkeypatch.setattr(decode, "prepare", lambda options: ready)
    runners, told, prompt = decode.make(Namespace(check="stamps"))
    for counted in (False, True):
        decode.lockstep(runners, told, prompt, 9, counted)
    assert {len(runner.steps) for runner in runners.values()} == {len(runners["machine"].events)}
    assert not told, "the oracle was told of every refresh, and no more"
    assert decode.report(runners, 8).keys() > {"machine", "by hand", "oracle"}


def test_by_hand_refreshes_again_what_has_moved_since_it_was_written() -> None:
    loop = tiny.DecodeLoop(tiny.target(), tiny.draft("early-exit"), tiny.settings())
    request = loop.submit(tiny.prompt(1, 5), 9)
    loop.step()
    switch, batch = decode.ByHand(loop.fsm), Batch([request], [6], [1])
    for moves in (False, True):
        switch.announce(batch, Domain.TARGET)
        switch.publish("kv_lens_cuda", switch.value("kv_lens_cuda", Domain.TARGET).fill_(3), Domain.TARGET)
        if moves:
            switch.moved("lengths")
        switch.target_prepare(batch)
        assert int(switch.value("kv_lens_cuda", Domain.TARGET)[0]) == (6 if moves else 3)


# The check levels.


def test_every_level_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """On a tiny model; `measure` ends the run if a level writes another token or finds anything."""
    ready = (tiny.target(), tiny.draft("early-exit"), tiny.settings("dsa"), tiny.prompt(1, 5))
    monkeypatch.setattr(levels, "prepare", lambda options: ready)
    words = ["--rounds", "1", "--new-tokens", "9", "--json", str(tmp_path / "levels.json")]
    assert levels.main(words) == 0
    facts = json.loads((tmp_path / "levels.json").read_text())
    assert list(facts["rows"]) == ["off", "stamps", "tensors", "contents"]
    assert all(min(row["step_ms"]) > 0 for row in facts["rows"].values())
    assert facts["versions"]["torch"] == torch.__version__
    assert "| `contents` |" in capsys.readouterr().out
