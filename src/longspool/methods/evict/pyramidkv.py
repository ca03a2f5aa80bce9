"""PyramidKV: shallow layers look everywhere, deep ones at little, so budgets fall from layer to layer.

Attention funnels: it is spread wide in the first layers and gathers on few tokens in the last. With b candidates kept per layer on average,
layer l of L keeps  hi - (hi - lo) * l / (L - 1)  of the highest scores, lo = b / beta, hi = 2 b - lo;  where hi exceeds what there
is, it is that much and lo = 2 b - hi. It wraps any evictor by score; the paper's is SnapKV. What stays recent is the same in all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...method import Paper, Trial
from ...roles import Kept, View
from ...values import Shape
from .base import Around, even


@dataclass(frozen=True)
class PyramidKV(Around):
    beta: float = 20.0

    paper: ClassVar[Paper] = Paper(
        "",
        "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
        "arXiv:2406.02069",
        "full LongBench quality at 12% of the cache",
    )
    identity: ClassVar[str] = "pyramidkv(snapkv(budget=1073741824))"
    question: ClassVar[bool] = True
    example: ClassVar[str] = "pyramidkv(snapkv)"
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial("pyramidkv(snapkv(budget=256))", "random_evict(budget=256)", ("snapkv(budget=256)",), claim="No worse than equal budgets."),
    )

    def check(self, shape: Shape) -> list[str]:
        return super().check(shape) or ([] if self.beta >= 1 else [f"beta={self.beta} must be at least 1."])

    def peak(self, count: int, chunk: int) -> int:
        return count if self.inner.when == "prompt" else min(count, self.bound(count) + chunk)

    def bound(self, count: int) -> int:
        return min(2 * self.inner.bound(count), count)

    def keep(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Kept:
        average, there = self.inner.room(view), int((pos >= 0).sum(1).max())
        room = self.room(min(average, there), there, view.layer, view.shape.layers)
        return self.inner.keep_allotted(k, v, pos, view, room, even)

    def room(self, average: int, there: int, layer: int, layers: int) -> int:
        """What a layer keeps of so many candidates."""
        most = min(2 * average - average / self.beta, there)
        least = 2 * average - most
        return max(int(most - (most - least) * layer / max(layers - 1, 1)), 1)
