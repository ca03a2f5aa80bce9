"""What a command reads: files or standard input, checked to be text."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import LongspoolError

_STDIN = Path("-")


def context(files: Sequence[Path]) -> str:
    """The files one after another; without any, what is piped in; "" at a terminal. "-" stands for standard input."""
    if not files:
        return "" if sys.stdin is None or sys.stdin.isatty() else _piped()
    return "\n\n".join(_piped() if path == _STDIN else _file(path) for path in files)


def joined(text: str, question: str) -> str:
    """One prompt: the long text, then the question about it. Raises LongspoolError where there is neither."""
    asked = _decoded(os.fsencode(question), "The question")  # what the shell passes need not be UTF-8
    parts = [part for part in (text.strip("\n"), asked) if part.strip()]
    if not parts:
        raise LongspoolError("The prompt is empty: ask with -p, name a file with -f, or pipe a text in.")
    return "\n\n".join(parts)


def _file(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise LongspoolError(f"There is no file {path}.") from None
    except IsADirectoryError:
        raise LongspoolError(f"{path} is a directory; name the files in it.") from None
    text = _decoded(raw, str(path))
    if not text.strip():
        raise LongspoolError(f"{path} is empty.")
    return text


def _piped() -> str:
    return _decoded(sys.stdin.buffer.read(), "Standard input")


def _decoded(raw: bytes, name: str) -> str:
    """Text without a byte order mark. A zero byte is valid UTF-8, but no text has one."""
    bad, text = raw.find(b"\0"), ""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        bad = error.start if bad < 0 else min(bad, error.start)
    if bad >= 0:
        raise LongspoolError(f"{name} is not text: byte 0x{raw[bad]:02x} at offset {bad} is none of UTF-8 text, which is expected.")
    return text.removeprefix("\ufeff")
