"""``specfsm decode``: what it prints, its exit codes, and what a missed refresh looks like from outside."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specfsm.cli import main
from specfsm.decode import loop, verify, weights
from specfsm.decode.attention import FLAVOURS
from specfsm.decode.loop import DecodeLoop
from specfsm.decode.training.tiny import tiny_target
from specfsm.domain import Domain
from tests.decode.conftest import llama

BACKENDS = tuple(FLAVOURS)
Capture = pytest.CaptureFixture[str]
Decode = Callable[..., int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a byte tokenizer, as transformers saves it."""
    path = tmp_path_factory.mktemp("tiny")
    model, tokenizer = tiny_target(0)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def decode(folder: Path) -> Decode:
    """Runs ``specfsm decode`` on that model."""

    def run(*arguments: str) -> int:
        return main(["decode", "--target", str(folder), "--max-new-tokens", "12", *arguments])

    return run


def complaint(capsys: Capture) -> str:
    """The one line that a refused command leaves, and nothing else."""
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    return line


# What it prints.


@pytest.mark.parametrize("rows", ["batch", "slot"])
@pytest.mark.parametrize("draft", ["self", "early-exit:1"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_verified(decode: Decode, capsys: Capture, backend: str, draft: str, rows: str) -> None:
    """Exit code 0, a summary, a table of events, and the word that speculation changed nothing."""
    assert decode("hello", "--verify", "--backend", backend, "--draft", draft, "--rows", rows) == 0
    out, err = capsys.readouterr()
    shown = " ".join(out.split())
    assert err == ""
    assert re.search(r"12 tokens in \d+ target forwards: [\d.]+ a forward, [\d.]+ a second", shown)
    assert re.search(r"\d+ of \d+ drafted tokens accepted \(\d+%\), shown in green", shown)
    assert "verified: the target alone writes the same 12 tokens, in 12 forwards" in shown
    events = ("target_prepare", "draft_forward", "draft_step", "restore", "finish")
    assert all(event in out for event in events)


@pytest.mark.parametrize(("backend", "graphs"), zip(BACKENDS, ("off", "whole", "draft", "whole"), strict=True))
def test_verified_in_a_unified_cache(decode: Decode, capsys: Capture, backend: str, graphs: str) -> None:
    """The same tokens with the draft's layers behind the target's; what is broken there is refused there."""
    arguments = ("hello", "--backend", backend, "--graphs", graphs, "--draft", "early-exit:1", "--unified", "a test")
    assert decode(*arguments, "--verify", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["verified"] is True
    assert (facts["replays"] > 0) == (graphs != "off")
    assert decode(*arguments, "--break", "kv_lens_cuda") == 3
    assert f"{backend}.kv_lens_cuda [target] was never refreshed" in capsys.readouterr().err


def test_accepted_tokens_are_green(decode: Decode, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal: with the target as its own draft most of the text is."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    decode("hello", "--draft", "self")
    assert "\x1b[32m" in capsys.readouterr().out


def test_streamed_text_is_the_whole_text(decode: Decode, capsys: Capture) -> None:
    """What was printed piece by piece, some pieces half a character, is what --json gives at once."""
    decode("hello")
    streamed = capsys.readouterr().out
    decode("hello", "--json")
    [text] = json.loads(capsys.readouterr().out)["texts"]
    assert streamed.startswith(text.rstrip("\ufffd"))


def test_several_prompts_run_as_one_batch(decode: Decode, capsys: Capture) -> None:
    """Each answer is what the prompt gets alone; they share their target forwards."""
    prompts = ["hello", "a much longer prompt than that", "x"]
    texts, forwards = [], []
    for each in prompts:
        decode(each, "--json")
        facts = json.loads(capsys.readouterr().out)
        texts += facts["texts"]
        forwards.append(facts["forwards"])
    assert decode(*prompts, "--json", "--verify") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["texts"] == texts
    assert facts["forwards"] <= max(forwards) + 1 < sum(forwards)
    assert decode(*prompts) == 0
    out = capsys.readouterr().out
    assert [out.find(text[:4]) >= 0 for text in texts] == [True] * 3


def test_raw_continues_the_prompt_itself(decode: Decode, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the chat template the prompt's own tokens are what the target sees."""
    seen: list[int] = []
    submit = loop.DecodeLoop.submit
    monkeypatch.setattr(
        loop.DecodeLoop, "submit", lambda self, prompt, new: (seen.append(len(prompt)), submit(self, prompt, new))[1]
    )
    for more in ([], ["--raw"]):
        decode("hello", *more, "--json")
    assert seen == [len(">hello") + 1, len("hello")]


def test_json_has_what_is_documented(decode: Decode, capsys: Capture) -> None:
    """One object on standard output, nothing else there; every output token is marked as drafted or not."""
    assert decode("hello", "you", "--json", "--verify") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts.keys() >= {
        "texts", "outputs", "drafted", "tokens", "forwards", "steps", "proposed", "accepted", "seconds", "phases",
        "verified", "alone_seconds",
    }  # fmt: skip
    assert facts["verified"] is True
    assert facts["tokens"] == sum(map(len, facts["outputs"])) == 24
    assert [len(each) for each in facts["drafted"]] == [12, 12]
    assert sum(map(sum, facts["drafted"])) == facts["accepted"] <= facts["proposed"]
    [prepared] = [phase for phase in facts["phases"] if phase["event"] == "target_prepare"]
    assert prepared["count"] >= facts["forwards"]
    assert prepared["proven"] > 0


def test_trace_opens_in_perfetto(decode: Decode, tmp_path: Path, capsys: Capture) -> None:
    """Trace events with a time and a duration, one for each transition that the summary counts."""
    file = tmp_path / "trace.json"
    decode("hello", "--trace", str(file), "--json", "--verify")
    phases = json.loads(capsys.readouterr().out)["phases"]
    events = json.loads(file.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert all(event["dur"] >= 0 and event["ts"] > 0 for event in slices)
    counted = {phase["event"]: phase["count"] for phase in phases}
    assert {name: sum(event["name"] == name for event in slices) for name in counted} == counted
    assert any("kv_cache_block_offsets" in event["args"]["refreshed"] for event in slices)


# What goes wrong.


def test_a_difference_is_exit_code_1(decode: Decode, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """An acceptance that keeps what the target would not write is found, token by token."""

    def accept_all(drafted: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full(drafted.shape[:1], drafted.shape[1]), logits.argmax(-1)[:, -1]

    monkeypatch.setattr(verify, "accept_greedy", accept_all)
    arguments = ("hello", "--verify", "--draft", "early-exit:1")
    assert decode(*arguments) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"DIFFERENT: prompt 0, token \d+: speculative '.*', target alone '.*'", out)
    assert "verified" not in out
    assert decode(*arguments, "--json") == 1
    assert json.loads(capsys.readouterr().out)["verified"] is False


DROPS = [
    (backend, resource.name, resource.domains[-1])
    for backend in BACKENDS
    for resource in FLAVOURS[backend].backend().resources
]
REFUSED = {
    Domain.TARGET: "IDLE --target_prepare--> TARGET_PREPARE",
    Domain.DRAFT: "TARGET_PREPARE --draft_forward--> DRAFT_FORWARD",
}


@pytest.mark.parametrize(("backend", "resource", "domain"), DROPS)
def test_break_is_exit_code_3(decode: Decode, capsys: Capture, backend: str, resource: str, domain: Domain) -> None:
    """The whole StaleResource message: the transition, the resource and cache, what moved, and what would mend it."""
    assert decode("hello", "--backend", backend, "--break", resource) == 3
    err = capsys.readouterr().err
    assert f"StaleResource: {REFUSED[domain]} refused" in err
    assert f"  {backend}.{resource} [{domain}] " in err
    assert "  to mend: " in err
    assert "Traceback" not in err


def test_break_in_the_targets_cache(decode: Decode, capsys: Capture) -> None:
    """target:RESOURCE drops it there."""
    assert decode("hello", "--break", "target:kv_lens_cuda") == 3
    assert "IDLE --target_prepare--> TARGET_PREPARE refused\n  trtllm.kv_lens_cuda [target]" in capsys.readouterr().err


def test_break_as_json(decode: Decode, capsys: Capture) -> None:
    """Standard output is one object even then."""
    assert decode("hello", "--json", "--break", "kv_cache_block_offsets") == 3
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert facts["refused"] == "StaleResource"
    assert facts["message"] in err


def test_contents_are_checked_and_what_is_stale_poisoned(
    decode: Decode, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is the same; the machine was built so."""
    assert decode("hello", "--json") == 0
    plain = json.loads(capsys.readouterr().out)
    made: list[Any] = []
    build = DecodeLoop._machine

    def noted(loop: DecodeLoop, arguments: dict[str, Any]) -> Any:
        made.append(arguments.copy())
        return build(loop, arguments)

    monkeypatch.setattr(DecodeLoop, "_machine", noted)
    assert decode("hello", "--json", "--check", "contents", "--poison") == 0
    assert json.loads(capsys.readouterr().out)["outputs"] == plain["outputs"]
    assert (made[0]["check"], made[0]["poison"]) == ("contents", True)


@pytest.mark.parametrize(
    ("broken", "same"), [("kv_cache_block_offsets", True), ("target:kv_cache_block_offsets", False)]
)
def test_unchecked_shows_what_it_does(decode: Decode, capsys: Capture, broken: str, same: bool) -> None:
    """Healthy and broken side by side: a stale draft costs acceptance, a stale target costs the text."""
    assert decode("hello", "--break", broken, "--unchecked") == 0
    out = " ".join(capsys.readouterr().out.split())
    domain = "draft" if same else "target"
    assert f"unchecked: kv_cache_block_offsets [{domain}] was never refreshed, and nothing said so" in out
    assert out.index("healthy") < out.index("broken")
    assert ("the text is the same" if same else "the text CHANGED") in out
    [before, after] = re.search(r"accepted: (\d+)% → (\d+)%", out).groups()  # type: ignore[union-attr]
    assert (int(before), int(after) < 100) == (100, True)
    decode("hello", "--break", broken, "--unchecked", "--json")
    facts = json.loads(capsys.readouterr().out)
    assert (facts["healthy"]["outputs"] == facts["broken"]["outputs"]) == same


@pytest.mark.parametrize("broken", ["target:kv_cache_manager", "_seq_lens_cuda"])
def test_unchecked_crash_is_reported(decode: Decode, capsys: Capture, broken: str) -> None:
    """What a stale resource brings down, it brings down here: one line, no traceback."""
    assert decode("hello", "a longer prompt", "--break", broken, "--unchecked", "--draft", "early-exit:1") == 0
    assert "then it crashed: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["  "], "the prompt is empty: there is nothing to continue"),
        (["hello", ""], "the prompt is empty: there is nothing to continue"),
        (["x", "--backend", "flash-mla"], f"unknown backend 'flash-mla': it is one of {', '.join(FLAVOURS)}"),
        (["x", "--break", "nonesuch"], "trtllm has no resource 'nonesuch'; it has kv_cache_manager, "),
        (["x", "--break", "both:kv_lens_cuda"], "--break takes RESOURCE, draft:RESOURCE or target:RESOURCE, not 'both"),
        (["x", "--unchecked"], "--unchecked goes with --break: there is nothing to leave unchecked"),
        (["x", "--unified", " "], "UnifiedCache needs the reason why the draft shares the target's cache"),
        (["x", "--draft-len", "0"], "--draft-len must be at least 1, not 0"),
        (["x", "--max-new-tokens", "0"], "max_new_tokens must be at least 1, not 0"),
        (["x" * 3000], "tokens and 12 new ones are more than the model's 2048"),
        (["x", "--draft", "nonesuch"], "no draft 'nonesuch': it is self, early-exit:K, mtp, mtp:FILE, or a"),
        (["x", "--draft", "early-exit:2"], "early-exit:2 needs a number of layers from 1 to 1"),
        (["x", "--draft", "mtp:nonesuch"], "no such draft head: nonesuch; train one with `specfsm train-draft"),
        (["x", "--target", "/nowhere"], "no such model folder: /nowhere"),
        (["x", "--device", "nonesuch"], "cannot run on 'nonesuch': "),
        (["x", "--device", "cuda:99"], "cannot run on 'cuda:99': "),
        (["x", "--trace", "/nonesuch/trace.json"], "cannot write /nonesuch/trace.json: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    decode: Decode, capsys: Capture, arguments: list[str], says: str
) -> None:
    """It says what can be done instead; nothing was decoded."""
    assert decode(*arguments) == 2
    line = complaint(capsys)
    assert line.startswith("specfsm decode: ")
    assert says in line


def test_draft_of_another_vocabulary(decode: Decode, capsys: Capture, tmp_path: Path) -> None:
    """One line with both sizes."""
    llama(0, vocab_size=90, num_hidden_layers=1).save_pretrained(tmp_path)
    tiny_target(0)[1].save_pretrained(tmp_path)
    capsys.readouterr()
    assert decode("x", "--draft", str(tmp_path)) == 2
    assert "has a vocabulary of 90, the target one of 257: a draft must share the target's" in complaint(capsys)


def test_folder_as_draft(decode: Decode, capsys: Capture, folder: Path) -> None:
    """The target's own folder, loaded a second time, drafts as well as the target itself."""
    assert decode("hello", "--draft", str(folder), "--json", "--verify") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["accepted"] == sum(map(sum, facts["drafted"])) > 0


def test_too_wide_for_flash_mla(decode: Decode, capsys: Capture, tmp_path: Path) -> None:
    """One line that names the backend that can."""
    sizes = {"vocab_size": 257, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 8}
    llama(0, hidden_size=512, num_hidden_layers=1, **sizes).save_pretrained(tmp_path)
    tiny_target(0)[1].save_pretrained(tmp_path)
    capsys.readouterr()
    assert decode("x", "--target", str(tmp_path), "--backend", "flash_mla") == 2
    assert "8 KV heads of 64 need 1024 elements of FlashMLA's 512: use --backend trtllm" in complaint(capsys)


def test_refused_run_keeps_its_trace(decode: Decode, tmp_path: Path) -> None:
    """What led to the refusal can be looked at."""
    file = tmp_path / "trace.json"
    assert decode("hello", "--break", "kv_lens_cuda", "--trace", str(file)) == 3
    names = [event["name"] for event in json.loads(file.read_text())["traceEvents"]]
    assert "target_prepare" in names
    assert "draft_forward" not in names


def test_help_names_every_exit_code(capsys: Capture) -> None:
    """So that scripts can tell them apart."""
    with pytest.raises(SystemExit):
        main(["decode", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "exit codes: 0 done; 1 --verify found a difference; 2 wrong use; 3 the machine refused a transition" in shown


@pytest.mark.skipif(importlib.util.find_spec(weights.WHEEL_PACKAGE) is None, reason=f"needs {weights.WHEEL_PIN}")
def test_the_demo(capsys: Capture) -> None:
    """The default target, a real prompt, both models' caches: the same tokens as the target alone."""
    assert main(["decode", "Name three rivers.", "--verify", "--max-new-tokens", "6", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["verified"] is True
    assert 0 < facts["accepted"] <= facts["proposed"]
    assert facts["texts"][0].isprintable()
