"""The kernels of a step, written down while it runs, so that a step that differs in its numbers alone can be run again without Python.

A decoding step calls a few hundred compiled functions with addresses. While a `Tape` is open on a thread, `run` writes each call down
and everything whose address it takes is kept; `play` makes the same calls again over whatever the tensors hold by then. What can't be
seen that way makes the tape useless and is told in `why`: arithmetic by torch, and ops without a kernel that is written down.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

# What makes tensors without filling them, or tells of them without looking at what they hold.
_TELLING = "__len__ data_ptr dim element_size is_contiguous new_empty numel numpy size stride"
# What reshapes a tensor, and copies it only where it must.
_RESHAPING = "__getitem__ as_strided contiguous expand flatten reshape split_with_sizes squeeze to transpose unflatten unsqueeze view"
HARMLESS = frozenset(["torch.empty", "torch.empty_like", *(f"torch.Tensor.{name}" for name in _TELLING.split(" "))])
VIEWS = frozenset(f"torch.Tensor.{name}" for name in _RESHAPING.split(" "))


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


class _Watch(TorchFunctionMode):
    """Sees what torch itself is asked for. A mode below torch's dispatcher would see more and load 140 MB of its compiler."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sort = _sort(func)
        if sort != "harmless" and not (sort == "view" and _shares(result, args[0])):
            self.tape.spoil(f"torch ran {resolve_name(func) or func}")
        return result


@lru_cache(maxsize=1024)
def _sort(func: Any) -> str:
    """What a function of torch does, as far as a tape cares; its name is slow to find."""
    name = str(resolve_name(func) or func)
    return "harmless" if name in HARMLESS or name.endswith(".__get__") else "view" if name in VIEWS else "work"


def _shares(result: Any, source: torch.Tensor) -> bool:
    """Whether a tensor, or each of several, is the same memory as its source."""
    parts = result if isinstance(result, tuple) else (result,)
    return all(part.untyped_storage().data_ptr() == source.untyped_storage().data_ptr() for part in parts)
