"""LongFlow: a fixed number of slots for long answers; what contributes least to the present output makes room.

Dropping token s changes the output by about p_s (v_s - o), and the attention just computed is at hand, so the importance of a token is
I_s = sum_h p_{h,s} ||v_{g(h),s}||_1,  of the present query alone, the same choice for all heads of a layer. A prompt above the budget is
cut once by its last `window` queries (their attention over all heads, smoothed over 5 tokens). The paper replaces one token a step; here
memory is given back by pages, so every `when` steps as many tokens of least importance go, and that step's query decides for all of
them. The newest `window` tokens are never dropped, where the paper guards none; a row holds up to `when` tokens above the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...kernels.window import over_rows, smoothed, window_attention
from ...method import Needs, Paper, Trial
from ...roles import View
from ...values import Shape, Step
from ...values.budget import Budget
from .base import ScoreEvict


@dataclass(frozen=True)
class LongFlow(ScoreEvict):
    budget: Budget = 2048
    when: str | int = 16
    window: int = 32

    paper: ClassVar[Paper] = Paper(
        "S024", "LongFlow", "https://github.com/yisunlp/LongFLow", "up to 11.8x the throughput with 80% less KV in long reasoning"
    )
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    question: ClassVar[bool] = True
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "longflow(budget=384)",
            "random_evict(budget=384, when=16)",
            ("streaming(sinks=4, window=380)", "h2o(budget=384, when=16)"),
            length=512,
            forced=512,
            claim="A long continuation under a fixed number of slots beats streaming and chance, and equals accumulated attention.",
        ),
    )

    def needs(self) -> Needs:
        return Needs(recent=self.window, queries=self.window, keys="rotated", mass=True)

    def check(self, shape: Shape) -> list[str]:
        reasons = super().check(shape)
        if not isinstance(self.when, int):
            reasons.append(f"when={self.when!r} must be a number of tokens: it evicts while decoding.")
        return reasons + ([] if self.window >= 1 else [f"window={self.window} must be at least 1."])

    def due(self, step: Step) -> bool:
        return step.final[0] if step.phase == "prefill" else super().due(step)

    def decodes(self) -> bool:
        return False  # then it looks at the mass

    def watches(self, step: Step) -> bool:
        return step.phase != "prefill" and self.due(step)

    def peak(self, count: int, chunk: int) -> int:
        return count

    def score(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        if view.step.phase != "prefill":
            return over_rows(view.mass * v.abs().sum(-1), pos)
        real = pos >= 0
        seen = window_attention(view.queries, k, real, view.keys(), view.shape).sum((1, 2))
        return over_rows(smoothed(seen, real, 5), pos)
