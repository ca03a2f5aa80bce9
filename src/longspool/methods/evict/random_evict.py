"""Random eviction: the budget spent blindly, which is what every other evictor must beat.

Each token of each head draws a uniform number from (seed, layer, head, position) alone, and the highest stay. A token keeps its number, so
evicting after every chunk leaves the same uniform sample as evicting once, and a prompt leaves the same tokens whatever runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...method import Paper
from ...roles import View
from .base import ScoreEvict


@dataclass(frozen=True)
class RandomEvict(ScoreEvict):
    seed: int = 0

    paper: ClassVar[Paper] = Paper("", "A uniform sample of the tokens, as a control", "none")
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}

    def score(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        row = torch.arange(len(pos), device=pos.device)[:, None]
        x = pos
        for salt in (row, view.layer, self.seed):
            x = _mixed(x) + salt
        return (_mixed(x) & 0xFFFFFF) / float(1 << 24)


def _mixed(x: Tensor) -> Tensor:
    """splitmix64's output for the state x, int64."""
    x = x * -7046029254386353131 + 1234567
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ _right(x, shift)) * factor
    return x ^ _right(x, 31)


def _right(x: Tensor, by: int) -> Tensor:
    """A shift to the right of 64 bits without a sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
