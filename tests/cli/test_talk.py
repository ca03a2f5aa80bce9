"""Conversations: every turn sends the whole of it, a mistake costs one turn, Ctrl-C stops an answer and leaves nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longspool import LLM, Sampling
from longspool.cli import talk
from longspool.cli.main import app


@pytest.fixture(scope="module")
def llm(tiny_dir: Path) -> LLM:
    return LLM(str(tiny_dir))


def spoken(llm: LLM, *said: str, **wishes: object) -> list[str]:
    """The answers to these turns, by the library."""
    messages: list[dict[str, str]] = []
    for text in said:
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": llm.chat(messages, **wishes).text})
    return [m["content"] for m in messages[1::2]]


def test_turns_are_sent_again(tiny_dir: Path, llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A long text.")
    result = CliRunner().invoke(app, ["chat", "-m", str(tiny_dir), "--max-tokens", "10"], input="hello\n\nand then?\n")
    answers = spoken(llm, "hello", "and then?", max_tokens=10)
    assert result.exit_code == 0 and result.stdout == "".join(f"{text}\n" for text in answers)
    assert len(set(answers)) == 2
    with_file = CliRunner().invoke(
        app, ["chat", "-m", str(tiny_dir), "--max-tokens", "10", "-f", str(tmp_path / "a.txt")], input="hi\nso?\n"
    )
    assert with_file.stdout == "".join(f"{text}\n" for text in spoken(llm, "A long text.\n\nhi", "so?", max_tokens=10))
    told = [line for line in with_file.stderr.splitlines() if line]
    assert len(told) == 2 and all("tokens read, first token after" in line and "KV memory" in line for line in told)


def test_a_mistake_costs_one_turn(tiny_dir: Path, llm: LLM) -> None:
    result = CliRunner().invoke(app, ["chat", "-m", str(tiny_dir), "--max-tokens", "6"], input=f"hello\n{'x' * 3000}\nand then?\n")
    assert result.exit_code == 0 and "Error: The prompt has" in result.stderr
    assert result.stdout == "".join(f"{text}\n" for text in spoken(llm, "hello", "and then?", max_tokens=6))


def test_stopping_keeps_what_was_said(llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines, before = iter(["hello", "go on"]), signal.getsignal(signal.SIGINT)
    sent, steps = [], 0
    chat_ids, check = llm.chat_ids, talk.Patience.check

    def listen(messages: list[dict[str, str]], recipe: str | None = None) -> list[int]:
        sent.append([dict(m) for m in messages])
        return chat_ids(messages, recipe)

    def step(patience: talk.Patience) -> None:
        nonlocal steps
        steps += 1
        if steps == 12:
            os.kill(os.getpid(), signal.SIGINT)
        check(patience)

    monkeypatch.setattr(talk, "_line", lambda: next(lines, None))
    monkeypatch.setattr(llm, "chat_ids", listen)
    monkeypatch.setattr(talk.Patience, "check", step)
    talk.talk(llm, Sampling(max_tokens=40, ignore_eos=True), "")
    out, err = capsys.readouterr()
    first = sent[1][1]["content"]
    whole = llm.chat([{"role": "user", "content": "hello"}], max_tokens=40, ignore_eos=True).text
    assert first and whole.startswith(first) and len(first) < len(whole)
    assert out.startswith(f"{first}\n") and "Stopped." in err
    assert out.splitlines()[-1] == llm.chat(sent[1], max_tokens=40, ignore_eos=True).text.splitlines()[-1]
    assert llm.engine.pools.ledger.now["device"] == 0 and not llm.engine.busy
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def loud() -> Iterator[None]:
    """Ctrl-C raises, whatever the test runner's parent has set."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_ctrl_c_does_not_wait(loud: None) -> None:
    with talk.Patience() as patience:
        patience.check()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(talk.Stopped):
            patience.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
