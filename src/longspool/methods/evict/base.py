"""What evictors by score share: a budget, a schedule, and the choice of the best tokens of each row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...method import Cost, Method, Needs
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

    def check(self, shape: Shape) -> list[str]:
        reasons = problems(self.budget, self.needs().recent)
        if self.when not in ("prompt", "chunk") and not (isinstance(self.when, int) and self.when > 0):
            reasons.append(f"when={self.when!r} must be 'prompt', 'chunk' or a number of tokens.")
        return reasons

    def due(self, step: Step) -> bool:
        if step.phase == "prefill":
            return step.final[0] or self.when != "prompt"
        return isinstance(self.when, int) and step.meets(self.when)

    def decodes(self) -> bool:
        return isinstance(self.when, int)

    def period(self) -> int | None:
        return self.when if isinstance(self.when, int) else None

    def peak(self, count: int, chunk: int) -> int:
        return count if self.when == "prompt" else min(count, self.bound(count) + chunk)

    def bound(self, count: int) -> int:
        return min(tokens(self.budget, Measure(count, 1)), count) if counts_tokens(self.budget) else count

    def score(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        """How much each candidate matters, [R, T] for k, v [R, T, D]."""
        raise NotImplementedError

    def room(self, view: View) -> int:
        """Candidates that a row keeps: the budget without what stays recent."""
        return max(tokens(self.budget, view.measure) - view.held, 1)

    def keep(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Kept:
        return self.keep_allotted(k, v, pos, view, self.room(view), even)

    def keep_allotted(self, k: Tensor, v: Tensor, pos: Tensor, view: View, room: int, allot: Allot) -> Kept:
        """The best of each row, as many as `allot` gives it where all rows share alike would keep `room`."""
        real = pos >= 0
        if int(real.sum(1).max()) <= room:
            return Kept(tuple(torch.nonzero(row)[:, 0] for row in real))
        score = self.score(k, v, pos, view).masked_fill(~real, -torch.inf)
        count = torch.minimum(allot(score, room), real.sum(1))
        order = score.argsort(dim=1, descending=True, stable=True)
        return Kept(tuple(order[r, : int(n)].sort().values for r, n in enumerate(count)))

    def cost(self, shape: Shape) -> Cost:
        return Cost(moved=(self.budget if isinstance(self.budget, int) else 0) * shape.head_dim * 4)


@dataclass(frozen=True)
class Around(Method, Evict):
    """Shares out the budget of an evictor by score, and is otherwise as that one."""

    inner: ScoreEvict = field(metadata={"wraps": "one"})

    def needs(self) -> Needs:
        return self.inner.needs()

    def check(self, shape: Shape) -> list[str]:
        return [] if isinstance(self.inner, ScoreEvict) else [f"it wraps an evictor by score such as snapkv, not {self.inner.slug}."]

    def aware(self) -> bool:
        return self.inner.aware()

    def due(self, step: Step) -> bool:
        return self.inner.due(step)

    def decodes(self) -> bool:
        return self.inner.decodes()

    def watches(self, step: Step) -> bool:
        return self.inner.watches(step)

    def period(self) -> int | None:
        return self.inner.period()

    def peak(self, count: int, chunk: int) -> int:
        return self.inner.peak(count, chunk)

    def bound(self, count: int) -> int:
        return self.inner.bound(count)
