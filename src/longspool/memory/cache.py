"""Copies of pages on a nearer tier than their home."""

from __future__ import annotations

import numpy as np

from .pool import Pool


class Cache:
    """The copies that one zone keeps, at most `most`: those that were not read for the longest time go first.

    Entries are pages of the zone's pool, or pieces of them, `per` to a page. A page that is written or given up must be forgotten."""

    def __init__(self, pool: Pool, most: int, per: int = 1) -> None:
        self.pool, self.most, self.per = pool, most, per
        self._ids = np.empty(0, np.int64)  # ascending
        self._slots = np.empty(0, np.int32)
        self._read = np.empty(0, np.int64)
        self._now = 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def slots(self) -> np.ndarray:
        """Its pages of the nearer pool."""
        return self._slots

    @property
    def pages(self) -> np.ndarray:
        """The pages of the zone's pool of which it has copies."""
        return self._ids // self.per

    @property
    def bytes(self) -> int:
        return len(self) * self.pool.page_bytes

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Where each entry's copy is in the nearer pool, -1 where there is none; those found count as read now."""
        self._now += 1
        if not len(self):
            return np.full(len(ids), -1, np.int32)
        at = np.searchsorted(self._ids, ids).clip(max=len(self) - 1)
        found = self._ids[at] == ids
        self._read[at[found]] = self._now
        return np.where(found, self._slots[at], -1).astype(np.int32)

    def keep(self, ids: np.ndarray, slots: np.ndarray) -> None:
        """Take over the copies of entries that it lacks, read now; what there is no room for is given back."""
        ids, slots = np.concatenate([self._ids, ids]), np.concatenate([self._slots, slots])
        read = np.concatenate([self._read, np.full(len(ids) - len(self), self._now)])
        newest = np.argsort(-read, kind="stable")
        self.pool.give(slots[newest[self.most :]])
        stay = newest[: self.most]
        stay = stay[np.argsort(ids[stay])]
        self._ids, self._slots, self._read = ids[stay], slots[stay], read[stay]

    def forget(self, pages: np.ndarray) -> None:
        """Give back the copies of these pages of the zone's pool."""
        if len(self) and len(pages):
            gone = np.isin(self.pages, pages)
            self.pool.give(self._slots[gone])
            self._ids, self._slots, self._read = self._ids[~gone], self._slots[~gone], self._read[~gone]

    def check(self) -> None:
        """Raise AssertionError where it holds more than it may, or a page that was given back."""
        assert len(self) <= self.most and len(np.unique(self._ids)) == len(self), "a cache holds more than it may, or a page twice"
        assert (self.pool.refs[self._slots] > 0).all(), "a cache holds a copy that was given back"
