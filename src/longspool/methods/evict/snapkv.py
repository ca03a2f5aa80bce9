"""SnapKV: the last tokens of a prompt show which older ones the answer will need.

The queries of an observation window at the prompt's end attend to everything before it; their mean attention, smoothed along the
tokens so that neighbours survive together, ranks the prompt's tokens per head:  s_j = pool_k( mean_{i in window, h in group} a_ij ).
The paper selects per query head; with grouped queries we average over the group, so that a KV head stores one list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...kernels.window import smoothed, window_attention
from ...method import Needs, Paper, Trial
from ...roles import View
from ...values import Shape
from .base import ScoreEvict


@dataclass(frozen=True)
class SnapKV(ScoreEvict):
    window: int = 64
    kernel: int = 5

    paper: ClassVar[Paper] = Paper(
        "",
        "SnapKV: LLM Knows What You are Looking for Before Generation",
        "arXiv:2404.14469",
        "3.6x faster decoding and 8.2x less memory at 16K tokens",
    )
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "snapkv(budget=512, window=256)",
            "random_evict(budget=512)",
            ("streaming(window=508)",),
            claim="An eighth of the prompt's tokens, chosen by its last queries, keeps the continuation close to dense.",
        ),
        Trial(
            "snapkv(budget=512, kernel=21)",  # a number is a token a digit, of which pooling must not lose one
            "random_evict(budget=512)",
            ("snapkv(budget=512, kernel=1)", "streaming(window=508)"),
            "aware",
            2048,
            claim="With pooling a quarter of the tokens is enough for a needle that the question names.",
        ),
    )
    question: ClassVar[bool] = True

    def needs(self) -> Needs:
        return Needs(recent=self.window, queries=self.window, keys="rotated")

    def check(self, shape: Shape) -> list[str]:
        reasons = super().check(shape)
        if self.window < 1:
            reasons.append(f"window={self.window} must be at least 1.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            reasons.append(f"kernel={self.kernel} must be an odd number of tokens.")
        return reasons

    def score(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        real = pos >= 0
        return smoothed(window_attention(view.queries, k, real, view.keys(), view.shape).mean((1, 2)), real, self.kernel)
