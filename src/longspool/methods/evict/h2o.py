"""H2O: the tokens that have drawn the most attention so far, and the newest half.

Few tokens, the heavy hitters, draw most of the attention, and go on doing so. Each token's attention is summed over all queries that have
seen it, of the prompt and of the answer, and over the query heads that share its KV head:  s_j = sum_i sum_{h in group} a_h(i, j).
The highest sums stay beside a recent half of the budget. The paper evicts at every step, as `when=1` does; the default is once, after
the prompt. The mass of a token that is dropped is forgotten. As in the paper, sums are not divided by a token's age, which favours old
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...method import Needs, Paper, Trial
from ...roles import View
from ...values import Shape, Step
from .base import ScoreEvict


@dataclass(frozen=True)
class H2O(ScoreEvict):
    window: int | None = None
    """Newest tokens that are kept whatever they drew; None is half of a budget in tokens."""

    paper: ClassVar[Paper] = Paper(
        "",
        "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
        "arXiv:2306.14048",
        "a fifth of the cache at the full quality, up to 29x the throughput",
    )
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30, "window": 16}
    question: ClassVar[bool] = True
    trials: ClassVar[tuple[Trial, ...]] = (Trial("h2o(budget=1024)", "random_evict(budget=1024)", ("streaming(sinks=4, window=1020)",)),)

    @property
    def newest(self) -> int:
        half = self.budget // 2 if isinstance(self.budget, int) else 0
        return half if self.window is None else self.window

    def needs(self) -> Needs:
        return Needs(recent=self.newest, drawn=True)

    def check(self, shape: Shape) -> list[str]:
        reasons = super().check(shape)
        if self.window is None and not isinstance(self.budget, int):
            reasons.append(
                f"budget={self.budget!r} has no half in tokens before a prompt is known; give window=, the newest tokens to keep."
            )
        if self.newest < 0:
            reasons.append(f"window={self.newest} must not be negative.")
        return reasons

    def watches(self, step: Step) -> bool:
        return step.phase == "prefill" or isinstance(self.when, int)

    def score(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        return view.drawn
