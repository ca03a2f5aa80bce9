"""Tokens become text while they arrive: `Detokenizer` turns ids into text that stays, `StopStrings` cuts it at a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_BROKEN = "\ufffd"
# Where vocabularies keep their single bytes: after at most a thousand special tokens.
_BYTES_WITHIN = 2048


class Decoder(Protocol):
    """What a tokenizer must be able to do here. `decode` must not clean up spaces, which would change text already shown."""

    @property
    def vocab_size(self) -> int: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Detokenizer:
    """Text of a growing list of tokens. All pushes and the flush together give `decode` of the whole list.

    Nothing is shown that a later token may change. Half a character waits for its other half. Where a tokenizer writes unknown
    characters as runs of byte tokens (sentencepiece's byte fallback), one broken byte spoils the run, so all of it waits for the run's end.

    Only a window of the newest tokens is decoded: those not shown yet and, before them, those that showed the last text, because a
    decoder may drop the space in front of its first token.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._decode = tokenizer.decode
        self._breaker = _broken_token(tokenizer)
        self._window: list[int] = []
        self._context = 0
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that this token makes certain, often ""."""
        self._window.append(token)
        text = self._decode(self._window)
        certain = text.rstrip(_BROKEN)
        if len(certain) <= self._shown or not self._lasts(certain):
            return ""
        fresh, self._shown = certain[self._shown :], len(certain)
        # Spaces alone are no context: a decoder may drop them all, and go on dropping.
        if certain == text and (kept := self._decode(self._window[self._context :])):
            del self._window[: self._context]
            self._context, self._shown = len(self._window), len(kept)
        return fresh

    def flush(self) -> str:
        """What still waits; the list of tokens ends here and a new one may begin."""
        rest = self._decode(self._window)[self._shown :]
        self._window, self._context, self._shown = [], 0, 0
        return rest

    def _lasts(self, text: str) -> bool:
        """Even a broken byte after the window would leave this text as it is."""
        return self._breaker is None or self._decode([*self._window, self._breaker]).startswith(text)


def _broken_token(tokenizer: Decoder) -> int | None:
    """A token that alone is no character, or None where there are none."""
    end = min(tokenizer.vocab_size, _BYTES_WITHIN)
    for start in range(0, end, 64):
        block = range(start, min(start + 64, end))
        if _BROKEN in tokenizer.decode(block):  # whole blocks first: this runs for every request
            return next((token for token in block if _BROKEN in tokenizer.decode([token])), None)
    return None


class StopStrings:
    """Cuts a stream of text before the first stop string that is complete; if two end together, before the longer one.

    Text that may be the beginning of a stop string is held back, so the outcome does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """(text to show, whether a stop string has been met). After a stop nothing more is shown."""
        if self._stopped:
            return "", True
        text = self._held + text
        if met := [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]:
            self._held, self._stopped = "", True
            return text[: min(met)[1]], True
        cut = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What is held back, when no more text comes."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` could begin `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
