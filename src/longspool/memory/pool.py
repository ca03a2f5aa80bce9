"""Pages on a tier: taken, shared, copied on write, and physically given back. What is resident stays on the device."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..errors import OutOfMemory
from ..method import Method
from ..roles import Field
from ..values.fit import Fit
from .disk import PageFile
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


def size(fields: Mapping[str, Field]) -> int:
    """Bytes of a page."""
    return sum(prod(f.shape) * item(f.dtype) for f in fields.values())


def cut(fields: Mapping[str, Field], per: int) -> dict[str, Field]:
    """The fields of a piece, of `per` to a page."""
    return {
        name: f if f.tokens is None else replace(f, shape=tuple(n // per if i == f.tokens else n for i, n in enumerate(f.shape)))
        for name, f in fields.items()
    }


class Draft:
    """Some pages in order, as a codec reads and writes them: on their way home, or brought for one use."""

    def __init__(self, page: int, data: dict[str, Tensor], books: Pool | None = None, fits: Fits | None = None) -> None:
        self.page, self.data, self.books = page, data, books
        self.fits = Fits() if fits is None else fits

    def __getitem__(self, name: str) -> Tensor:
        return self.data[name]

    def learnt(self, name: str, pages: Tensor) -> Tensor:
        return _learnt(self.books, name, self.data["book"][pages])

    def booked(self, pages: Tensor) -> Tensor:
        return self.data["book"][pages]

    def fitted(self, method: Method) -> Fit:
        """What a method was fitted to the model."""
        return self.fits[method]


class Pool:
    """Reference-counted pages of one layer: on one tier, but resident fields on the device. `pool[name]` is the tensor [capacity, *field
    shape] of a field that lies in memory; `get` and `put` serve all.

    Address space for `capacity` bytes is reserved at once and committed on touch, so pages never move; large runs of free
    pages are handed back to the system. `piece` tokens of a page can be read alone. `device` is where the device tier is, and `reserve` the
    address space of what is resident.
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
        *,
        piece: int = 0,
        reserve: int = 0,
        folder: str = "",
    ) -> None:
        self.fits = Fits() if fits is None else fits
        self.page, self.tier, self.ledger, self.fields = page, tier, ledger, dict(fields)
        self.piece = piece or page
        self.device = device or torch.device("cpu")
        self.away = {} if tier == "device" else {name: f for name, f in fields.items() if not f.resident}
        """The fields that don't lie on the device."""
        near = {name: f for name, f in fields.items() if name not in self.away}
        self.disk = PageFile(cut(self.away, page // self.piece), folder) if tier == "disk" else None
        home = size(self.away) if self.disk is None else self.disk.record * (page // self.piece)
        self.sizes = {"device": size(near), tier: home} if self.away else {"device": size(near)}
        """Bytes of a page on each tier."""
        self.page_bytes = sum(self.sizes.values())
        self.capacity = max(capacity // max(home or size(near), 1), 1)
        if reserve and self.away and near:
            self.capacity = max(min(self.capacity, reserve // size(near)), 1)
        self._data, self._maps = {}, {}
        for name, f in (near if self.disk is not None else fields).items():
            where = torch.device("cpu") if name in self.away else self.device
            self._data[name], self._maps[name] = lazy((self.capacity, *f.shape), f.dtype, where)
        self.books: Pool | None = None
        """What codecs have learnt; `book` says for each page where, and which page of its row it is."""
        self.refs = np.zeros(self.capacity, np.int32)
        self._free: list[int] = []
        self._top = 0
        self.used = 0

    def __getitem__(self, name: str) -> Tensor:
        return self._data[name]

    def learnt(self, name: str, pages: Tensor) -> Tensor:
        return _learnt(self.books, name, self._data["book"][pages])

    def booked(self, pages: Tensor) -> Tensor:
        return self._data["book"][pages]

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def fitted(self, method: Method) -> Fit:
        """What a method was fitted to the model."""
        return self.fits[method]

    def get(self, at: Tensor, grain: int = 0, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Fields of the pages at int64 [S] (on the CPU), or of pieces of `grain` tokens, where they lie. Raises DamagedPage."""
        per = self.page // (grain or self.page)
        wanted = self.fields if names is None else names
        got = {name: _of(self._data[name], self.fields[name], at, per) for name in wanted if name in self._data}
        if self.disk is not None and any(name in self.away for name in wanted):
            got |= {name: value for name, value in self._from_disk(self.disk, at, per).items() if name in wanted}
        return got

    def put(self, at: Tensor, values: Mapping[str, Tensor]) -> None:
        """Write whole pages at int64 [S] (on the CPU). Raises OutOfMemory where a disk takes no more."""
        for name, value in values.items():
            if name in self._data:
                self._data[name][at] = value.to(self._data[name].device)
        if self.disk is not None and self.away:
            per = self.page // self.piece
            pieces = {name: _pieces(values[name], f, per) for name, f in self.away.items()}
            self.disk.put((at.numpy()[:, None] * per + np.arange(per)).reshape(-1), pieces)

    def _from_disk(self, disk: PageFile, at: Tensor, per: int) -> dict[str, Tensor]:
        """Pages, or `per` pieces of each, from records of `piece` tokens."""
        n = self.page // self.piece // per  # records to read for each entry
        got = disk.get((at.numpy()[:, None] * n + np.arange(n)).reshape(-1))
        return {name: _whole(value, self.away[name], n) for name, value in got.items()}

    def take(self, n: int) -> np.ndarray:
        """n fresh pages, int32. Raises OutOfMemory when the reserved room is used up."""
        if self.used + n > self.capacity:
            have, want = (pages * self.sizes.get(self.tier, self.page_bytes) for pages in (self.capacity, self.used + n))
            raise OutOfMemory(f"The {self.tier} tier of one layer holds {have:,} bytes and this needs {want:,}; raise the memory budget.")
        reuse = min(n, len(self._free))
        pages = np.empty(n, np.int32)
        for i in range(reuse):
            pages[i] = self._free.pop()
        pages[reuse:] = np.arange(self._top, self._top + n - reuse)
        self._top += n - reuse
        self.refs[pages] = 1
        self.used += n
        self._book(n)
        return pages

    def _book(self, pages: int) -> None:
        for tier, amount in self.sizes.items():
            if amount:
                self.ledger.add(tier, pages * amount)

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
        self._book(-len(gone))
        for first, last in _runs(gone):
            self._release(first, last + 1)
        if self.disk is not None and not self.used:
            self.disk.clear()

    def own(self, page: int) -> int:
        """This page if it has one owner, else a copy of it."""
        if self.refs[page] == 1:
            return page
        copy = int(self.take(1)[0])
        self.put(torch.tensor([copy]), self.get(torch.tensor([page])))
        self.give(np.array([page], np.int32))
        return copy

    def _release(self, first: int, end: int) -> None:
        """Hand the memory of pages first to end back to the system, in whole system pages."""
        if self.disk is not None:
            per = self.page // self.piece
            self.disk.release(first * per, end * per)
        for name, raw in self._maps.items():
            if raw is None or not hasattr(raw, "madvise"):
                continue
            bytes_each = size({name: self.fields[name]})
            lo = -(-first * bytes_each // mmap.PAGESIZE) * mmap.PAGESIZE
            hi = end * bytes_each // mmap.PAGESIZE * mmap.PAGESIZE
            if hi - lo >= _RELEASE:
                raw.madvise(mmap.MADV_DONTNEED, lo, hi - lo)

    def check(self) -> None:
        """Raise AssertionError where the books don't balance."""
        assert self.used == int((self.refs > 0).sum()), f"{self.used} pages in use, {int((self.refs > 0).sum())} have owners"
        assert not (self.refs < 0).any(), "a page was given back twice"
        assert len(set(self._free)) == len(self._free) and not self.refs[self._free].any(), "a free page has an owner"


def _learnt(books: Pool | None, name: str, at: Tensor) -> Tensor:
    assert books is not None, "only a codec that learns has books"
    return books[name][at[:, 0].long()]


def _of(data: Tensor, form: Field, at: Tensor, per: int) -> Tensor:
    """Entries of one field: pages, or pieces of which there are `per` to a page."""
    if per == 1:
        return data[at]
    page, piece = torch.div(at, per, rounding_mode="floor"), at % per
    if form.tokens is None:
        return data[page]
    return _split(data, form.tokens + 1, per)[page, piece]


def _pieces(value: Tensor, form: Field, per: int) -> Tensor:
    """Pages [S, ...] cut into [S * per, ...] pieces."""
    if per == 1:
        return value
    if form.tokens is None:
        return value.repeat_interleave(per, 0)
    return _split(value, form.tokens + 1, per).flatten(0, 1)


def _split(pages: Tensor, axis: int, per: int) -> Tensor:
    """Pages [S, ...] as [S, per, ...] by their tokens' dimension, without a copy where they are contiguous."""
    shape = pages.shape
    return pages.reshape(*shape[:axis], per, shape[axis] // per, *shape[axis + 1 :]).movedim(axis, 1)


def _whole(value: Tensor, form: Field, per: int) -> Tensor:
    """Pieces [S * per, ...] put together to [S, ...]."""
    if per == 1:
        return value
    pieces = value.view(-1, per, *value.shape[1:])
    return pieces[:, 0] if form.tokens is None else pieces.movedim(1, form.tokens + 1).flatten(form.tokens + 1, form.tokens + 2)


def _runs(pages: np.ndarray) -> Iterable[tuple[int, int]]:
    """Maximal runs of consecutive ids, (first, last)."""
    cuts = np.flatnonzero(np.diff(pages) != 1)
    yield from zip(pages[np.r_[0, cuts + 1]].tolist(), pages[np.r_[cuts, len(pages) - 1]].tolist(), strict=True)
