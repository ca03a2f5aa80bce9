"""Top-k decoding: attend to the k keys of largest inner product and to nothing else.

Attention over long contexts is sparse: 1 or 2 percent of the keys hold most of its mass. Every query head scores all settled keys,
S_j = q . k_j, takes the `budget` best, and one softmax runs over these and the recent tokens. The search is exact (the paper's flat index);
its IVF and HNSW indexes, which search less, and its values in host memory (headinfer does that) are not here. Where keys are coded
they are decoded to be scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels import pick_tokens
from ...method import Cost, Paper, Trial
from ...roles import Seen, View
from ...values import Rows, Shape
from .base import Picks, as_many, per_request


@dataclass(frozen=True)
class TopK(Picks):
    budget: int = 256

    paper: ClassVar[Paper] = Paper(
        "S122",
        "Exploiting Sparsity for Long Context Inference: Million Token Contexts on Commodity GPUs",
        "arXiv:2502.06766",
        "less than 2% of the tokens keep 95% of the quality",
    )
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    steady: ClassVar[bool] = True
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "topk(budget=80)",
            control="random_select(budget=80, sinks=4)",
            beats=("streaming(sinks=4, window=140)", "quest(budget=96, dense=0)"),
            claim="2% of the tokens stay near dense and far above a window with sinks of as many tokens.",
        ),
    )

    def select(self, q: Tensor, rows: Rows, view: View) -> Seen:
        """Each query head its own; of several tokens of a request, what any of them scores highest."""
        if self.budget >= rows.table.shape[1] * rows.grain:
            return Seen(rows.split(view.shape.group))
        score = per_request(view.scores(q), view, torch.amax).flatten(0, 1)
        slots, n = pick_tokens(score, rows.table, rows.length, rows.grain, as_many(len(score), self.budget))
        return Seen(Rows(slots, n, 1))

    def cost(self, shape: Shape) -> Cost:
        return Cost(moved=2 * shape.head_dim)
