"""LeoAM: a cache on the disk, of which a step reads the pieces that can matter.

Every chunk of `chunk` keys has a box, its channel-wise minimum and maximum, on the device; sum_i max(q_i kmin_i, q_i kmax_i) can't be
below any of its logits. Chunks whose bound is below the threshold, the bound of the last piece that fits the budget, are dropped whole;
the others are split into pieces of `least` keys with boxes of their own (a byte a channel, rounded outwards). That finds the pieces with
the highest bounds and scores few boxes. Pieces read lately stay on the device (`device` tokens a KV head) and on the host (`host` tokens).

The paper halves a chunk again and again down to 8 keys and keeps one whole whose lower bound is above the threshold; here it is split
at once, by default to 16 keys, the smallest page that kernels read in place. The paper also keeps the boxes of chunks on the disk there,
moves chunks between tiers by how often they are used (here: how lately), reads ahead, and compresses where the link is slow (put int4
beside it). The threshold and the maximum over a group of query heads are inferred.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels import page_scores
from ...kernels.boxes import bounds, boxes
from ...method import Cost, Method, Needs, Paper, Trial
from ...roles import Field, Seen, Select, Store, View
from ...values import Rows, Shape
from .base import HeadByHead, ascending, row_queries, tell


@dataclass(frozen=True)
class LeoAM(Method, HeadByHead, Select):
    budget: int = 1024
    chunk: int = 64
    least: int = 16
    window: int = 64
    device: int = 512
    host: int = 4096
    directory: str = ""

    paper: ClassVar[Paper] = Paper(
        "S044",
        "LeoAM: Adaptive KV management over GPU, CPU and disk for long-context inference",
        "arXiv:2506.20187",
        "3.46x lower latency on average against offloading baselines on one RTX 4090",
    )
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    home: ClassVar[str] = "disk"
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "leoam(budget=512)", "random_select(budget=448)", ("quest(budget=512, page=64)",), claim="pieces serve as well as whole chunks"
        ),
    )

    def needs(self) -> Needs:
        return Needs(recent=self.window, page=self.chunk, keys="rotated")

    def check(self, shape: Shape) -> list[str]:
        reasons = [] if self.chunk in (16, 32, 64, 128) else [f"chunk={self.chunk} must be 16, 32, 64 or 128 tokens."]
        if self.least % 8 or not 8 <= self.least <= self.chunk or self.chunk % self.least:
            reasons.append(f"least={self.least} must be a multiple of 8 into which chunk={self.chunk} can be cut.")
        if self.window < 0 or self.device < 0 or self.host < 0:
            reasons.append(f"window={self.window}, device={self.device} and host={self.host} must not be negative.")
        if self.budget < (floor := self.window + 3 * self.least):
            reasons.append(f"budget={self.budget} must be at least {floor}: the window and three pieces.")
        return reasons

    def cost(self, shape: Shape) -> Cost:
        return Cost(device=(4 / self.chunk + 2 / self.least) * shape.head_dim)

    def folder(self) -> str:
        return self.directory

    def keeps(self) -> int:
        return self.device

    def shelves(self) -> int:
        return self.host

    def piece(self, page: int) -> int:
        return self.least

    def fields(self, shape: Shape, page: int) -> dict[str, Field]:
        box, inside = Field((shape.head_dim,), torch.float16), Field((page // self.least, shape.head_dim), torch.uint8)
        return {"kmin": box, "kmax": box, "low": inside, "high": inside}

    def summarise(self, store: Store, pages: Tensor, fill: Tensor, k: Tensor) -> None:
        store["kmin"][pages], store["kmax"][pages], store["low"][pages], store["high"][pages] = boxes(k, fill, self.least)

    def select(self, q: Tensor, rows: Rows, view: View) -> Seen:
        count, small = (self.budget - self.window) // self.least, rows.cut(self.least)
        if small.table.shape[1] <= count:
            return Seen(small)
        bound = page_scores(q, view.summary("kmin"), view.summary("kmax"), rows.table, rows.length, rows.grain, view.step.spans)
        bound[:, 0] = torch.inf  # the first tokens are always read
        order, per = bound.argsort(dim=1, descending=True, stable=True), self.chunk // self.least
        bound, rank = bound.gather(1, order), torch.arange(order.shape[1], device=q.device)
        opened = torch.full((rows.count, 1), min(-(-count // per) + 1, len(rank)), device=q.device)
        own, score, left = row_queries(q, view), q.new_empty(rows.count, 0), opened
        while bool(left.any()):
            if (deep := int(opened.max())) * per > score.shape[1]:
                score = torch.cat([score, self._split(own, order[:, score.shape[1] // per : deep], rows, view)], 1)
            past = rank[:deep].repeat_interleave(per) >= opened
            floor = score.masked_fill(past, -torch.inf).topk(count, dim=1).values[:, -1:]
            left = ((bound > floor) & (rank >= opened)).sum(1, keepdim=True)
            opened = opened + torch.minimum(left, opened)
        best = score.topk(count, dim=1)
        index = order.gather(1, best.indices // per) * per + best.indices % per
        looked = rows.filled + torch.minimum(opened[:, 0].cpu(), rows.filled) * per
        tell(view, self, small.filled > count, boxes_scored=looked, boxes_flat=small.filled)
        return Seen(small.pages(ascending(index, best.values, small.table.shape[1])))

    def _split(self, q: Tensor, pick: Tensor, rows: Rows, view: View) -> Tensor:
        """Bounds [R, m * n] of the n pieces of each of the chunks at pick [R, m] of the rows, for queries [R, g, D]; -inf for none."""
        at = pick.cpu()
        pages = rows.table.gather(1, at).clamp_min(0).long()
        score = bounds(q, *(view.summary(name)[pages] for name in ("kmin", "kmax", "low", "high")))
        start = (at[:, :, None] * self.chunk + torch.arange(0, self.chunk, self.least)).flatten(1)
        score = score.masked_fill((start == 0).to(q.device), torch.inf)
        return score.masked_fill((start >= rows.length[:, None]).to(q.device), -torch.inf)
