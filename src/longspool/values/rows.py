"""What each (request, KV head) sees at one layer: a page table and a length."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """R ragged rows over a pool of pages.

    table int32 [R, P] holds page ids (-1 past a row's last page), length int32 [R] the tokens in each row, `grain` the tokens of
    a page. Only a row's last page may be partly filled. R is requests x KV heads, or requests x query heads where a
    selection was made per query head.

    A grain smaller than the pool's page means pieces of pages: piece i of page p, of n to a page, is entry p * n + i. Grain 1 is a
    selection of single tokens, whose entries are pool slots, page * W + offset for pages of W tokens.
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
    def used(self) -> Tensor:
        """Which entries of the table are pages in use, bool [R, P]."""
        return torch.arange(self.table.shape[1]) < self.filled[:, None]

    def renamed(self, pages: Tensor) -> Rows:
        """The same rows with their pages in use, row after row, called otherwise."""
        table = torch.full(self.table.shape, -1, dtype=torch.int32)
        table[self.used] = pages.to(torch.int32)
        return Rows(table, self.length, self.grain)

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

    def pages(self, pick: Tensor) -> Rows:
        """Keep the page ordinals pick int32 [R, K] on the CPU, ascending, -1 past the end of each row."""
        valid, at = pick >= 0, pick.clamp_min(0).long()
        tokens = torch.where(valid, (self.length[:, None] - at * self.grain).clamp(max=self.grain), 0)
        table = self.table.gather(1, at) if self.table.shape[1] else self.table.new_full(at.shape, -1)
        return Rows(torch.where(valid, table, -1), tokens.sum(1, dtype=torch.int32), self.grain)

    def at(self, index: Tensor) -> Rows:
        """Single tokens, by the in-row indices int [R, K] on the CPU, each one once and in any order, -1 past the end of each row."""
        valid, at = index >= 0, index.clamp_min(0).long()
        pages = self.table.gather(1, at // self.grain) if self.table.shape[1] else torch.full_like(index, -1)
        slots = torch.where(valid, pages * self.grain + at % self.grain, -1).to(torch.int32)
        return Rows(slots, valid.sum(1, dtype=torch.int32), 1)

    def cut(self, grain: int) -> Rows:
        """The same tokens in pieces of `grain` tokens."""
        per = self.grain // grain
        if per == 1:
            return self
        table = self.table[:, :, None] * per + torch.arange(per, dtype=torch.int32)
        past = torch.arange(self.table.shape[1] * per) * grain >= self.length[:, None]
        return Rows(table.flatten(1).masked_fill(past, -1), self.length, grain)

    @staticmethod
    def stack(rows: list[Rows]) -> Rows:
        """The rows of several requests, one after another."""
        if len(rows) == 1:
            return rows[0]
        width = max(r.table.shape[1] for r in rows)
        table = torch.cat([torch.nn.functional.pad(r.table, (0, width - r.table.shape[1]), value=-1) for r in rows])
        return Rows(table, torch.cat([r.length for r in rows]), rows[0].grain)

    @functools.cached_property
    def _splits(self) -> dict[int, Rows]:
        return {}

    def split(self, group: int) -> Rows:
        """Each row repeated for every query head of its group, so that a selection may differ between them; made once."""
        if group not in self._splits:
            self._splits[group] = Rows(self.table.repeat_interleave(group, 0), self.length.repeat_interleave(group), self.grain)
        return self._splits[group]
