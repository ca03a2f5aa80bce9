"""The flags are Sampling's fields, one for one."""

from __future__ import annotations

import dataclasses

import pytest
import typer
from typer.testing import CliRunner

from longspool.cli.guard import guarded
from longspool.cli.wishes import WISHES, wishing
from longspool.engine.sampler import Sampling

ALL = {
    "--max-tokens": "9",
    "--temperature": "0.5",
    "--top-k": "7",
    "--top-p": "0.9",
    "--min-p": "0.1",
    "--repetition-penalty": "1.1",
    "--presence-penalty": "0.2",
    "--frequency-penalty": "-0.3",
    "--logit-bias": "5=-inf",
    "--seed": "-4",
    "--stop": "###",
    "--stop-token": "2",
    "--logprobs": "3",
    "-n": "2",
}
SAMPLING = Sampling(0.5, 7, 0.9, 0.1, 1.1, 0.2, -0.3, ((5, float("-inf")),), -4, 9, ("###",), (2,), True, 3, 2)


def called(arguments: list[str], *without: str) -> tuple[int, str, list[Sampling]]:
    """A command's exit code, what it wrote to stderr, and the sampling it got."""
    app, got = typer.Typer(rich_markup_mode=None), []

    @app.command()
    @guarded
    @wishing(*without)
    def command(sampling: Sampling, word: str = "") -> None:
        got.append(sampling)

    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stderr, got


def test_flags_are_the_fields() -> None:
    fields = {f.name: f.default for f in dataclasses.fields(Sampling)}
    assert {w.field for w in WISHES} == set(fields)
    assert {w.field: w.default or () if fields[w.field] == () else w.default for w in WISHES} == fields


def test_every_flag_arrives() -> None:
    assert called([]) == (0, "", [Sampling()])
    assert called([*(text for pair in ALL.items() for text in pair), "--ignore-eos"]) == (0, "", [SAMPLING])
    assert called(["--stop", "a", "--stop", "b", "-t", "1", "--logit-bias", "1=2", "--logit-bias", "3=-4.5"])[2] == [
        Sampling(temperature=1.0, stop=("a", "b"), logit_bias=((1, 2.0), (3, -4.5)))
    ]


def test_flags_can_be_left_out() -> None:
    code, error, got = called(["-n", "2"], "n")
    assert (code, got) == (2, []) and "-n" in error


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-t", "-1"], "temperature=-1.0 must be 0"),
        (["--max-tokens", "0"], "max_tokens=0 must be at least 1"),
        (["--logit-bias", "5"], "--logit-bias '5' must be a token id and a number"),
        (["--logit-bias", "x=1"], "--logit-bias 'x=1' must be"),
        (["--stop", ""], "must not hold an empty string"),
    ],
)
def test_bad_wishes_are_told(arguments: list[str], sentence: str) -> None:
    code, error, got = called(arguments)
    assert (code, got) == (2, [])
    assert error.startswith("Error: ") and sentence in error and len(error.splitlines()) == 1
