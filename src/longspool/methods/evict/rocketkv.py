"""RocketKV: first drop what a prompt will hardly need, then read only a part of what is left at each step.

With c = T / budget, stage 1 keeps  B1 = T / c^r,  r = min(0.2 + 0.06 log2 c, 0.8),  tokens of the prompt per KV head: the window and the
highest sums of its attention over queries and group, smeared by a maximum over `kernel` neighbours. Stage 2 reads  budget / 2  tokens: the
sign of the group's summed query picks, channel by channel, a page's maximum or minimum M; pages rank by the mean over the group of
softmax( sum_{i in I} q_i M_i / sqrt(D sum_I |q| / sum |q|) ),  I being the `channels` largest of mean |q|. The paper makes room in B1 for
the answer, derives page size and channels from B1 / budget and reads single tokens; here pages have a fixed size and are read whole,
beside what is recent. Its variant for several questions, which keeps everything, is not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import log2
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from ...kernels import pick_pages
from ...kernels.window import window_attention
from ...method import Cost, Needs, Paper, Trial
from ...roles import Field, Seen, Select, Store, View
from ...values import Rows, Shape
from .base import ScoreEvict

_BLIND = "random_evict(budget={}) + random_select(budget=128, window=32)"


@dataclass(frozen=True)
class RocketKV(ScoreEvict, Select):
    budget: int = 512
    window: int = 32
    kernel: int = 63
    page: int = 16
    channels: int | None = None

    paper: ClassVar[Paper] = Paper(
        "S043",
        "RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression",
        "arXiv:2502.14051",
        "negligible loss with 256 to 512 tokens read a step, decoding up to 3.7x faster",
    )
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    question: ClassVar[bool] = True
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial("rocketkv(budget=256)", _BLIND.format(929), ("snapkv(budget=256)", "quest(budget=144, dense=0)"), "aware", 2048),
        Trial("rocketkv(budget=256)", _BLIND.format(1209), ("snapkv(budget=256)", "quest(budget=144, dense=0)")),
    )

    def needs(self) -> Needs:
        return Needs(recent=self.window, queries=self.window, page=self.page, keys="rotated")

    def check(self, shape: Shape) -> list[str]:
        reasons = super().check(shape)
        if self.window < 1:
            reasons.append(f"window={self.window} must be at least 1.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            reasons.append(f"kernel={self.kernel} must be an odd number of tokens.")
        if self.page not in (16, 32, 64, 128) or self.budget < 4 * self.page:
            reasons.append(f"page={self.page} must be 16, 32, 64 or 128 tokens, and budget={self.budget} at least four of them.")
        if self.channels is not None and not 1 <= self.channels <= shape.head_dim:
            reasons.append(f"channels={self.channels} must be between 1 and the head's {shape.head_dim}.")
        return reasons

    def stay(self, total: int) -> int:
        """What stage 1 keeps of so many tokens."""
        ratio = total / self.budget
        return total if ratio <= 1 else int(total / ratio ** min(0.2 + 0.06 * log2(ratio), 0.8))

    def room(self, view: View) -> int:
        return max(self.stay(view.step.total[0]) - view.held, 1)

    def bound(self, count: int) -> int:
        return self.stay(count)

    def score(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        seen = window_attention(view.queries, k, pos >= 0, view.keys(), view.shape).sum((1, 2))
        return max_pool1d(seen[:, None], self.kernel, 1, self.kernel // 2)[:, 0]

    def fields(self, shape: Shape, page: int) -> dict[str, Field]:
        return {"kmin": Field((shape.head_dim,), torch.float16), "kmax": Field((shape.head_dim,), torch.float16)}

    def summarise(self, store: Store, pages: Tensor, fill: Tensor, k: Tensor) -> None:
        past = torch.arange(k.shape[-1], device=k.device) >= fill[:, None, None]
        store["kmin"][pages] = k.masked_fill(past, torch.inf).amin(-1).half()
        store["kmax"][pages] = k.masked_fill(past, -torch.inf).amax(-1).half()

    def select(self, q: Tensor, rows: Rows, view: View) -> Seen:
        count = max(1, self.budget // 2 // self.page - 1)
        if rows.table.shape[1] <= count:
            return Seen(rows)
        s, low, high = view.shape, view.summary("kmin"), view.summary("kmax")
        score = []
        for b, (first, last) in enumerate(pairwise(view.step.spans)):
            own = rows.part(b * s.kv_heads, (b + 1) * s.kv_heads)
            queries = q[first:last].view(-1, s.kv_heads, s.group, s.head_dim).permute(1, 2, 0, 3).flatten(1, 2)
            pages = own.table.clamp_min(0).long()
            score.append(self.rank(queries, low[pages].float(), high[pages].float(), (~own.used).to(q.device)))
        want = torch.full((rows.count,), count, dtype=torch.int32)
        picked, tokens = pick_pages(torch.cat(score), rows.table, rows.length, rows.grain, want)
        return Seen(Rows(picked, tokens, rows.grain))

    def rank(self, q: Tensor, low: Tensor, high: Tensor, past: Tensor) -> Tensor:
        """Each page's share of the estimated attention, [R, P], for queries [R, G, D] and pages whose keys lie in low to high [R, P, D]."""
        up = q.sum(1) > 0
        edge = torch.where(up[:, None], high, low)
        size = q.abs()
        if self.channels is not None:
            drop = size.mean(1).argsort(dim=1, descending=True, stable=True)[:, self.channels :]
            q = q.scatter(2, drop[:, None].expand(-1, q.shape[1], -1), 0.0)
        scale = (q.shape[2] * q.abs().sum(2) / size.sum(2)).sqrt()
        logits = (q @ edge.transpose(1, 2)) / scale[..., None]
        return logits.masked_fill(past[:, None], -torch.inf).softmax(-1).mean(1).masked_fill(past, -torch.inf)

    def cost(self, shape: Shape) -> Cost:
        return Cost(device=4 * shape.head_dim / self.page, moved=4 * shape.head_dim / self.page)
