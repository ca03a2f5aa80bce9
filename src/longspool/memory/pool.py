"""Pages on a tier: taken, shared, copied on write, and physically given back."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..errors import OutOfMemory
from ..method import Method
from ..roles import Field
from ..values.fit import Fit
from .fits import Fits

_LAZY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000) if hasattr(mmap, "MAP_ANONYMOUS") else 0
_RELEASE = 1 << 16  # bytes: smaller runs of free pages are kept for reuse, since giving them back costs more than it saves


@dataclass
class Ledger:
    """Live bytes by tier, now and at the peak. Every storage of the memory adds to it what it holds."""

    now: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0, "disk": 0})
    peak: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0, "disk": 0})
    total_peak: int = 0

    def add(self, tier: str, amount: int) -> None:
        now = self.now[tier] = self.now[tier] + amount
        if now > self.peak[tier]:
            self.peak[tier] = now
        if amount > 0:
            self.total_peak = max(self.total_peak, sum(self.now.values()))

    def mark(self) -> None:
        """Begin a new peak measurement here."""
        self.peak = dict(self.now)
        self.total_peak = sum(self.now.values())


def item(dtype: torch.dtype) -> int:
    """Bytes of one element."""
    return torch.empty((), dtype=dtype).element_size()


def lazy(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, mmap.mmap | None]:
    """A tensor whose memory is committed page by page on first touch, where the system can do that."""
    size = prod(shape) * item(dtype)
    if device.type != "cpu" or not _LAZY or size == 0:
        return torch.empty(shape, dtype=dtype, device=device), None
    raw = mmap.mmap(-1, size, flags=_LAZY)
    return torch.frombuffer(raw, dtype=dtype).view(shape), raw


class Pool:
    """Reference-counted pages of one layer on one tier. `pool[name]` is the tensor [capacity, *field shape].

    Address space for `capacity` bytes is reserved at once and committed on touch, so pages never move; large runs of free
    pages are handed back to the system.
    """

    def __init__(
        self,
        fields: Mapping[str, Field],
        page: int,
        tier: str,
        ledger: Ledger,
        capacity: int,
        device: torch.device | None = None,
        fits: Fits | None = None,
    ) -> None:
        self.fits = Fits() if fits is None else fits
        self.page, self.tier, self.ledger, self.fields = page, tier, ledger, dict(fields)
        self.device = device if device is not None and tier == "device" else torch.device("cpu")
        self.page_bytes = sum(prod(f.shape) * item(f.dtype) for f in fields.values())
        self.capacity = max(capacity // self.page_bytes, 1)
        self._data, self._maps = {}, {}
        for name, f in fields.items():
            self._data[name], self._maps[name] = lazy((self.capacity, *f.shape), f.dtype, self.device)
        self.refs = np.zeros(self.capacity, np.int32)
        self._free: list[int] = []
        self._top = 0
        self.used = 0

    def __getitem__(self, name: str) -> Tensor:
        return self._data[name]

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def fitted(self, method: Method) -> Fit:
        """What a method was fitted to the model."""
        return self.fits[method]

    def take(self, n: int) -> np.ndarray:
        """n fresh pages, int32. Raises OutOfMemory when the reserved room is used up."""
        if self.used + n > self.capacity:
            have, want = self.capacity * self.page_bytes, (self.used + n) * self.page_bytes
            raise OutOfMemory(f"The {self.tier} tier of one layer holds {have:,} bytes and this needs {want:,}; raise the memory budget.")
        reuse = min(n, len(self._free))
        pages = np.empty(n, np.int32)
        for i in range(reuse):
            pages[i] = self._free.pop()
        pages[reuse:] = np.arange(self._top, self._top + n - reuse)
        self._top += n - reuse
        self.refs[pages] = 1
        self.used += n
        self.ledger.add(self.tier, n * self.page_bytes)
        return pages

    def share(self, pages: np.ndarray) -> None:
        """One more owner for each page."""
        np.add.at(self.refs, pages, 1)

    def give(self, pages: np.ndarray) -> None:
        """One owner less; pages that nobody owns are free again."""
        np.subtract.at(self.refs, pages, 1)
        gone = np.sort(pages[self.refs[pages] == 0])
        if not len(gone):
            return
        self._free += gone[::-1].tolist()
        self.used -= len(gone)
        self.ledger.add(self.tier, -len(gone) * self.page_bytes)
        for first, last in _runs(gone):
            self._release(first, last + 1)

    def own(self, page: int) -> int:
        """This page if it has one owner, else a copy of it."""
        if self.refs[page] == 1:
            return page
        copy = int(self.take(1)[0])
        for data in self._data.values():
            data[copy] = data[page]
        self.give(np.array([page], np.int32))
        return copy

    def _release(self, first: int, end: int) -> None:
        """Hand the memory of pages first to end back to the system, in whole system pages."""
        for name, raw in self._maps.items():
            if raw is None or not hasattr(raw, "madvise"):
                continue
            size = prod(self.fields[name].shape) * item(self.fields[name].dtype)
            lo = -(-first * size // mmap.PAGESIZE) * mmap.PAGESIZE
            hi = end * size // mmap.PAGESIZE * mmap.PAGESIZE
            if hi - lo >= _RELEASE:
                raw.madvise(mmap.MADV_DONTNEED, lo, hi - lo)

    def check(self) -> None:
        """Raise AssertionError where the books don't balance."""
        assert self.used == int((self.refs > 0).sum()), f"{self.used} pages in use, {int((self.refs > 0).sum())} have owners"
        assert not (self.refs < 0).any(), "a page was given back twice"
        assert len(set(self._free)) == len(self._free) and not self.refs[self._free].any(), "a free page has an owner"


def _runs(pages: np.ndarray) -> Iterable[tuple[int, int]]:
    """Maximal runs of consecutive ids, (first, last)."""
    cuts = np.flatnonzero(np.diff(pages) != 1)
    yield from zip(pages[np.r_[0, cuts + 1]].tolist(), pages[np.r_[cuts, len(pages) - 1]].tolist(), strict=True)
