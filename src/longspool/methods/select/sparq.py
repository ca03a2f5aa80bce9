"""SparQ: score all keys by the few components in which the query is large, then read the best tokens whole.

i1 = the `components` largest of sum_g |q_g|;  s_g = softmax(q_g[i1] . k[i1] / sqrt(d |q_g[i1]|_1 / |q_g|_1)) over all tokens; the
`budget` settled tokens of largest sum_g s_g are attended exactly with the recent ones: y_g. What is left out is replaced by the mean
value: with a_g the sum of s_g over what is read, out_g = a_g y_g + (1 - a_g) mean(v). Pages hold keys component by component, so no
second copy is needed. The paper's k counts the current token and k/4 recent ones, our budget and `window` count apart; its mean runs
over all values, ours over settled ones, since all recent ones are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels import topk_rows
from ...method import Cost, Paper, Trial
from ...roles import Seen, View
from ...values import Rows, Shape
from .base import Picks, as_many, bent, by_row, by_token, known, low


@dataclass(frozen=True)
class SparQ(Picks):
    budget: int = 96
    window: int = 32
    components: int = 32
    mean: bool = True

    paper: ClassVar[Paper] = Paper(
        "S145", "SparQ Attention: Bandwidth-Efficient LLM Inference", "arXiv:2312.04985", "up to 8x less attention data moved"
    )
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "sparq(components=16)",
            control="random_select(budget=96, window=32, sinks=4)",
            beats=("streaming(sinks=4, window=156)", "sparq(components=16, mean=False)"),
            claim="Better than a window with sinks of as many tokens, and than itself without the mean value.",
        ),
    )

    def check(self, shape: Shape) -> list[str]:
        return super().check(shape) + low(self, components=1)

    def index(self, old: dict[str, Tensor], view: View) -> dict[str, Tensor]:
        """The sum of the settled values and their number."""
        length = view.rows.length
        if not self.mean or (old and torch.equal(old["count"].cpu(), length)):
            return old
        new = torch.stack([v.sum(0) for _, v in view.settled(old["count"].tolist() if old else [0] * len(length))])
        return {"total": old["total"] + new if old else new, "count": length.clone()}

    def index_bytes(self, shape: Shape, tokens: int) -> int:
        return shape.kv_heads * (4 * shape.head_dim + 4) if self.mean else 0

    def select(self, q: Tensor, rows: Rows, view: View) -> Seen:
        if self.budget >= rows.table.shape[1] * rows.grain:
            return Seen(rows)
        x = by_row(q, view).abs()  # [R, n, G, D]
        dims = x.sum(2).amax(1).topk(min(self.components, x.shape[3])).indices
        cover = x.gather(3, dims[:, None, None].expand(*x.shape[:3], -1)).sum(3) / x.sum(3)
        far, near = (by_row(s(q, dims.to(torch.int32)), view) for s in (view.scores, view.recent_scores))
        far, near = (bent(s * (view.shape.scale * cover.rsqrt())[..., None], view.shape) for s in (far, near))
        mass = (far - torch.cat([far, near], 3).logsumexp(3, keepdim=True)).exp()  # [R, n, G, T]
        index, n = topk_rows(mass.sum(2).amax(1), rows.length, as_many(rows.count, self.budget))
        taken = (torch.arange(index.shape[1], device=n.device) < n[:, None]).to(mass.device)[:, None, None]
        read = mass.gather(3, index.to(mass.device).long().clamp_min(0)[:, None, None].expand(*mass.shape[:3], -1)) * taken
        picked = rows.at(index.cpu())
        if not self.mean:
            return Seen(picked)
        left = (mass.sum(3) - read.sum(3)).clamp(0, 1)
        total = known(view, "total", q.new_zeros(view.shape.kv_heads, view.shape.head_dim))
        value = total / rows.length.to(total.device).clamp_min(1)[:, None]
        out = by_token(value[:, None, None].expand(-1, *left.shape[1:], -1), view)
        return Seen(picked, rest=(out, by_token((left / (1 - left)).log(), view)))

    def cost(self, shape: Shape) -> Cost:
        return Cost(moved=2 * min(self.components, shape.head_dim))
