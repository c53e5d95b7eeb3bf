"""The benchmarks run, and what they compare writes the same. Never how fast they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import handwritten, levels, phase_switch
from tests.decode import conftest as tiny

CPU = torch.device("cpu")
CONTENDERS = {"generation 1", "generation 2", "all stale", "typical", "nothing stale", "batch object", "copy"}


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
    assert by["typical"].copied_bytes > 0


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
        return phase_switch.Row(backend, batch, contender, (host,) * 3, (1.0,) * 3, phase_switch.Counts())

    rows = [
        row("dsa", 64, "generation 1", 400.0),
        row("dsa", 64, "typical", 20.0),
        row("dsa", 64, "all stale", 50.0),
        row("dsa", 1024, "typical", 40.0),
    ]
    found = {what: verdict for what, _, _, verdict in phase_switch.verdicts(rows)}
    assert found == {
        "dsa, batch 64, typical, against generation 1": "met",
        "dsa, batch 64, all stale, against generation 1": "missed",
        "dsa, typical, batch 1024 / 64": "missed",
    }
    assert json.loads(json.dumps(phase_switch.report(rows, CPU)))["rows"][0]["contender"] == "generation 1"


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
