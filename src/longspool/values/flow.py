"""What flows say to the engine: run this step (Ask), these tokens are out (Emit)."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from .step import Step

Want = Literal["none", "last", "all", "state"]
M = TypeVar("M")


@dataclass(frozen=True)
class Choice:
    """A token. `logprob` and `top` (token, logprob; best first) are filled where they were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Ask(Generic[M]):
    """Run this step over this memory. The reply: logits of the last token [1, V] or of all [N, V], the last final state
    [1, W] ("state"), or an empty tensor ("none")."""

    step: Step
    memory: M
    want: Want = "last"


@dataclass(frozen=True)
class Emit:
    """These tokens are out. The reply is a bool: whether the answer goes on."""

    choices: tuple[Choice, ...]


Flow = Generator[object, object, object]
"""Yields Asks and Emits, receives their replies; an ingest flow returns the reply to the prompt's last token."""
