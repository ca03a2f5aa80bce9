"""TriangleMix: deep layers don't need the middle of the attention triangle while reading a prompt.

From layer `dense` on, a query sees `sinks` first tokens and a `window` of recent ones; only the prompt's `last` queries see everything,
since they alone feed the answer. O(T) work instead of O(T^2), static, no index. Whole blocks are read, so slightly more than the
paper's pattern is seen. `dense=None` means the shallow half; the paper finds it by a gradient test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...method import Method, Needs, Paper
from ...roles import Pattern, View
from ...values import Blocks, Shape


@dataclass(frozen=True)
class TriangleMix(Method, Pattern):
    dense: int | None = None
    sinks: int = 8
    window: int = 512
    last: int = 128
    block: int = 64

    paper: ClassVar[Paper] = Paper(
        "S102",
        "TriangleMix: Accelerating Prefilling via Decoding-time Contribution Sparsity",
        "arXiv:2507.21526",
        "TTFT -12% to -32% at 32K-128K without loss on RULER",
    )
    identity: ClassVar[dict[str, object]] = {"window": 1 << 30}

    def needs(self) -> Needs:
        return Needs(keys="rotated")

    def check(self, shape: Shape) -> list[str]:
        least = {"dense": 0, "sinks": 0, "window": 1, "last": 0, "block": 16}
        return [
            f"{n}={getattr(self, n)} must be at least {low}."
            for n, low in least.items()
            if getattr(self, n) is not None and getattr(self, n) < low
        ]

    def blocks(self, q: Tensor, view: View) -> Blocks | None:
        n, size = len(q), self.block
        first = view.stored - n
        if view.layer < (view.shape.layers // 2 if self.dense is None else self.dense) or view.stored <= self.window:
            return None
        start = torch.arange(0, n, size)
        low, high = first + start, first + (start + size).clamp_max(n) - 1  # first and last token of each query block
        key = torch.arange(-(-view.stored // size))[None]
        causal = key <= (high // size)[:, None]
        near = key >= ((low - self.window + 1).clamp_min(0) // size)[:, None]
        sink = key * size < self.sinks
        whole = (view.step.pos[(start + size).clamp_max(n) - 1] >= view.step.total[0] - self.last)[:, None]
        mask = causal & (near | sink | whole)
        return Blocks.of(mask.expand(view.shape.heads, *mask.shape), size)
