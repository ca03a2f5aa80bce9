"""Quest: read only the pages that can matter to this query.

Every page keeps the channel-wise minimum and maximum of its keys; sum_i max(q_i kmin_i, q_i kmax_i) can't be below any of its
logits. The highest bounds are read, the rest stay unread but stored. The first `dense` layers are not sparse and read everything.
The paper is multi-head; with grouped queries a KV head takes the maximum over its group, or with `per_head` each head its own list.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels import page_scores, pick_pages
from ...kernels.boxes import half_up as _half_up
from ...method import Cost, Method, Needs, Paper, Trial
from ...roles import Field, Seen, Select, Store, View
from ...values import Rows, Shape


@dataclass(frozen=True)
class Quest(Method, Select):
    budget: int = 1024
    page: int = 16
    dense: int = 2
    per_head: bool = False

    paper: ClassVar[Paper] = Paper(
        "S052",
        "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference",
        "arXiv:2406.10774",
        "up to 2.23x faster attention, 7.03x lower latency",
    )
    steady: ClassVar[bool] = True
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "quest(budget=512)",
            "random_select(budget=512)",
            claim="Reading an eighth of the tokens, by the bounds of their pages, keeps the continuation close to dense.",
        ),
        Trial(
            "quest(budget=512)", "random_select(budget=512)", (), "agnostic", 2048, claim="What is stored but unread can still be found."
        ),
    )

    def needs(self) -> Needs:
        return Needs(page=self.page, keys="rotated")

    def check(self, shape: Shape) -> list[str]:
        if self.page not in (16, 32, 64, 128):
            return [f"page={self.page} must be 16, 32, 64 or 128 tokens."]
        if self.dense < 0:
            return [f"dense={self.dense} must not be negative."]
        least = 4 * self.page
        return (
            []
            if self.budget >= least
            else [f"budget={self.budget} must be at least {least}: three pages of {self.page} and the recent one."]
        )

    def fields(self, shape: Shape, page: int) -> dict[str, Field]:
        return {"kmin": Field((shape.head_dim,), torch.float16), "kmax": Field((shape.head_dim,), torch.float16)}

    def summarise(self, store: Store, pages: Tensor, fill: Tensor, k: Tensor) -> None:
        past = torch.arange(k.shape[-1], device=k.device) >= fill[:, None, None]
        store["kmin"][pages] = -_half_up(-k.masked_fill(past, torch.inf).amin(-1))
        store["kmax"][pages] = _half_up(k.masked_fill(past, -torch.inf).amax(-1))

    def select(self, q: Tensor, rows: Rows, view: View) -> Seen:
        """The recent zone is the budget's last page: it is always read."""
        count = max(3, self.budget // self.page - 1)
        if view.layer < self.dense or rows.table.shape[1] <= count:
            return Seen(rows)
        rows = rows.split(view.shape.group) if self.per_head else rows
        score = page_scores(q, view.summary("kmin"), view.summary("kmax"), rows.table, rows.length, self.page, view.step.spans)
        picked, tokens = pick_pages(score, rows.table, rows.length, rows.grain, _as_many(rows.count, count))
        return Seen(Rows(picked, tokens, rows.grain))

    def cost(self, shape: Shape) -> Cost:
        return Cost(device=4 * shape.head_dim / self.page, moved=4 * shape.head_dim / self.page)


@functools.lru_cache(maxsize=64)
def _as_many(rows: int, count: int) -> Tensor:
    return torch.full((rows,), count, dtype=torch.int32)
