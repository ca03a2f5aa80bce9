"""A selection by chance: what a budget is worth that is spent blindly.

For each token anew every row reads `budget` of its settled tokens, or as many in whole pages, drawn by a counter (seed, layer, position,
head), so that neither batch nor history change what is drawn. A baseline: what selects by a score must beat it at the same budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels import pick_pages, pick_tokens
from ...method import Paper
from ...roles import Seen, View
from ...values import Rows, Shape
from .base import Picks, as_many, low

MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class RandomSelect(Picks):
    sinks: int = 0
    tokens: bool = True
    seed: int = 0

    paper: ClassVar[Paper] = Paper("", "Selection by chance, a baseline", "no paper")
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}

    def check(self, shape: Shape) -> list[str]:
        return super().check(shape) + low(self, sinks=0, budget=1 if self.tokens else self.page)

    def select(self, q: Tensor, rows: Rows, view: View) -> Seen:
        """The first `sinks` are always among those that are read."""
        width, grain = rows.table.shape[1], rows.grain
        count = self.budget if self.tokens else self.budget // grain
        if count >= width * (grain if self.tokens else 1):
            return Seen(rows)
        score = _drawn(self._counters(rows.count, view), width * grain if self.tokens else width)
        score[:, : self.sinks if self.tokens else -(-self.sinks // grain)] = 2.0
        pick = pick_tokens if self.tokens else pick_pages
        table, length = pick(score, rows.table, rows.length, grain, as_many(rows.count, count))
        return Seen(Rows(table, length, 1 if self.tokens else grain))

    def _counters(self, rows: int, view: View) -> Tensor:
        """What a row's draw depends on, int64 [R]."""
        last = view.step.pos[torch.tensor(view.step.spans[1:]) - 1]
        heads = torch.arange(rows // len(last))
        return _mixed((last * 8191 + view.layer * 131 + self.seed * 524287)[:, None] * 1021 + heads).flatten()


def _mixed(x: Tensor) -> Tensor:
    """Non-negative integers scattered over 32 bits (the finaliser of MurmurHash3)."""
    x = x & MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & MASK
    return x ^ (x >> 16)


def _drawn(counter: Tensor, count: int) -> Tensor:
    """Numbers in [0, 1), fp32 [R, count]."""
    return (_mixed(counter[:, None] + torch.arange(count) * 0x9E3779B1) >> 8).float() / (1 << 24)
