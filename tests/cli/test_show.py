"""Numbers as people read them, and bars only where somebody looks."""

from __future__ import annotations

import pytest

from longspool.cli import show
from longspool.cli.guard import _sentence
from longspool.report import Bytes, Report

REPORT = Report(
    prompt_tokens=7000,
    completion_tokens=20,
    finish_reason="stop",
    ttft_s=14.0,
    prefill_tok_s=500.0,
    decode_tok_s=25.25,
    memory=Bytes(10 * 2**20, 50 * 2**20, 161280000, 3 * 2**20, 0, 2**30),
    recipe="snapkv + int4",
    actions={"snapkv": {"evicted_tokens": 5383800.0, "share": 0.25}},
    kernels={"attend_rows": "cpu", "rope": "ref (cpu: none for rope)", "merge": "ref (cpu: none for merge)", "unpack": "cpu, ref (cpu: x)"},
    seed=7,
    notes=("int4 did nothing in this run.",),
)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (161280000, "153.8 MiB"), (3 * 2**40, "3.0 TiB")],
)
def test_sizes(count: int, text: str) -> None:
    assert show.size(count) == text


def test_summary(capsys: pytest.CaptureFixture[str]) -> None:
    show.summary(REPORT)
    out, err = capsys.readouterr()
    words = " ".join(err.split())
    assert out == ""
    for fact in (
        "recipe snapkv + int4",
        "7,000 tokens, first token after 14.00 s (500 tokens/s)",
        "20 tokens (25.2 tokens/s), stop, seed 7",
        "10.0 MiB now, 50.0 MiB at the peak, 153.8 MiB dense, 3.0 MiB on the host; the process's peak is 1.0 GiB",
        "snapkv evicted tokens 5,383,800, share 0.25",
        "kernels rope, merge: ref (cpu: none for it)",
        "kernels unpack: cpu, ref (cpu: x)",
        "Note: int4 did nothing in this run.",
    ):
        assert fact in words
    assert "attend_rows" not in words
    assert show.line(REPORT).startswith(
        "7,000 tokens read, first token after 14.00 s, 20 tokens at 25.2 a second, KV memory 10.0 MiB of 153.8 MiB"
    )


def test_no_bar_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with show.Bar("reading") as bar:
        bar.tokens(3, 4)
        bar.fraction(0.5, "half")
        bar.stop()
    assert capsys.readouterr() == ("", "")


def test_system_errors_are_sentences() -> None:
    assert _sentence(OSError(28, "No space left on device", "/x/y")) == "/x/y: No space left on device."
    assert _sentence(OSError("odd.")) == "odd."
