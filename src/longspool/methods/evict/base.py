"""What evictors by score share: a budget, a schedule, and the choice of the best tokens of each row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...method import Cost, Method
from ...roles import Evict, Kept, View
from ...values import Shape, Step
from ...values.budget import Budget, Measure, counts_tokens, problems, tokens

Allot = Callable[[Tensor, int], Tensor]
"""From scores [R, T] (padding scores -inf) and an equal share to the tokens of each row, int64 [R]."""


def even(score: Tensor, room: int) -> Tensor:
    """Every row its equal share."""
    return torch.full((score.shape[0],), room, device=score.device)


@dataclass(frozen=True)
class ScoreEvict(Method, Evict):
    """Keeps the highest scores. `budget` counts everything that a row holds after the prompt, recent tokens included.

    `when`: "prompt" (once, when it has been read), "chunk" (after every prefill chunk, which bounds the peak), or a number n
    (after every chunk, and every n tokens while decoding).
    """

    budget: Budget = 1024
    when: str | int = "prompt"

    @property
    def protected(self) -> int:
        """Tokens that are kept whatever they score."""
        return self.needs().recent

    def check(self, shape: Shape) -> list[str]:
        reasons = problems(self.budget, self.protected)
        if self.when not in ("prompt", "chunk") and not (isinstance(self.when, int) and self.when > 0):
            reasons.append(f"when={self.when!r} must be 'prompt', 'chunk' or a number of tokens.")
        return reasons

    def due(self, step: Step) -> bool:
        if step.phase == "prefill":
            return step.final[0] or self.when != "prompt"
        if not isinstance(self.when, int):
            return False
        first, last = int(step.pos[0]), int(step.pos[-1])
        return last // self.when != (first - 1) // self.when

    def decodes(self) -> bool:
        return isinstance(self.when, int)

    def peak(self, count: int, chunk: int) -> int:
        return count if self.when == "prompt" else min(count, self.bound(count) + chunk)

    def bound(self, count: int) -> int:
        return min(tokens(self.budget, Measure(count, 1)), count) if counts_tokens(self.budget) else count

    def score(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        """How much each candidate matters, [R, T] for k, v [R, T, D]."""
        raise NotImplementedError

    def keep(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Kept:
        return self.keep_allotted(k, v, pos, view, even)

    def keep_allotted(self, k: Tensor, v: Tensor, pos: Tensor, view: View, allot: Allot) -> Kept:
        """The best of each row, as many as `allot` gives it."""
        real = pos >= 0
        room = max(tokens(self.budget, view.measure) - view.held, 1)
        if int(real.sum(1).max()) <= room:
            return Kept(tuple(torch.nonzero(row)[:, 0] for row in real))
        score = self.score(k, v, pos, view).masked_fill(~real, -torch.inf)
        count = torch.minimum(allot(score, room), real.sum(1))
        order = score.argsort(dim=1, descending=True, stable=True)
        return Kept(tuple(order[r, : int(n)].sort().values for r, n in enumerate(count)))

    def cost(self, shape: Shape) -> Cost:
        return Cost(moved=(self.budget if isinstance(self.budget, int) else 0) * shape.head_dim * 4)
