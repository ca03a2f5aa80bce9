"""The README is executed, and what it and the documents name is there."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer

import longspool.methods.evict
from longspool.catalogue import methods
from longspool.cli.main import app
from longspool.engine.engine import Engine
from longspool.engine.score import teacher_forced
from longspool.method import registry
from longspool.model.tiny import tiny
from longspool.plan import resolve
from longspool.recipe import parse

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = ("README.md", "CONTRIBUTING.md")


def blocks(kind: str) -> list[str]:
    """The Python blocks under that mark."""
    return re.findall(rf"<!-- test: {kind} -->\n```python\n(.*?)```", README, re.DOTALL)


def commands(page: str) -> Iterator[str]:
    for block in re.findall(r"```console\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        yield from (line for line in block.splitlines() if line)


def test_every_python_block_is_marked() -> None:
    assert len(blocks("real")) + len(blocks("method")) == README.count("```python")


@pytest.mark.real
def test_the_python_runs(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    first, second = blocks("real")
    exec(compile(first, "README.md", "exec"), names)
    text, ttft, held = capsys.readouterr().out.rsplit(maxsplit=2)
    assert "Paris" in text and float(ttft) > 0 and int(held) > 0
    exec(compile(second, "README.md", "exec"), names)
    assert str(names["llm"].plan) == "snapkv + int4"  # type: ignore[attr-defined]


def test_it_counts_the_methods() -> None:
    said = re.search(r"\[(\d+) of them\]\(#methods\)", README)
    assert said is not None and int(said[1]) == len(registry())


@pytest.fixture
def lottery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The README's method in its place; its name."""
    (text,) = blocks("method")
    path = re.search(r"saved as `src/longspool/methods/evict/(\w+)\.py`", README)
    assert path is not None
    (tmp_path / f"{path[1]}.py").write_text(text)
    monkeypatch.setattr(longspool.methods.evict, "__path__", [*longspool.methods.evict.__path__, str(tmp_path)])
    registry.cache_clear()
    yield path[1]
    monkeypatch.undo()
    registry.cache_clear()


def test_the_method_works(lottery: str) -> None:
    model = tiny()
    engine, ids = Engine(model, 1 << 30), torch.randint(0, 256, (80,), generator=torch.Generator().manual_seed(4)).tolist()

    def logits(recipe: str) -> torch.Tensor:
        return torch.cat(list(teacher_forced(engine, ids, 60, resolve(parse(recipe), model.shape, torch.float32))))[60:]

    dense = logits("dense")
    torch.testing.assert_close(logits(f"{lottery}(budget=1073741824)"), dense, atol=1e-4, rtol=0)
    assert (logits(f"{lottery}(budget=24) + int8(window=8)") - dense).abs().max() > 0.05
    assert str(resolve(parse(f"{lottery}(budget=256) + int8"), model.shape)) == f"{lottery}(budget=256) + int8"
    entry = {e.name: e for e in methods()}[lottery]
    assert entry.seat == "Evict" and entry.parameters == {"budget": 1024, "when": "prompt", "seed": 0}


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    cli = typer.main.get_command(app)
    lines = list(commands(page))
    assert lines
    for line in lines:
        program, *rest = shlex.split(line, comments=True)
        if program == "make":
            assert {word for word in rest if "=" not in word} <= targets, line
        else:
            assert program == "longspool", line
            command = cli.commands[rest[0]]  # type: ignore[attr-defined]
            given = command.make_context(rest[0], rest[1:]).params
            parse(given.get("recipe") or "")


@pytest.mark.parametrize("page", [*PAGES, *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / link).exists(), link


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_current(generate: ModuleType) -> None:
    assert generate.readme() == README, "run `make docs`"
    assert generate.table() == (ROOT / "docs" / "methods.md").read_text(), "run `make docs`"
    assert README.count("<!-- bench:start -->") == README.count("<!-- bench:end -->") == 1
