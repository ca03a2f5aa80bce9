"""A zone: rows of pages of one request at one layer, growing at the end, shrinking at either."""

from __future__ import annotations

import numpy as np
import torch

from ..values import Rows
from .cache import Cache
from .pool import Pool


class Zone:
    """Page tables of R rows over one pool. Pages are shared by forks and copied before a shared one is written."""

    def __init__(self, pool: Pool, rows: int) -> None:
        self.pool = pool
        self.table = np.full((rows, 4), -1, np.int32)
        self.length = np.zeros(rows, np.int32)
        self._rows: Rows | None = None
        self._each: tuple[Rows, Rows] | None = None
        self._table: torch.Tensor | None = None
        self._slack = 0  # tokens that every row can still take without looking at pages
        self.near: list[Cache] = []
        """Copies of its pages on nearer tiers."""
        pool.ledger.add("device", self.side)

    @property
    def side(self) -> int:
        """Bytes of the tables."""
        return self.table.nbytes + self.length.nbytes

    @property
    def filled(self) -> np.ndarray:
        """Pages in use, [R]."""
        return -(-self.length // self.pool.page)

    @property
    def spare(self) -> int:
        """Tokens that every row can still take in its pages as they are."""
        return self._slack

    def pages_in_order(self) -> torch.Tensor:
        """The table as far as it is in use, int32 [R, P]; the same tensor until it changes."""
        if self._table is None:
            self._table = torch.from_numpy(np.ascontiguousarray(self.table[:, : int(self.filled.max(initial=0))]))
        return self._table

    def rows(self) -> Rows:
        """The zone as a value."""
        if self._rows is None:
            self._rows = Rows(self.pages_in_order(), torch.from_numpy(self.length.copy()), self.pool.page)
        return self._rows

    def shared(self, heads: int) -> Rows:
        """A row for each of so many heads that all pages belong to; a page has an id for each of them, page * heads + head."""
        rows = self.rows()
        if self._each is None or self._each[0] is not rows:
            table = torch.where(rows.table >= 0, rows.table * heads + torch.arange(heads, dtype=torch.int32)[:, None], -1)
            self._each = rows, Rows(table, rows.length.repeat(heads), rows.grain)
        return self._each[1]

    def grow(self, add: np.ndarray | int) -> None:
        """Room for `add` more tokens per row: fresh pages where needed, a copy of a last page that others share."""
        if isinstance(add, int) and add <= self._slack:
            self.length += np.int32(add)
            self._slack -= add
            self._rows = None
            return
        have, page = self.filled, self.pool.page
        for r in np.flatnonzero((self.length % page != 0) & (add > 0)):
            last = self.table[r, have[r] - 1]
            if self.pool.refs[last] > 1:
                self.forget(np.array([last]))
                self.table[r, have[r] - 1] = self.pool.own(int(last))
                self._table = None
        want = -(-(self.length + add) // page)
        if (want > have).any():
            self._extend(have, want)
        self.length += np.int32(add) if isinstance(add, int) else add.astype(np.int32)
        self._rows = None
        self._slack = int(want[0]) * page - int(self.length[0]) if (self.length == self.length[0]).all() else 0

    def wants(self, add: int) -> int:
        """Pages that `grow` by so many tokens per row takes."""
        if add <= self._slack:
            return 0
        have, part = self.filled, self.length % self.pool.page != 0
        last = self.table[part, have[part] - 1]
        return int((-(-(self.length + add) // self.pool.page) - have).sum()) + int((self.pool.refs[last] > 1).sum())

    def growth(self, pages: int) -> int:
        """Bytes that the tables grow by at most where so many pages are added to all rows together."""
        rows, width = self.table.shape
        want = int(self.filled.max(initial=0)) + -(-pages // max(rows, 1))
        return (max(want, width * 3 // 2) - width) * rows * 4 if want > width else 0

    def _extend(self, have: np.ndarray, want: np.ndarray) -> None:
        if (width := int(want.max())) > self.table.shape[1]:
            wider = np.full((len(self.table), max(width, self.table.shape[1] * 3 // 2)), -1, np.int32)
            wider[:, : self.table.shape[1]] = self.table
            self.pool.ledger.add("device", wider.nbytes - self.table.nbytes)
            self.table = wider
        fresh = self.pool.take(int((want - have).sum()))
        columns = np.arange(self.table.shape[1])
        self.table[(columns >= have[:, None]) & (columns < want[:, None])] = fresh
        self._table = None

    def drop_front(self, pages: int) -> None:
        """Give back each row's first pages, all of them full."""
        self.pool.give(self.table[:, :pages].reshape(-1))
        self.table[:, :-pages] = self.table[:, pages:].copy()
        self.table[:, -pages:] = -1
        self.length -= np.int32(pages * self.pool.page)
        self._rows = self._table = None
        self._slack = 0

    def truncate(self, length: np.ndarray | int) -> None:
        """Keep the first `length` tokens of each row."""
        keep = np.minimum(self.length, length).astype(np.int32)
        columns = np.arange(self.table.shape[1])
        gone = (columns >= -(-keep // self.pool.page)[:, None]) & (columns < self.filled[:, None])
        if gone.any():
            self.forget(self.table[gone])
            self.pool.give(self.table[gone])
            self.table[gone] = -1
            self._table = None
        self.length = keep
        self._rows = None
        self._slack = 0

    def forget(self, pages: np.ndarray) -> None:
        """Copies of these pages are no longer good: they are written, or given up."""
        for cache in self.near:
            cache.forget(pages)

    def pages(self) -> np.ndarray:
        """All pages in use, row after row."""
        return self.table[np.arange(self.table.shape[1]) < self.filled[:, None]]

    def take_over(self, other: Zone) -> None:
        """Share the other zone's pages; this zone must be empty."""
        self.pool.ledger.add("device", other.table.nbytes - self.table.nbytes)
        self.table, self.length = other.table.copy(), other.length.copy()
        self.pool.share(self.pages())
        self._rows = self._table = None
        self._slack = other._slack = 0

    def free(self) -> None:
        """Give every page back."""
        self.truncate(0)
        self.pool.ledger.add("device", -self.side)
        self.table, self.length = self.table[:0], self.length[:0]

    @property
    def bytes(self) -> int:
        """Live bytes of the pages, each shared page in full."""
        return int(self.filled.sum()) * self.pool.page_bytes

    @property
    def tiers(self) -> dict[str, int]:
        """Live bytes by tier: the pages, each shared page in full, their copies on nearer tiers, and the tables."""
        count, held = int(self.filled.sum()), {"device": self.side, "host": 0, "disk": 0}
        for tier, amount in self.pool.sizes.items():
            held[tier] += count * amount
        for cache in self.near:
            held[cache.pool.tier] += cache.bytes
        return held

    def check(self) -> None:
        """Raise AssertionError where it holds a page that was given back, or a cache one that is not its own."""
        assert (self.pool.refs[self.pages()] > 0).all(), "a zone holds a page that was given back"
        for cache in self.near:
            cache.check()
            assert np.isin(cache.pages, self.pages()).all(), "a cache holds a copy of a page that is not its zone's"
