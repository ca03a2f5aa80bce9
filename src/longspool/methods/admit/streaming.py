"""StreamingLLM: keep attention sinks and a recent window, nothing else.

Softmax parks surplus attention on the first tokens, so dropping them breaks a model that reads past its window; a handful of sinks
and the newest tokens keep it fluent at constant memory. The paper renumbers positions within the cache; we keep the original ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...method import Cost, Method, Needs, Paper, Trial
from ...roles import Admit, View
from ...values import Shape


@dataclass(frozen=True)
class Streaming(Method, Admit):
    sinks: int = 4
    window: int = 1020

    paper: ClassVar[Paper] = Paper(
        "",
        "Efficient Streaming Language Models with Attention Sinks",
        "arXiv:2309.17453",
        "4 sinks and 1020 recent tokens: stable to 4M tokens",
    )
    identity: ClassVar[dict[str, object]] = {"sinks": 1 << 30}
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial("streaming(window=508)", "random_evict(budget=512)", claim="Sinks and the newest tokens keep a text fluent."),
    )

    def needs(self) -> Needs:
        return Needs(recent=self.window)

    def check(self, shape: Shape) -> list[str]:
        return [f"{n}={v} must be at least {least}." for n, v, least in (("sinks", self.sinks, 0), ("window", self.window, 1)) if v < least]

    def admit(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        return pos < self.sinks

    def admits(self, tokens: int) -> int:
        return min(self.sinks, tokens)

    def cost(self, shape: Shape) -> Cost:
        return Cost(moved=(self.sinks + self.window) * shape.head_dim * 4)
