"""RetroInfer: clusters that matter are read, those that may matter are estimated, the rest is left out.

Keys are clustered by cosine, within segments of the prompt and about their mean; last, every token goes to its nearest centroid of all.
A cluster keeps the mean C of its keys, the mean V of its values and its size n. Clusters are ranked by sum_g softmax_i(q_g . C_i s): the
first `retrieve` of them are read token by token, and the next `estimate` stand in one softmax with these as single entries of weight
n exp(q . C s) and value V, which by Jensen's inequality never weigh more than their tokens would. The first `sinks`, the recent tokens, and
settled ones that wait for `block` of their kind to be clustered are read. The paper keeps tokens on the host and a cache of clusters
on the GPU; add a Place for the former, the latter is not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels.clusters import assign, means, recall, spherical
from ...method import Cost, Method, Needs, Paper, Trial
from ...roles import Seen, Select, View
from ...values import Rows, Shape
from .base import bent, by_row, by_token, clustered, known, low, paged, span, together


@dataclass(frozen=True)
class RetroInfer(Method, Select):
    retrieve: float = 0.018
    estimate: float = 0.232
    cluster: int = 16
    segment: int = 8192
    rounds: int = 9
    block: int = 1024
    sinks: int = 4
    window: int = 64
    page: int = 16

    paper: ClassVar[Paper] = Paper(
        "S051",
        "RetroInfer: A Vector-Storage Approach for Scalable Long-Context LLM Inference",
        "arXiv:2505.02922",
        "up to 4.5x faster than full attention at 128K",
    )
    identity: ClassVar[dict[str, object]] = {"retrieve": 1.0}
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "retroinfer(segment=2048)",
            control="random_select(budget=80, sinks=4)",
            beats=("retroinfer(segment=2048, estimate=0.0)", "quest(budget=96, dense=0)"),
            claim="The estimate brings it nearer to dense than what is read alone, and than whole pages at as many tokens.",
        ),
    )

    def needs(self) -> Needs:
        return Needs(recent=self.window, page=self.page, keys="rotated")

    def check(self, shape: Shape) -> list[str]:
        return low(self, retrieve=0, estimate=0, cluster=1, segment=1, rounds=0, block=1, sinks=0, window=0) + paged(self.page)

    def index(self, old: dict[str, Tensor], view: View) -> dict[str, Tensor]:
        """The clusters' mean keys, mean values, sizes and members, and how many tokens of each row are in clusters or sinks."""
        length, reading = view.rows.length.tolist(), view.step.phase == "prefill" and not view.step.final[0]
        done = old["done"].tolist() if old else [min(self.sinks, n) for n in length]
        if reading or max(n - d for n, d in zip(length, done, strict=True)) < self.block:
            return old
        return clustered(old, done, [self._row(k, v, bool(old)) for k, v in view.settled(done)])

    def _row(self, k: Tensor, v: Tensor, later: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Mean keys and values of the clusters of one row's tokens k, v [n, D], and each token's cluster."""
        if not len(k):
            return {"key": k, "value": v}, k.new_zeros(0, dtype=torch.int64)
        about = k - k.mean(0)
        centroid = self._centroids(about, 1 if later else max(round(len(k) / self.segment), 1))
        label = assign(about, centroid)
        return {"key": means(k, label, len(centroid))[0], "value": means(v, label, len(centroid))[0]}, label

    def _centroids(self, k: Tensor, segments: int) -> Tensor:
        """Those of each segment of k [n, D], found within it from evenly spaced keys."""
        unit = lcm(8, segments)
        each = max(min(max(round(len(k) / self.cluster / unit), 1) * unit, len(k)) // segments, 1)
        return torch.cat([spherical(s, s[torch.arange(each) * len(s) // each], self.rounds) for s in k.tensor_split(segments)])

    def index_bytes(self, shape: Shape, tokens: int) -> int:
        clusters = tokens // self.cluster + 8 * (tokens // self.segment + tokens // self.block + 2)
        return shape.kv_heads * (clusters * (8 * shape.head_dim + 4) + 4 * tokens + 4)

    def select(self, q: Tensor, rows: Rows, view: View) -> Seen:
        if self.retrieve >= 1 or not any(view.index):
            return Seen(rows)
        heads, dim = view.shape.kv_heads, view.shape.head_dim
        none = torch.zeros(heads, 1, dtype=torch.int32, device=q.device)
        key, value = (known(view, name, q.new_zeros(heads, 1, dim)) for name in ("key", "value"))
        size, order, done = known(view, "size", none).long(), known(view, "order", none).long(), known(view, "done", none[:, 0]).cpu()
        empty = size == 0
        logits = bent(view.shape.scale * torch.einsum("rngd,rcd->rngc", by_row(q, view), key), view.shape)
        share = logits.masked_fill(empty[:, None, None], -torch.inf).softmax(3).nan_to_num(0.0).sum(2).amax(1)
        rank = share.masked_fill(empty, -1.0).argsort(dim=1, descending=True, stable=True)
        place, exact, upto = rank.argsort(1), _share(self.retrieve, empty), _share(self.retrieve + self.estimate, empty)
        read = recall(rank, size, order, (size * (place < exact)).sum(1))
        near = (place >= exact) & (place < upto) & ~empty
        for b, count in enumerate(near.view(len(view.index), -1).sum(1).tolist()):
            if count:
                view.count(self, b, estimated=count)
        weight = (logits + size.clamp_min(1).log()[:, None, None]).masked_fill(~near[:, None, None], -torch.inf)
        lse = weight.logsumexp(3)
        out = torch.einsum("rngc,rcd->rngd", (weight - lse.nan_to_num(neginf=0.0)[..., None]).exp(), value)
        first = span(torch.zeros_like(done), done.clamp_max(self.sinks))
        picked = rows.at(together(first, read, span(done, rows.length)))
        return Seen(picked, ((by_token(out, view), by_token(lse, view)),))

    def cost(self, shape: Shape) -> Cost:
        known = (8 * shape.head_dim + 4) / self.cluster
        return Cost(device=known + 4, moved=known)


def _share(part: float, empty: Tensor) -> Tensor:
    """How many of each row's clusters a part of them is, int64 [R, 1]."""
    return ((~empty).sum(1, keepdim=True).double() * part - 1e-9).ceil().long()
