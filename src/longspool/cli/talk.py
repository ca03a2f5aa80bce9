"""`chat`: turn after turn; each sends the whole conversation again."""

from __future__ import annotations

import contextlib
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from ..errors import LongspoolError
from . import show
from .answer import streamed
from .texts import joined

if TYPE_CHECKING:
    from ..engine.sampler import Sampling
    from ..llm import LLM

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  gives input() its line editing


class Stopped(Exception):
    """The answer was stopped."""


class Patience:
    """The first Ctrl-C waits for the end of the engine's step, so that the next turn finds everything in order; a second one does not."""

    def __enter__(self) -> Patience:
        self._asked, self._before = False, signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        if self._asked:
            raise Stopped

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True


def talk(llm: LLM, sampling: Sampling, text: str) -> None:
    """Answer lines until they end; `text` goes ahead of the first one."""
    messages: list[dict[str, str]] = []
    if sys.stdin.isatty():
        show.console().print("Ctrl-C stops an answer, Ctrl-D leaves.", style="dim")
    while (said := _line()) is not None:
        if not said.strip():
            continue
        asked = [*messages, {"role": "user", "content": said if messages else joined(text, said)}]
        try:
            answer = _turn(llm, sampling, asked)
        except LongspoolError as error:
            show.console().print(f"Error: {error}", markup=False)
            continue
        if answer:
            messages = [*asked, {"role": "assistant", "content": answer}]


def _turn(llm: LLM, sampling: Sampling, messages: list[dict[str, str]]) -> str:
    """What the model said, to where it was stopped."""
    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        sys.stdout.write(piece)

    prompt, told = llm.chat_ids(messages), "Stopped."
    with Patience() as patience, contextlib.suppress(Stopped):
        told = show.line(streamed(llm, prompt, sampling, write, patience.check).report)
    print(flush=True)
    show.console().print(told, style="dim")
    return "".join(pieces)


def _line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
