"""ClusterKV: keys that point the same way are recalled together, wherever they stand in the text.

When the prompt has been read, k-means by cosine makes T / `cluster` clusters of each KV head's settled keys behind the first `sinks`;
later every `block` settled tokens become clusters of their own. A cluster is known by the plain mean mu of its keys. For a query, clusters
are taken in the order of q . mu until `budget` tokens, sinks included, are read; of the last one as many as there is room for. Settled
tokens that are in no cluster yet are read besides. A query head has its own set, or with per_head=False a group has one by its mean
query. The paper keeps recalled clusters on the device from step to step; here settled tokens lie where Place has them, and nothing is
cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels.clusters import assign, means, recall, spherical
from ...method import Cost, Paper, Trial
from ...roles import Seen, View
from ...values import Rows, Shape
from .base import Picks, by_row, clustered, known, low, span, together


@dataclass(frozen=True)
class ClusterKV(Picks):
    sinks: int = 16
    cluster: int = 80
    block: int = 320
    rounds: int = 20
    dense: int = 2
    per_head: bool = True
    seed: int = 0

    paper: ClassVar[Paper] = Paper(
        "S132",
        "ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression",
        "arXiv:2412.03213",
        "up to 2x faster at 32K with 1-2K tokens read",
    )
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "clusterkv(budget=256)",
            control="random_select(budget=256, sinks=16) @ 2-",
            beats=("quest(budget=272)",),
            claim="Nearer to dense than whole pages by their bounds at as many tokens.",
        ),
    )

    @property
    def _later(self) -> int:
        """Tokens of a cluster that is made while decoding."""
        return max(self.cluster // 2, 1)

    def check(self, shape: Shape) -> list[str]:
        return super().check(shape) + low(self, sinks=0, budget=self.sinks + 1, cluster=1, block=1, rounds=0, dense=0)

    def index(self, old: dict[str, Tensor], view: View) -> dict[str, Tensor]:
        """The clusters' means, sizes and members, and how many tokens of each row are in clusters or sinks."""
        length, step = view.rows.length.tolist(), view.step
        reading = step.phase == "prefill" and not step.final[0]
        done = old["done"].tolist() if old else [min(self.sinks, n) for n in length]
        if view.layer < self.dense or reading or max(n - d for n, d in zip(length, done, strict=True)) < (self.block if old else 1):
            return old
        return clustered(old, done, [self._row(k, r, bool(old), view) for r, (k, _) in enumerate(view.settled(done))])

    def _row(self, k: Tensor, r: int, later: bool, view: View) -> tuple[dict[str, Tensor], Tensor]:
        """The means of the clusters of one row's tokens k [n, D], and each token's cluster."""
        count = max(len(k) // (self._later if later else self.cluster), min(len(k), 1))
        if not count:
            return {"mean": k}, k.new_zeros(0, dtype=torch.int64)
        seed = torch.Generator().manual_seed(self.seed + 64 * view.layer + r)
        start = k[torch.randperm(len(k), generator=seed)[:count].to(k.device)]
        label = assign(k, spherical(k, start, self.rounds))
        return {"mean": means(k, label, count)[0]}, label

    def index_bytes(self, shape: Shape, tokens: int) -> int:
        clusters = tokens // self._later + tokens // self.block + 1
        return shape.kv_heads * (clusters * (4 * shape.head_dim + 4) + 4 * tokens + 4)

    def select(self, q: Tensor, rows: Rows, view: View) -> Seen:
        if view.layer < self.dense:
            return Seen(rows)
        heads, dim, group = view.shape.kv_heads, view.shape.head_dim, view.shape.group
        rows = rows.split(group) if self.per_head else rows
        if self.budget >= rows.table.shape[1] * rows.grain:
            return Seen(rows)
        none = torch.zeros(heads, 1, dtype=torch.int32, device=q.device)
        mean = known(view, "mean", q.new_zeros(heads, 1, dim))
        size, order, done = known(view, "size", none), known(view, "order", none), known(view, "done", none[:, 0])
        score = torch.einsum("rngd,rcd->rngc", by_row(q, view), mean).amax(1)
        score = score.flatten(0, 1) if self.per_head else score.mean(1)
        if self.per_head:
            size, order, done = (x.repeat_interleave(group, 0) for x in (size, order, done))
        rank = score.masked_fill(size == 0, -torch.inf).argsort(dim=1, descending=True, stable=True)
        room = torch.full((len(rank),), self.budget - self.sinks, device=q.device)
        done = done.cpu()
        first = span(torch.zeros_like(done), done.clamp_max(self.sinks))
        return Seen(rows.at(together(first, recall(rank, size.long(), order.long(), room), span(done, rows.length))))

    def cost(self, shape: Shape) -> Cost:
        means = (4 * shape.head_dim + 4) / self.cluster
        return Cost(device=means + 4, moved=means)
