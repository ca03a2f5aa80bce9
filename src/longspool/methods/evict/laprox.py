"""LaProx: keep what the layers' outputs lose most without, chosen over all heads and layers at once.

The output of the last `window` queries is a matrix product whose inner index runs over (head, token) pairs, [A_1 .. A_H] stack(V_h W_h),
and of such a product the pairs with the largest column norm times row norm matter most:
s_{n,j} = sum_{g in group} (pool_7 ||a_g(., j)|| + 1e-12) ||v_j W_g||,  divided by its sum over the layer, so that layers can be compared.
Row norms come from the Gram matrices G_g = W_g W_g^T as sqrt(v^T G_g v). The best L * H_kv * (budget - recent) entries of all layers stay.
The paper is silent on grouped queries (we add over the group), on norms after the output projection (left out), and adds no floor per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels.window import smoothed, window_attention
from ...method import Needs, Paper, Trial
from ...roles import Kept, View
from ...values import Shape
from .base import ScoreEvict


@dataclass(frozen=True)
class LaProx(ScoreEvict):
    window: int = 32
    kernel: int = 7

    paper: ClassVar[Paper] = Paper(
        "S053", "LaProx: KV cache eviction by the layer's output", "arXiv:2605.07234", "the full cache's quality at 5% of it on LongBench"
    )
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    question: ClassVar[bool] = True
    together: ClassVar[bool] = True
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "laprox(budget=128, kernel=21)",
            "random_evict(budget=160)",  # as many bytes: heads of unlike length end more pages
            ("snapkv(budget=128, window=32, kernel=21)", "adakv(snapkv(budget=128, window=32, kernel=21))"),
            "aware",
            2048,
            claim="Needles: no worse than weights alone and than budgets shared within a layer, at equal entries in all.",
        ),
        Trial("laprox(budget=256)", "random_evict(budget=288)"),
    )

    def needs(self) -> Needs:
        return Needs(recent=self.window, queries=self.window, keys="rotated", ragged=True, weights=("o",))

    def check(self, shape: Shape) -> list[str]:
        reasons = super().check(shape)
        if self.window < 1:
            reasons.append(f"window={self.window} must be at least 1.")
        return reasons + ([] if self.kernel % 2 == 1 else [f"kernel={self.kernel} must be an odd number of tokens."])

    def peak(self, count: int, chunk: int) -> int:
        return count

    def bound(self, count: int) -> int:
        return count  # a head may keep everything at the others' cost

    def weigh(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> None:
        view.note(self)[str(view.layer)] = self.score(k, v, pos, view).masked_fill(pos < 0, -torch.inf)

    def keep(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Kept:
        note = view.note(self)
        if "least" not in note:
            note["least"] = self.least([score for score in note.values() if isinstance(score, Tensor)], self.room(view))
        score, least = note.pop(str(view.layer)), note["least"]
        if len(note) == 1:
            note.clear()
        assert isinstance(score, Tensor) and isinstance(least, float)
        return Kept(tuple(torch.nonzero(row)[:, 0] for row in (score >= least) & (pos >= 0)))

    def least(self, scores: list[Tensor], room: int) -> float:
        """The lowest score that stays where each row keeps `room` on average."""
        every = torch.cat([score.flatten() for score in scores])
        count = min(room * sum(len(score) for score in scores), len(every))
        return float(every.topk(count).values[-1])

    def score(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        real = pos >= 0
        columns = window_attention(view.queries, k, real, view.keys(), view.shape).norm(dim=2)  # [R, G, T]
        flat = smoothed(columns.flatten(0, 1), real.repeat_interleave(view.shape.group, 0), self.kernel)
        score = ((flat.view_as(columns) + 1e-12) * self.effect(v, view)).sum(1) * real
        return score / score.sum()

    def effect(self, v: Tensor, view: View) -> Tensor:
        """||v_j W_g|| of each query head of a row's group, [R, G, T] for v [R, T, D]."""
        s = view.shape
        w = view.weights("o").to(v.device).view(-1, s.kv_heads, s.group, s.head_dim)
        gram = torch.einsum("mrgd,mrge->rgde", w, w)
        return torch.einsum("rtd,rgde,rte->rgt", v, gram, v).clamp_min(0).sqrt()
