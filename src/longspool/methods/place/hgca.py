"""HGCA: old keys and values stay on the host and are attended there, of which a step sees the salient ones.

The device holds the newest tokens, at most `window`, and attends to them densely. When the oldest leave, each has a moving average of the
weight that it drew among them, m <- a p + (1 - a) m; those with m >= beta / N are salient, N tokens being attended on the device. A KV head
lists as many as the neediest of its group of heads (of which there are `groups`), at least 10. The parts are merged by their lse. A
prompt's chunk attends to everything, and the lists are made anew from it: weight among the host's tokens >= beta / their number.

The average is taken over the last `horizon` queries, all but 2^-horizon of it for a = 1/2; so is the mean over a chunk's, which the paper
takes over all. The paper's host works while the device does and gathers a list once; here one follows the other, and lists are gathered
in every step. Its transition zone is left out. What groups of query heads do (sums, one list for a KV head) is inferred.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...method import Cost, Method, Needs, Paper, Trial
from ...roles import Seen, Select, View
from ...values import Rows, Shape
from .base import HeadByHead

LEAST = 10  # entries that a list has at least


@dataclass(frozen=True)
class HGCA(Method, HeadByHead, Select):
    beta: float = 0.5
    window: int = 1024
    alpha: float = 0.5
    groups: int = 4
    horizon: int = 32

    paper: ClassVar[Paper] = Paper(
        "S054",
        "HGCA: Hybrid GPU-CPU Attention for Long Context LLM Inference",
        "arXiv:2507.03153",
        "near-full perplexity at longer sequences and larger batches than offloading baselines",
    )
    identity: ClassVar[dict[str, object]] = {"beta": 0.0}
    home: ClassVar[str] = "host"
    attends: ClassVar[bool] = True
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial("hgca(window=512)", "streaming(sinks=0, window=512)", claim="salient entries on the host beat the window alone"),
    )

    def needs(self) -> Needs:
        return Needs(recent=max(self.window - 64, 0), queries=self.horizon, keys="rotated")

    def check(self, shape: Shape) -> list[str]:
        reasons = [] if self.beta >= 0 else [f"beta={self.beta} must not be negative."]
        if not 0 < self.alpha <= 1:
            reasons.append(f"alpha={self.alpha} must be above 0 and at most 1.")
        if self.window < 0 or self.groups < 1 or self.horizon < 1:
            reasons.append(f"window={self.window} must not be negative, groups={self.groups} and horizon={self.horizon} be at least 1.")
        return reasons

    def cost(self, shape: Shape) -> Cost:
        return Cost(host=4 * shape.head_dim)

    def piece(self, page: int) -> int:
        return 1

    def index_bytes(self, shape: Shape, tokens: int) -> int:
        return shape.kv_heads * (tokens + 8)

    def index(self, old: dict[str, Tensor], view: View) -> dict[str, Tensor]:
        """Which settled tokens are salient, bool [R, T], and how many of each row are known, int64 [R]."""
        known, none = old["known"].tolist() if old else [0] * view.rows.count, torch.zeros(0, dtype=torch.bool)
        before = [old["salient"][r, :n].cpu() if n else none for r, n in enumerate(known)]
        if view.step.phase == "prefill" and any(known):
            host = [k[:n] for (k, _), n in zip(view.settled([0] * len(known)), known, strict=True)]
            before = self._salient(self._drawn(host, view, causal=False), known)
        fresh = [k for k, _ in view.settled(known)]
        held = [torch.cat([k, near]) for k, near in zip(fresh, view.recent(), strict=True)]
        drawn = [w[: len(k)] for w, k in zip(self._drawn(held, view, causal=True), fresh, strict=True)]
        after = self._salient(drawn, [len(k) for k in held])
        view.count(self, settled=sum(map(len, after)), salient=sum(int(s.sum()) for s in after))
        marks = [torch.cat(pair) for pair in zip(before, after, strict=True)]
        return {"salient": torch.nn.utils.rnn.pad_sequence(marks, batch_first=True), "known": view.rows.length.long()}

    def _drawn(self, keys: list[Tensor], view: View, causal: bool) -> list[Tensor]:
        """How much of the attention among each row's keys [T, D] each draws from the last queries, which are those of the last keys."""
        s, out = view.shape, []
        for k, queries in zip(keys, view.queries.view(len(keys), s.group, -1, s.head_dim), strict=True):
            q = queries[:, -max(len(k), 1) :] if causal else queries
            n, logits = q.shape[1], q @ k.T * s.scale  # [G, n, T]
            if s.softcap:
                logits = torch.tanh(logits / s.softcap) * s.softcap
            if causal:
                later = torch.ones(n, len(k), dtype=torch.bool, device=k.device).triu(len(k) - n + 1)
                logits = logits.masked_fill(later, -torch.inf)
            age = torch.arange(n - 1, -1, -1, device=k.device).float()
            share = (1 - self.alpha) ** age if view.step.phase == "decode" else torch.ones_like(age)
            out.append((logits.softmax(-1).sum(0) * (share / share.sum())[:, None]).sum(0))
        return out

    def _salient(self, drawn: list[Tensor], among: list[int]) -> list[Tensor]:
        """Which tokens are listed, bool [n] for each row, by the weight that they draw among so many."""
        counts = [int((w >= self.beta / max(n, 1)).sum()) for w, n in zip(drawn, among, strict=True)]
        per, out = -(-len(drawn) // self.groups), []
        for r, w in enumerate(drawn):
            first = r // per * per
            out.append(torch.zeros(len(w), dtype=torch.bool))
            out[r][w.topk(min(max(LEAST, *counts[first : first + per]), len(w))).indices.cpu()] = True
        return out

    def select(self, q: Tensor, rows: Rows, view: View) -> Seen:
        """A step of several tokens attends to everything."""
        if len(q) > view.step.requests:
            return Seen(rows)
        none = torch.zeros(view.shape.kv_heads, 0, dtype=torch.bool)
        marks = [mark.cpu() for own in view.index for mark in own.get("salient", none)]
        listed = torch.nn.utils.rnn.pad_sequence(marks, batch_first=True)
        order, count = torch.argsort(~listed, dim=1, stable=True).to(torch.int32), listed.sum(1)
        order = order.masked_fill(torch.arange(order.shape[1]) >= count[:, None], -1)
        return Seen(rows.cut(1).pages(order[:, : int(count.max())]))
