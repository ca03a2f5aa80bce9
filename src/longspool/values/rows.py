"""What each (request, KV head) sees at one layer: a page table and a length."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """R ragged rows over a pool of pages.

    table int32 [R, P] holds page ids (-1 past a row's last page), length int32 [R] the tokens in each row, `grain` the tokens of
    a page. Only a row's last page may be partly filled. R is requests x KV heads, or requests x query heads where a
    selection was made per query head.
    """

    table: Tensor
    length: Tensor
    grain: int

    @staticmethod
    def empty(rows: int, grain: int) -> Rows:
        return Rows(torch.empty(rows, 0, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32), grain)

    @property
    def count(self) -> int:
        return self.table.shape[0]

    @functools.cached_property
    def filled(self) -> Tensor:
        """Pages in use, int32 [R]."""
        return torch.div(self.length + self.grain - 1, self.grain, rounding_mode="floor")

    @functools.cached_property
    def whole(self) -> bool:
        """Whether every row's last page is full."""
        return not (self.length.numpy() % self.grain).any()

    @functools.cached_property
    def total(self) -> int:
        """Tokens of all rows."""
        return int(self.length.numpy().sum())

    def slots(self, row: int) -> Tensor:
        """Pool slots (page * grain + offset) of one row's tokens in order, int64 [length]."""
        n = int(self.length[row])
        pages = self.table[row, : -(-n // self.grain)].long()
        return (pages[:, None] * self.grain + torch.arange(self.grain)).reshape(-1)[:n]

    def part(self, lo: int, hi: int) -> Rows:
        """Rows lo to hi."""
        return Rows(self.table[lo:hi], self.length[lo:hi], self.grain)

    def pages(self, pick: Tensor, count: Tensor) -> Rows:
        """Keep the page ordinals pick int32 [R, K] (ascending; the first count[r] are valid, -1 after them)."""
        index, n = _array(pick), _array(count)
        high, wide = index.shape
        if wide and self.whole and index[:, -1].min() >= 0:
            table = self.table.numpy().ravel().take(index + _ordinals(high, self.table.shape[1]))
            picked = Rows(torch.from_numpy(table), _alike(high, wide * self.grain), self.grain)
            picked.__dict__["total"] = table.size * self.grain  # known without looking
            return picked
        rows, filled = _ordinals(high, 1)[:, 0], self.filled.numpy()
        table = self.table.numpy()[rows[:, None], index]  # an index of -1 reads some page, and is undone below
        table[index < 0] = -1
        length = n * np.int32(self.grain)
        if index.shape[1]:
            ragged = (n > 0) & (index[rows, n - 1] == filled - 1)
            length -= np.where(ragged, filled * self.grain - self.length.numpy(), 0).astype(np.int32)
        return Rows(torch.from_numpy(table), torch.from_numpy(length), self.grain)

    @staticmethod
    def stack(rows: list[Rows]) -> Rows:
        """The rows of several requests, one after another."""
        if len(rows) == 1:
            return rows[0]
        width = max(r.table.shape[1] for r in rows)
        table = torch.cat([torch.nn.functional.pad(r.table, (0, width - r.table.shape[1]), value=-1) for r in rows])
        return Rows(table, torch.cat([r.length for r in rows]), rows[0].grain)

    def split(self, group: int) -> Rows:
        """Each row repeated for every query head of its group, so that a selection may differ between them."""
        return Rows(self.table.repeat_interleave(group, 0), self.length.repeat_interleave(group), self.grain)


@functools.lru_cache(maxsize=64)
def _ordinals(count: int, step: int) -> np.ndarray:
    """Where each row begins among rows of `step` entries, int32 [count, 1]."""
    return np.arange(0, count * step, step, dtype=np.int32)[:, None]


@functools.lru_cache(maxsize=64)
def _alike(count: int, length: int) -> Tensor:
    return torch.full((count,), length, dtype=torch.int32)


def _array(x: Tensor) -> np.ndarray:
    """What a kernel chose on another device comes to where the tables are."""
    return (x if x.is_cpu else x.cpu()).numpy()
