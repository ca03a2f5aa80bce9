"""The kernels of a step, written down while it runs, so that a step that differs in its numbers alone can be run again without Python.

A decoding step calls a few hundred compiled functions with addresses. While a `Tape` is open on a thread, `run` writes each call down
and everything whose address it takes is kept; `play` makes the same calls again over whatever the tensors hold by then. What can't be
seen that way makes the tape useless and is told in `why`: arithmetic by torch, and ops without a kernel that is written down.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# What makes or reshapes tensors without touching what they hold.
_NAMES = (
    "alias as_strided detach empty expand lift_fresh new_empty permute select slice split_with_sizes squeeze t transpose unbind "
    "unsqueeze view"
)
HARMLESS = frozenset(f"aten::{name}" for name in _NAMES.split(" "))


class Tape:
    """Calls in order, and what keeps their addresses good."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., object], tuple[int, ...]]] = []
        self.held: list[object] = []
        self.why = ""
        self._rooms: list[torch.Tensor] = []

    def add(self, kernel: Callable[..., object], numbers: tuple[int, ...], held: tuple[object, ...]) -> None:
        self.calls.append((kernel, numbers))
        self.held.append(held)

    def spoil(self, why: str) -> None:
        self.why = self.why or why

    def room(self, size: int) -> torch.Tensor:
        """Scratch memory of the tape's own, the same for all its calls, since they run one after another."""
        if not self._rooms or self._rooms[-1].numel() < size:
            self._rooms.append(torch.empty(size, dtype=torch.uint8))
        return self._rooms[-1]

    def play(self) -> None:
        """All calls once more."""
        for kernel, numbers in self.calls:
            kernel(*numbers)


class _Now(threading.local):
    tape: Tape | None = None


now = _Now()


def run(kernel: Callable[..., object], numbers: tuple[int, ...], *held: object) -> None:
    """Call a compiled function; `held` is what the numbers point to."""
    kernel(*numbers)
    if now.tape is not None:
        now.tape.add(kernel, numbers, held)


@contextmanager
def recording() -> Iterator[Tape]:
    """Write down what this thread runs."""
    tape = now.tape = Tape()
    try:
        with _Watch(tape):
            yield tape
    finally:
        now.tape = None


class _Watch(TorchDispatchMode):
    """Sees what torch does itself."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name not in HARMLESS:
            self.tape.spoil(f"torch ran {func._schema.name}")
        return func(*args, **(kwargs or {}))
