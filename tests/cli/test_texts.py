"""What counts as text, and how mistakes are told."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from longspool.cli import texts
from longspool.errors import LongspoolError


class Piped:
    """Standard input that holds bytes."""

    def __init__(self, raw: bytes, terminal: bool = False) -> None:
        self.buffer, self._terminal = io.BytesIO(raw), terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def note(tmp_path: Path) -> Path:
    path = tmp_path / "note.txt"
    path.write_bytes("\ufeffnaïve ✓\r\n".encode())
    return path


def test_files_follow_each_other(note: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("two")
    assert texts.context([note, other]) == "naïve ✓\r\n\n\ntwo"


@pytest.mark.parametrize(("files", "terminal", "expected"), [([], False, "piped"), ([], True, ""), ([Path("-")], True, "piped")])
def test_standard_input(files: list[Path], terminal: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Piped(b"piped", terminal))
    assert texts.context(files) == expected


def test_files_leave_standard_input_alone(note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piped = Piped(b"piped")
    monkeypatch.setattr("sys.stdin", piped)
    assert "piped" not in texts.context([note]) and piped.buffer.tell() == 0


@pytest.mark.parametrize(
    ("raw", "byte", "offset"),
    [
        (b"abc\xffdef", "0xff", 3),
        (b"\xff\xfea\0b\0", "0xff", 0),
        (b"\x7fELF\0\0\xff", "0x00", 4),
        ("\ufeffgood".encode() + b"\xc3(", "0xc3", 7),
        (b"cut \xe2\x9c", "0xe2", 4),
    ],
)
def test_what_is_no_text(raw: bytes, byte: str, offset: int, tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(raw)
    with pytest.raises(LongspoolError, match=f"image.png is not text: byte {byte} at offset {offset} .*UTF-8"):
        texts.context([path])


def test_missing_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    for name, sentence in (("none.txt", "There is no file .*none.txt"), (".", "is a directory"), ("empty", "is empty")):
        with pytest.raises(LongspoolError, match=sentence):
            texts.context([tmp_path / name])


def test_a_prompt_of_text_and_question() -> None:
    assert texts.joined("\na\nb\n\n", "why?") == "a\nb\n\nwhy?"
    assert texts.joined("a", " ") == "a" and texts.joined("", "why?") == "why?"
    with pytest.raises(LongspoolError, match="prompt is empty"):
        texts.joined(" \n", "  ")
    with pytest.raises(LongspoolError, match="The question is not text: byte 0xff at offset 2"):
        texts.joined("a", os.fsdecode(b"hi\xff"))
