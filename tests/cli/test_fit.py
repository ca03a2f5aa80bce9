"""`longspool fit`, and what the other commands say of methods that are fitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longspool.cli.main import app


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("longspool.model.pull.user_cache_dir", lambda name: str(tmp_path))
    return tmp_path


def cli(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


def test_fits_and_then_runs(tiny_dir: Path, cache: Path) -> None:
    asked = ("run", "-m", str(tiny_dir), "-p", "x" * 400, "--max-tokens", "2", "--recipe", "million(window=16)", "--json")
    command = f"longspool fit million -m {tiny_dir}"
    code, out, err = cli(*asked)
    assert code == 2 and not out and f"run `{command}`" in err and len(err.splitlines()) == 1
    assert command in " ".join(cli("check", "million", "-m", str(tiny_dir))[1].split())
    code, out, err = cli("fit", "million", "-m", str(tiny_dir), "--tokens", "300", "--seed", "4", "--json")
    assert code == 0, err
    told = json.loads(out)
    path = Path(told["path"])
    assert path.is_file() and cache in path.parents and told["tokens"] == 300 and told["method"] == "million" and told["tensors"] == 6
    code, out, err = cli(*asked)
    assert code == 0, err
    report = json.loads(out)
    assert report["memory"]["fitted_bytes"] == told["nbytes"] and report["actions"]["million"]["tokens"] > 0
    assert f"million is fitted by {path}.".replace(" ", "") in "".join(cli("check", "million", "-m", str(tiny_dir))[1].split())
    assert cli("fit", "million", "-m", str(tiny_dir), "--tokens", "300")[1] == f"{path}\n"


def test_mistakes_are_one_sentence(tiny_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("too short")
    for arguments, said in (
        (["int4"], "'int4' names no method that is fitted to a model."),
        (["million(dims=3)"], "dims=3 must divide"),
        (["million", "--tokens", "2"], "tokens=2 must be at least 64."),
        (["million", "-f", str(tmp_path / "short")], "The text has 9 tokens and 8,192 are wanted"),
        (["nothing"], "There is no method 'nothing'"),
    ):
        code, out, err = cli("fit", *arguments, "-m", str(tiny_dir))
        assert code == 2 and not out and said in err and len(err.splitlines()) == 1, err
