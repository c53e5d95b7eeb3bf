"""The documents: what is generated in them is up to date, what is Python in them runs, and what it prints is shown."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen

from specfsm import (
    Backend,
    Batch,
    Check,
    Domain,
    FlashMLA,
    Geometry,
    Orchestrator,
    Sizes,
    StaleResource,
    Unit,
    errors,
)
from specfsm.domain import NOBODY

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def generate() -> Any:
    """`docs.generate`, which stands beside the package and not in it."""
    sys.path.insert(0, str(ROOT))
    try:
        from docs import generate
    finally:
        sys.path.remove(str(ROOT))
    return generate


# What the examples are given.


class Manager:
    """A KV manager of the smallest sort: batch-ordered, with slots handed out from the pool's end."""

    def __init__(self, blocks: int, width: int, rows: int = 4) -> None:
        self.geometry = Geometry(
            tokens_per_block=4, blocks_in_primary_pool=blocks, max_blocks_per_seq=width, num_layers=2, kv_factor=1
        )
        self.generation = 0
        self.blocks_version = 0
        self.host_block_offsets = torch.full((1, rows, 1, width), -1, dtype=torch.int32)
        self.pool_pointers = (0x7000 * blocks,)
        self.slots: dict[int, list[int]] = {}
        self._free = list(range(blocks))

    def reserve(self, request: int, tokens: int) -> None:
        held = self.slots.setdefault(request, [])
        while len(held) < self.geometry.blocks(tokens):
            held.append(self._free.pop())
            self.blocks_version += 1

    def page_owners(self, pool: str) -> list[int]:
        owner = {
            slot: request for request, held in reversed(self.slots.items()) for slot in held
        }  # the first to hold it
        return [owner.get(slot, NOBODY) for slot in range(self.geometry.blocks_in_primary_pool)]

    def arrange(self, request_ids: Any) -> list[int]:
        self.host_block_offsets.fill_(-1)
        for row, request in enumerate(request_ids):
            held = torch.tensor(self.slots[request], dtype=torch.int32)
            self.host_block_offsets[0, row, 0, : len(held)] = held
        return list(range(len(request_ids)))


class Engine:
    """Two requests that grow; each model looks at the metadata that it is handed, and remembers that it did."""

    REQUESTS = (7, 9)
    SIZES = Sizes(max_sequences=4, max_tokens=64, max_draft_len=3)

    def __init__(self, backend: Backend | None = None) -> None:
        class Metadata:
            """Of a new type each time, so that one document's registration is not another's."""

        self.target, self.draft = Manager(blocks=16, width=6), Manager(blocks=12, width=5)
        for request in self.REQUESTS:
            self.target.reserve(request, 8)
            self.draft.reserve(request, 8)
        self.metadata = Metadata()
        if backend is not None:
            backend.allocate(self.metadata, self.target, self.draft, self.SIZES, "cpu")
        self.forwards: list[str] = []
        self.steps_taken = 0

    def batch(self, tokens: int = 4) -> Batch:
        """The requests, with `tokens` new tokens each after 8 and whatever the steps so far brought."""
        length = 8 + self.steps_taken
        return Batch(self.REQUESTS, kv_lens=(length,) * 2, tokens=(tokens,) * 2)

    def steps(self) -> Iterator[tuple[Batch, Batch]]:
        for _ in range(3):
            for request in self.REQUESTS:
                self.target.reserve(request, 8 + self.steps_taken)
                self.draft.reserve(request, 8 + self.steps_taken + 3)
            yield self.batch(), self.batch(2)
            self.steps_taken += 2

    def target_model(self, metadata: Any) -> None:
        self._look(metadata, self.target, "target")

    def draft_model(self, metadata: Any) -> None:
        self._look(metadata, self.draft, "draft")

    def _look(self, metadata: Any, manager: Manager, name: str) -> None:
        assert metadata.kv_cache_manager is manager
        for row, request in enumerate(self.REQUESTS):
            held = manager.slots[request]
            assert metadata.kv_block_ids_per_seq[row, : len(held)].tolist() == held
        length, tokens = metadata.kv_lens_cuda_runtime[0], metadata._seq_lens_cuda_runtime[0]
        self.forwards.append(f"{name}: {tokens} of {length}")


def of_readme() -> dict[str, Any]:
    engine = Engine(FlashMLA())
    return {
        "engine": engine,
        "metadata": engine.metadata,
        "target_manager": engine.target,
        "draft_manager": engine.draft,
        "target_model": engine.target_model,
        "draft_model": engine.draft_model,
        "draft_len": 3,
    }


def of_backends() -> dict[str, Any]:
    engine = Engine()
    return {"target_manager": engine.target, "draft_manager": engine.draft, "batch": engine.batch()}


def of_kernels() -> dict[str, Any]:
    geometry = Geometry(tokens_per_block=64, blocks_in_primary_pool=8, max_blocks_per_seq=3, num_layers=1)
    shapes = {"rows": (2,), "kv_lens": (2,), "req_idx": (4,), "back": (4,), "block_table": (2, 3)}
    tensors = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    tensors |= {
        "offsets": torch.zeros(1, 2, 1, 3, dtype=torch.int32),
        "slot_mapping": torch.zeros(4, dtype=torch.int64),
    }
    return {"Unit": Unit, "geometry": geometry, "tensors": tensors, "larger": torch.zeros_like(tensors["offsets"])}


def of_embedding() -> dict[str, Any]:
    return {**of_readme(), "Engine": Engine, "Manager": Manager}


SETUPS: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": of_readme,
    "docs/backends.md": of_backends,
    "docs/contracts.md": of_embedding,
    "docs/embedding.md": of_embedding,
    "docs/kernels.md": of_kernels,
}
"""What the blocks of a document start with; nothing where it is not listed."""
NOT_RUN = {"docs/draft-head.md": "loads the target's weights"}
"""Document → why its blocks are not run."""
DOCUMENTS = ("README.md", *sorted(f"docs/{each.name}" for each in (ROOT / "docs").glob("*.md")))


# Running them.


@frozen
class Block:
    """One fenced block and the line of its first fence."""

    info: str
    body: str
    line: int


def blocks(text: str) -> list[Block]:
    return [
        Block(each["info"].strip(), each["body"], text[: each.start()].count("\n") + 1) for each in FENCE.finditer(text)
    ]


def run(document: str, namespace: dict[str, Any]) -> int:
    """Execute the Python blocks of a document in order; compare what each prints with the text block after it."""
    fenced = blocks((ROOT / document).read_text())
    ran = 0
    for block, following in zip(fenced, [*fenced, None][1:], strict=True):
        if block.info != "python":
            continue
        printed = io.StringIO()
        code = compile("\n" * block.line + block.body, document, "exec")
        with redirect_stdout(printed):
            exec(code, namespace)
        ran += 1
        shown = following.body if following is not None and following.info == "text" else ""
        if printed.getvalue():
            assert shown == printed.getvalue(), f"what {document}:{block.line} prints is not what stands after it"
    return ran


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if each not in NOT_RUN])
def test_python_blocks_run_and_print_what_is_shown(document: str) -> None:
    """Every block not marked otherwise runs, in order, in one namespace."""
    wanted = sum(block.info == "python" for block in blocks((ROOT / document).read_text()))
    assert run(document, SETUPS.get(document, dict)()) == wanted


def test_python_blocks_are_marked_as_run_or_not_run(generate: Any) -> None:
    """A misspelt mark would leave a block out in silence."""
    for document in generate.DOCUMENTS:
        marks = {block.info for block in blocks(document.read_text())}
        assert marks <= {"python", "python not-run", "text", "console", "mermaid"}, document.name


def test_the_readme_example_serves_each_model_its_own_cache() -> None:
    """Three steps of one target and three draft forwards, each with its lengths, and the block tables of its cache."""
    namespace = of_readme()
    run("README.md", namespace)
    engine = namespace["engine"]
    assert engine.forwards[:4] == ["target: 4 of 8", "draft: 2 of 8", "draft: 1 of 9", "draft: 1 of 10"]
    assert len(engine.forwards) == 3 * 4


def test_the_readme_shows_the_error_that_is_raised() -> None:
    """A refresh is left out while the draft's blocks move: the message stands in the README word for word."""
    engine = Engine(FlashMLA())
    fsm = Orchestrator(
        engine.metadata,
        backend=FlashMLA(),
        target=engine.target,
        draft=engine.draft,
        drop=[("block_ids_per_seq", Domain.DRAFT)],
    )
    fsm.check = Check.OFF
    fsm.target_prepare(engine.batch())
    with fsm.draft_forward():
        fsm.publish("block_ids_per_seq", fsm.value("block_ids_per_seq"))
    fsm.check = Check.STAMPS
    engine.draft.reserve(7, 12)
    fsm.target_prepare()
    with pytest.raises(StaleResource) as refused:
        fsm.draft_forward()
    assert f"```text\n{refused.value}\n```" in (ROOT / "README.md").read_text()


def test_the_readme_example_is_short() -> None:
    """Fifteen lines, blank ones apart."""
    [example] = [block for block in blocks((ROOT / "README.md").read_text()) if block.info == "python"]
    assert len([line for line in example.body.splitlines() if line.strip()]) <= 15


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "is not what stands after it"),
        ("```python\nprint(1)\n```\n", "is not what stands after it"),
    ],
)
def test_the_runner_compares(text: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner itself: another output, or none shown, is a failure."""
    (tmp_path / "some.md").write_text(text)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    with pytest.raises(AssertionError, match=complaint):
        run("some.md", {})


def test_every_error_has_advice() -> None:
    """The engineer who meets an error finds its name in the embedding guide."""
    advice = (ROOT / "docs/embedding.md").read_text().partition("## At 3 a.m.")[2]
    assert [name for name in errors.__all__ if f"`{name}`" not in advice] == []


def test_links_between_documents_lead_somewhere(generate: Any) -> None:
    """Relative links name files, and their fragments name headings."""
    for document in generate.DOCUMENTS:
        for target, fragment in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", document.read_text()):
            file = (document.parent / target) if target else document
            assert file.exists(), f"{document.name} links to {target}"
            if fragment:
                assert fragment in anchors(file.read_text()), f"{document.name} links to {target}#{fragment}"


def anchors(text: str) -> set[str]:
    """GitHub's fragments of the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# Generated regions.


def test_generated_regions_are_up_to_date(generate: Any) -> None:
    """Whatever is drawn or tabulated from code is what the code says now."""
    late = [str(document.relative_to(ROOT)) for document, _ in generate.outdated()]
    assert not late, f"{', '.join(late)} out of date: run `{generate.COMMAND}` and commit what it writes"


def test_check_names_the_document_and_the_command(
    generate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--check`` writes nothing and exits 1; without it the document is written and then up to date."""
    document = tmp_path / "late.md"
    stale = "<!-- generated: inputs -->\nold\n<!-- end -->\n"
    document.write_text(stale)
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "DOCUMENTS", (document,))
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().out == "late.md: out of date; run make docs\n"
    assert document.read_text() == stale
    assert generate.main([]) == 0
    assert "| `blocks` |" in document.read_text()
    assert generate.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<!-- generated: nonesuch -->\n<!-- end -->", "unknown region 'nonesuch'"),
        ("<!-- generated: inputs -->\n", "no <!-- end -->"),
        ("<!-- generated: inputs -->\n<!-- generated: kinds -->\n<!-- end -->", "no <!-- end -->"),
    ],
)
def test_a_broken_region_is_an_error(generate: Any, text: str, complaint: str) -> None:
    """A region that cannot be written is never passed over."""
    with pytest.raises(ValueError, match=complaint):
        generate.generated(text)
