"""Ragged tokens: those that compete to stay, and how they are cut into pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..roles import Kept

Row = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""k, v [n, D], pos int64 [n] and log-weight [n] or None of one row's tokens."""


@dataclass(frozen=True)
class Tiles:
    """S pages: k [S, D, W], v [S, W, D], of which the first fill[s] tokens count; pos int32 [S, W], weight [S, W] or None."""

    k: Tensor
    v: Tensor
    fill: Tensor
    pos: Tensor
    weight: Tensor | None

    def to(self, device: torch.device) -> Tiles:
        weight = None if self.weight is None else self.weight.to(device)
        return Tiles(self.k.to(device), self.v.to(device), self.fill.to(device), self.pos.to(device), weight)


@dataclass(frozen=True)
class Candidates:
    """One request's tokens that compete: k, v [R, T, D], pos int64 [R, T] (-1 pads shorter rows), and where they are known the log-weight,
    this step's mass and the mass drawn so far, each [R, T]."""

    k: Tensor
    v: Tensor
    pos: Tensor
    weight: Tensor | None = None
    mass: Tensor | None = None
    drawn: Tensor | None = None

    @property
    def count(self) -> int:
        """Tokens of all rows."""
        return int((self.pos >= 0).sum())

    def take(self, kept: Kept) -> Candidates:
        """Those that are kept, with merged entries in their places."""

        def of(x: Tensor, value: float = 0) -> Tensor:
            return pad_rows([x[r, i] for r, i in enumerate(kept.index)], value)

        k, v = (of(x) if new is None else pad_rows(list(new)) for x, new in ((self.k, kept.k), (self.v, kept.v)))
        weight = None if self.weight is None else of(self.weight)
        mass, drawn = (None if x is None else of(x) for x in (self.mass, self.drawn))
        return Candidates(k, v, of(self.pos, -1), weight if kept.weight is None else pad_rows(list(kept.weight)), mass, drawn)

    def ragged(self, x: Tensor | None) -> list[Tensor] | None:
        """Each row of x as far as it has tokens."""
        return None if x is None else [x[r, :n] for r, n in enumerate((self.pos >= 0).sum(1).tolist())]

    def rows(self) -> list[Row]:
        """Each row's tokens."""
        weight = self.ragged(self.weight)
        counts = (self.pos >= 0).sum(1).tolist()
        return [(self.k[r, :n], self.v[r, :n], self.pos[r, :n], None if weight is None else weight[r]) for r, n in enumerate(counts)]


def tile(rows: list[Row], page: int) -> Tiles:
    """Cut each row into pages, one row after another; the last page of a row is padded with zeros."""
    rows = [row for row in rows if len(row[2])]
    counts = torch.tensor([len(row[2]) for row in rows])
    pages = -(-counts // page)
    last = counts - (pages - 1) * page
    fill = torch.full((int(pages.sum()),), page, dtype=torch.int32)
    fill[pages.cumsum(0) - 1] = last.to(torch.int32)
    cut = [_cut(row, page) for row in rows]
    weight = None if cut[0][3] is None else torch.cat([c[3] for c in cut if c[3] is not None])
    k = torch.cat([c[0] for c in cut]).transpose(1, 2).contiguous()
    return Tiles(k, torch.cat([c[1] for c in cut]), fill, torch.cat([c[2] for c in cut]), weight)


def _cut(row: Row, page: int) -> Row:
    k, v, pos, weight = row
    extra = -len(pos) % page
    return (
        pad(k, (0, 0, 0, extra)).view(-1, page, k.shape[-1]),
        pad(v, (0, 0, 0, extra)).view(-1, page, v.shape[-1]),
        pad(pos.to(torch.int32), (0, extra)).view(-1, page),
        None if weight is None else pad(weight, (0, extra)).view(-1, page),
    )


def pad_rows(rows: list[Tensor], value: float = 0) -> Tensor:
    """Ragged rows [n, ...] as one tensor [R, max n, ...]."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
