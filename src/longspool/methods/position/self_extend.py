"""Self-Extend: read far beyond the trained window with positions the model knows.

Near tokens keep exact relative positions; those at distance `window` or more share positions in groups of `group`:
q at i//G + W - W//G, k at j//G. The largest relative position is (N - W)/G + W, so a window L reads (L - W) G + W tokens. Keys are stored
bare and rotated on read; the near and far parts are attended apart and merged by lse, which equals the paper's one softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...method import Method, Needs, Paper
from ...roles import Frame, Position
from ...values import Shape


@dataclass(frozen=True)
class SelfExtend(Method, Position):
    group: int = 8
    window: int = 1024

    paper: ClassVar[Paper] = Paper(
        "S136", "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning", "arXiv:2401.01325", "Llama-2 4K to 16K, passkey 100%"
    )
    identity: ClassVar[dict[str, object]] = {"group": 1}

    def needs(self) -> Needs:
        return Needs(keys="bare")

    def check(self, shape: Shape) -> list[str]:
        reasons = [] if self.group >= 1 else [f"group={self.group} must be at least 1."]
        if not 1 <= self.window < shape.context:
            reasons.append(f"window={self.window} must be at least 1 and below the model's context of {shape.context}.")
        return reasons

    def reach(self, context: int) -> int:
        return (context - self.window + self.window // self.group) * self.group

    def frames(self) -> tuple[Frame, ...]:
        g, shift = self.group, self.window - self.window // self.group
        near = Frame(0, self.window, lambda pos: pos, lambda pos: pos)
        return near, Frame(self.window, None, lambda pos: pos // g + shift, lambda pos: pos // g)
