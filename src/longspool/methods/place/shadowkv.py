"""ShadowKV: keys of low rank on the device, values on the host, of which a step fetches a few chunks.

Keys before rotation lie near a subspace: of each the device keeps its coordinates u = B k, and k is rebuilt as B^T u and turned to its
position when it is read. Chunks of `chunk` rotated keys have a landmark, their mean. A query reads the chunks with the highest softmax
over landmarks, the maximum over its group of heads, `budget` tokens in all; besides, the `outliers` chunks whose keys fit their landmark
worst (lowest cosine). What was read lately stays on the device, so that only newly selected values are fetched.

The paper factors a whole prompt and all heads of a layer at once, which is at least as good at equal size; here each KV head has
rank / heads directions, learnt from the tokens that settle first (a prompt's first chunk), and later ones are projected on them. The
paper keeps outliers and all of the answer's tokens exactly on the device; here outliers are always read, but their keys rebuilt like
all others, and the answer's tokens settle too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...method import Cost, Method, Needs, Paper, Trial
from ...roles import Encode, Field, Seen, Select, Store, View
from ...values import Rows, Shape, Span
from .base import HeadByHead, ascending, row_queries, tell


@dataclass(frozen=True)
class ShadowKV(Method, HeadByHead, Encode, Select):
    budget: int = 2048
    rank: int = 160
    chunk: int = 8
    outliers: int = 48
    window: int = 32
    device: int = 2560
    exact: bool = False

    paper: ClassVar[Paper] = Paper(
        "S061",
        "ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference",
        "arXiv:2410.21465",
        "full accuracy at a budget of 1.56%, 6x larger batches, 3.04x throughput",
    )
    identity: ClassVar[dict[str, object]] = {"rank": 1 << 30, "budget": 1 << 30, "exact": True}
    home: ClassVar[str] = "host"
    unit: ClassVar[int] = 1
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial("shadowkv(budget=512, rank=96)", "random_select(budget=896)", ("quest(budget=928)",), claim="Beats Quest at equal reads."),
    )

    def needs(self) -> Needs:
        return Needs(recent=self.window, page=64, keys="bare")

    def check(self, shape: Shape) -> list[str]:
        reasons = [] if self.chunk in (4, 8, 16, 32, 64) else [f"chunk={self.chunk} must be 4, 8, 16, 32 or 64 tokens."]
        if self.budget < self.chunk or self.rank < shape.kv_heads:
            reasons.append(f"budget={self.budget} must be at least a chunk, and rank={self.rank} one direction of each KV head.")
        if min(self.outliers, self.window, self.device) < 0:
            reasons.append(f"outliers={self.outliers}, window={self.window} and device={self.device} must not be negative.")
        return reasons

    def cost(self, shape: Shape) -> Cost:
        size = 2 * self._rank(shape.kv_heads, shape.head_dim) + 2 * (shape.head_dim + 1) / self.chunk
        return Cost(device=size, host=2 * shape.head_dim)

    def keeps(self) -> int:
        return self.device

    def _rank(self, heads: int, dim: int) -> int:
        return min(-(-self.rank // heads), dim)

    def fields(self, shape: Shape, page: int, layers: int = 0) -> dict[str, Field]:
        """What it stores as a codec, which is told of layers, or as a summary."""
        kind, dim = torch.float32 if self.exact else torch.float16, shape.head_dim
        if layers:
            near = Field((page, self._rank(shape.kv_heads, dim)), kind, resident=True, tokens=0)
            return {"u": near, "v": Field((page, dim), kind, tokens=0)}
        return {"mark": Field((page // self.chunk, dim), torch.float16), "fit": Field((page // self.chunk,), torch.float32)}

    def learns(self, shape: Shape, layers: int) -> dict[str, Field]:
        return {"basis": Field((self._rank(shape.kv_heads, shape.head_dim), shape.head_dim), torch.float32)}

    def learn(self, k: list[Tensor], v: list[Tensor], span: Span) -> dict[str, Tensor]:
        """The right singular vectors of each row's keys [n, D], those of the largest singular values."""
        vectors = torch.linalg.eigh(torch.stack([x.T @ x for x in k])).eigenvectors
        return {"basis": vectors[..., -self._rank(len(k), k[0].shape[1]) :].mT.contiguous()}

    def write(self, store: Store, pages: Tensor, fill: Tensor, k: Tensor, v: Tensor, span: Span) -> None:
        store["u"][pages] = (store.learnt("basis", pages) @ k).mT.to(store["u"].dtype)
        store["v"][pages] = v.to(store["v"].dtype)

    def read(self, store: Store, pages: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        k = store["u"][pages].float() @ store.learnt("basis", pages)
        return k.mT.contiguous(), store["v"][pages].float()

    def piece(self, page: int) -> int:
        return self.chunk

    def summarise(self, store: Store, pages: Tensor, fill: Tensor, k: Tensor) -> None:
        past = (torch.arange(k.shape[-1], device=k.device) >= fill[:, None]).view(len(k), -1, self.chunk)  # [S, n, chunk]
        keys = k.mT.reshape(*past.shape, k.shape[1]).masked_fill(past[..., None], 0)
        mark = keys.sum(2) / (~past).sum(2).clamp_min(1)[..., None]
        fit = torch.cosine_similarity(keys, mark[:, :, None], dim=-1).masked_fill(past, 1).amin(-1)
        store["mark"][pages], store["fit"][pages] = mark.to(torch.float16), fit

    def select(self, q: Tensor, rows: Rows, view: View) -> Seen:
        small, count = rows.cut(self.chunk), self.budget // self.chunk + self.outliers
        if small.table.shape[1] <= count:
            return Seen(small)
        pages = rows.table.clamp_min(0).long()
        mark, fit = (view.summary(name)[pages].flatten(1, 2).float()[:, : small.table.shape[1]] for name in ("mark", "fit"))
        past = (~small.used).to(q.device)
        odd = torch.zeros_like(past)
        if self.outliers:
            odd.scatter_(1, fit.masked_fill(past, torch.inf).topk(self.outliers, dim=1, largest=False).indices, True)
        weight = (row_queries(q, view) @ mark.mT * view.shape.scale).masked_fill((past | odd)[:, None], -torch.inf)
        score = weight.softmax(-1).amax(1).nan_to_num(0).masked_fill(odd, torch.inf).masked_fill(past, -torch.inf)
        best = score.topk(count, dim=1)
        tell(view, self, small.filled > count, landmarks_scored=small.filled)
        return Seen(small.pages(ascending(best.indices, best.values, small.table.shape[1])))
