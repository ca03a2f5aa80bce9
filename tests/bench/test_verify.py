"""`longspool verify` on a tiny model with toy methods: one that works, one that chooses blindly, one that does nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from longspool import LLM
from longspool.bench.bench import Bench
from longspool.bench.trial import Line, tried
from longspool.bench.verify import costs, crossing_of, verify
from longspool.cli.main import app
from longspool.errors import LongspoolError
from longspool.method import Cost, Method, Paper, Trial, registry
from longspool.methods.evict.base import ScoreEvict
from longspool.methods.select.topk import TopK
from longspool.roles import View

CONTROL = "blind(budget=96)"


@dataclass(frozen=True)
class Blind(ScoreEvict):
    """Scores by nothing but the place."""

    paper: ClassVar[Paper] = Paper("", "none", "none")
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}

    def score(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        draw = torch.Generator().manual_seed(view.layer)
        return torch.rand(pos.shape, generator=draw)


@dataclass(frozen=True)
class Blinder(Blind):
    """As blind as its control."""

    trials: ClassVar[tuple[Trial, ...]] = (Trial("blinder(budget=96)", CONTROL, length=400),)


@dataclass(frozen=True)
class Seeing(TopK):
    """Reads what is attended to most."""

    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "seeing(budget=96)", "random_select(budget=96)", ("streaming(sinks=4, window=28)",), length=400, within=1.0, claim="It sees."
        ),
    )


@dataclass(frozen=True)
class Idle(Blind):
    """Has room for everything."""

    trials: ClassVar[tuple[Trial, ...]] = (Trial("idle(budget=4096)", CONTROL, length=400),)


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    toys: dict[str, type[Method]] = {"blind": Blind, "blinder": Blinder, "seeing": Seeing, "idle": Idle}
    registry().update(toys)
    yield
    for name in toys:
        del registry()[name]


@pytest.fixture
def bench(tiny_dir: Path) -> Iterator[Bench]:
    made = Bench(LLM(str(tiny_dir)), 4, 1)
    yield made
    made.close()


def passed(bench: Bench, slug: str) -> list[bool]:
    return [line.ok for trial in registry()[slug].trials for line in tried(bench, trial)]


def test_only_what_works_passes(bench: Bench) -> None:
    assert passed(bench, "seeing") == [True] * 5
    assert passed(bench, "blinder") == [True, True, False]
    assert passed(bench, "idle")[0] is False


def lines(bench: Bench, trial: Trial, what: str) -> list[Line]:
    return [line for line in tried(bench, trial) if what in line.what]


def test_a_repeated_passage_is_measured_as_text_is(bench: Bench) -> None:
    repeat = Trial("seeing(budget=96)", "random_select(budget=96)", on="repeat", length=400, within=1.0)
    acts, read, control, within = tried(bench, repeat)
    assert acts.ok and read.ok and "a repeated passage" in control.what and "perplexity" in within.method
    score, dense = bench.score(repeat.recipe, "repeat", 400), bench.score("dense", "repeat", 400)
    nll = [sum(q.nll for q in s.texts) / 4 for s in (score, dense)]
    assert score.surprise == pytest.approx(math.exp(nll[0] - nll[1]) - 1) and dense.surprise == 0


def test_a_trial_says_how_much_text_follows(bench: Bench) -> None:
    long = Trial("seeing(budget=32)", "random_select(budget=32)", length=200, forced=90, within=1.0)
    assert all(line.ok for line in tried(bench, long))
    assert [len(r.text.ids) for r in bench.readings("text", 200, 90)] == [290] * 4
    assert {len(run.steps) for run in bench.score(long.recipe, "text", 200, forced=90).runs} == {89}


def test_a_method_spends_no_more_than_its_control(bench: Bench) -> None:
    (more,) = lines(bench, Trial("blinder(budget=192)", CONTROL, length=400), "bytes held")
    (read,) = lines(bench, Trial("quest(budget=320, dense=0)", "random_select(budget=48)", length=400), "tokens read")
    (same,) = lines(bench, Trial("random_select(budget=96)", "random_select(budget=96)", length=400), "tokens read")
    assert not more.ok and not read.ok and same.ok and same.method == same.baseline


def test_an_encoder_holds_the_bytes_that_it_claims(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial("int8(window=0)", within=1.0, length=512)
    (fair,) = lines(bench, trial, "bytes held")
    monkeypatch.setattr(registry()["int8"], "cost", lambda self, shape: Cost(device=8.0))
    (false,) = lines(bench, trial, "bytes held")
    assert fair.ok and not false.ok


def test_a_place_takes_bytes_off_the_device(bench: Bench) -> None:
    (away,) = lines(bench, Trial("headinfer", on="exact", length=300), "not on the device")
    assert away.ok and int(away.method.replace(",", "")) > 0


def test_needles_need_a_model_that_finds_them(bench: Bench) -> None:
    *_, line = tried(bench, Trial("seeing(budget=600)", CONTROL, on="agnostic", length=700))
    assert not line.ok and line.what == "needles that dense finds"


def test_exact_is_token_for_token(bench: Bench) -> None:
    *_, same = tried(bench, Trial("vericache(blind(budget=96))", on="exact", length=300))
    *_, other = tried(bench, Trial(CONTROL, on="exact", length=300))
    assert same.ok and same.method == "4" and not other.ok


def test_a_verdict_and_its_costs(bench: Bench) -> None:
    verdict = verify(bench, "seeing", "tiny")
    assert verdict.ok and verdict.claims == ("It sees.",) and verdict.costs is None  # 2,048 tokens are too few for the usual lengths
    found = costs(bench, "int8(window=0)", (300, 600))
    assert found is not None and found.claimed == 32 and found.dense == 64 and 32 < found.held < 50 and 0.5 < found.share < 0.8
    assert min(found.step_ms + found.dense_ms) > 0


def test_where_two_lines_cross() -> None:
    assert crossing_of([1.0, 3.0], [2.0, 2.0], (1000, 3000)) == 2000
    assert crossing_of([1.0, 3.0], [0.5, 2.6], (1000, 3000)) == 0
    assert crossing_of([1.0, 3.0], [1.5, 3.6], (1000, 3000)) is None


def test_the_command(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks" / "methods").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    asked = ["verify", "seeing", "-m", str(tiny_dir), "--texts", "4", "--seed", "1"]
    told = CliRunner().invoke(app, [*asked, "--json", "--out", str(tmp_path)])
    assert told.exit_code == 0, told.output
    kept, said = json.loads((tmp_path / "seeing.json").read_text()), json.loads(told.stdout)
    assert kept["ok"] and kept["lines"] == said["lines"] and kept["command"].startswith("longspool verify seeing") and kept["date"]
    plain = CliRunner().invoke(app, ["verify", "blinder", "-m", str(tiny_dir), "--texts", "4"])
    assert plain.exit_code == 1 and "FAIL" in plain.stdout
    assert not list((tmp_path / "benchmarks" / "methods").iterdir())  # nothing is written unasked


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ([], "Name the methods"),
        (["blnd"], "did you mean 'blind'"),
        (["blind"], "declares no trials"),
        (["seeing", "--texts", "1"], "must be at least 2"),
    ],
)
def test_bad_input(tiny_dir: Path, asked: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["verify", *asked, "-m", str(tiny_dir)])
    assert result.exit_code == 2 and says in result.stderr


def test_one_text_has_no_spread(tiny_dir: Path) -> None:
    with pytest.raises(LongspoolError, match="at least 2"):
        Bench(LLM(str(tiny_dir)), 1)
