"""Ada-KV: one budget for all heads of a layer, given where the attention is.

Heads differ in how concentrated they are. The total R * budget goes to the highest scores of the layer whatever their head, but no
head gets less than `floor` of its equal share:  n_r = floor * b + (the rest by global top-k). It wraps any evictor by score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...method import Needs, Paper, Trial
from ...roles import Kept, View
from ...values import Shape
from .base import Around


@dataclass(frozen=True)
class AdaKV(Around):
    floor: float = 0.2

    paper: ClassVar[Paper] = Paper(
        "",
        "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation",
        "arXiv:2407.11550",
        "better than SnapKV at every budget on LongBench",
    )
    identity: ClassVar[str] = "adakv(snapkv(budget=1073741824))"
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "adakv(snapkv(budget=512))",
            "random_evict(budget=512)",
            ("snapkv(budget=512)",),
            claim="The same total budget, spread over the heads by their scores, loses less than equal shares.",
        ),
    )
    question: ClassVar[bool] = True
    example: ClassVar[str] = "adakv(snapkv)"

    def needs(self) -> Needs:
        return self.inner.needs().merge(Needs(ragged=True))

    def check(self, shape: Shape) -> list[str]:
        return super().check(shape) or ([] if 0 <= self.floor <= 1 else [f"floor={self.floor} must be between 0 and 1."])

    def keep(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Kept:
        return self.inner.keep_allotted(k, v, pos, view, self.inner.room(view), self.allot)

    def allot(self, score: Tensor, room: int) -> Tensor:
        """Tokens per row, int64 [R], together R * room."""
        rows, width = score.shape
        least = min(int(room * self.floor), width)
        best = score.argsort(dim=1, descending=True, stable=True)
        rest = score.scatter(1, best[:, :least], -torch.inf).flatten()
        free = min(rows * (room - least), int((rest > -torch.inf).sum()))
        extra = torch.bincount(rest.topk(free).indices // width, minlength=rows)
        return least + extra
