"""The text of an answer while it grows: detokenized, cut at stop strings."""

from __future__ import annotations

from .text import Decoder, Detokenizer, StopStrings


class Answer:
    """Tokens in, certain text out. `text` is what is out so far."""

    def __init__(self, tokenizer: Decoder, stops: tuple[str, ...]) -> None:
        self._detokenizer, self._stops = Detokenizer(tokenizer), StopStrings(stops)
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> bool:
        """Add a token; whether a stop string ends the answer here."""
        return self._add(self._detokenizer.push(token))

    def close(self) -> None:
        """The answer ends: what was held back comes out."""
        if not self.stopped:
            self._add(self._detokenizer.flush())
        if not self.stopped:
            self.text += self._stops.flush()

    def _add(self, fresh: str) -> bool:
        emitted, self.stopped = self._stops.push(fresh)
        self.text += emitted
        return self.stopped
