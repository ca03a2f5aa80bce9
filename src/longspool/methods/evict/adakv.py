"""Ada-KV: one budget for all heads of a layer, given where the attention is.

Heads differ in how concentrated they are. The total R * budget goes to the highest scores of the layer whatever their head, but no
head gets less than `floor` of its equal share:  n_r = floor * b + (the rest by global top-k). It wraps any evictor by score.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ...method import Method, Needs, Paper, Trial
from ...roles import Evict, Kept, View
from ...values import Shape, Step
from .base import ScoreEvict


@dataclass(frozen=True)
class AdaKV(Method, Evict):
    inner: ScoreEvict = field(metadata={"wraps": "one"})
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
        if not isinstance(self.inner, ScoreEvict):
            return [f"it wraps an evictor by score such as snapkv, not {self.inner.slug}."]
        return [] if 0 <= self.floor <= 1 else [f"floor={self.floor} must be between 0 and 1."]

    def aware(self) -> bool:
        return self.inner.aware()

    def due(self, step: Step) -> bool:
        return self.inner.due(step)

    def decodes(self) -> bool:
        return self.inner.decodes()

    def peak(self, count: int, chunk: int) -> int:
        return self.inner.peak(count, chunk)

    def bound(self, count: int) -> int:
        return self.inner.bound(count)

    def keep(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Kept:
        return self.inner.keep_allotted(k, v, pos, view, self.allot)

    def allot(self, score: Tensor, room: int) -> Tensor:
        """Tokens per row, int64 [R], together R * room."""
        rows, width = score.shape
        least = min(int(room * self.floor), width)
        best = score.argsort(dim=1, descending=True, stable=True)
        rest = score.scatter(1, best[:, :least], -torch.inf).flatten()
        free = min(rows * (room - least), int((rest > -torch.inf).sum()))
        extra = torch.bincount(rest.topk(free).indices // width, minlength=rows)
        return least + extra
