"""MILLION: keys and values as numbers of learnt vectors, attended without looking the vectors up.

A head's vector is cut into pieces of `dims` neighbours, and a piece is stored as one byte: the nearest of 256 vectors that k-means found
among the model's own keys or values. Outliers cost nothing then, since the vectors lie where the pieces do. While decoding, a query meets
all vectors once, lut[m, c] = q_m . c_m, and each stored token is a sum of look-ups; weights are summed by code before they meet the values:

    logit_t = sum_m lut[m, code[t, m]],   out_m = sum_c (sum_{t: code[t, m] = c} p_t) c_m

The newest `window` tokens stay raw. The paper has one book of vectors for all layers and heads; ours is one for each layer. Codes of 12
bits (3 bits a number) have no kernel there or here. The chunks of a prompt have older pages decoded once, since look-ups would cost more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels import attend_books, nearest_codes
from ...kernels.codes import looked_up
from ...method import Cost, Needs, Paper, Trial
from ...roles import Encode, Field, Fitted, Reach, Samples, Store
from ...values import Rows, Shape, Span
from .base import few, kmeans

CODES = 256
ROWS = 1 << 13  # vectors that a book is learnt from


@dataclass(frozen=True)
class Million(Fitted, Encode):
    dims: int = 2
    window: int = 128

    paper: ClassVar[Paper] = Paper(
        "S046",
        "MILLION: Mastering Long-Context LLM Inference Via Outlier-Immunized KV Product Quantization",
        "https://github.com/ZongwuWang/MILLION",
        "2.09x end-to-end decoding speed at 32K with 4 bits a number",
    )
    identity: ClassVar[float] = 0.25
    shaping: ClassVar[tuple[str, ...]] = ("dims",)
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial("million", beats=("open_tq_metal(group=64)",), claim="4 bits a number lose less than 4 uniform bits by token."),
        Trial("million(dims=2)", beats=("million(dims=4)",), claim="The gap widens at 2 bits."),
    )

    def needs(self) -> Needs:
        return Needs(recent=self.window, keys="rotated", calibrated=("keys", "values"))

    def check(self, shape: Shape) -> list[str]:
        reasons = [] if self.window >= 0 else [f"window={self.window} must not be negative."]
        if self.dims < 1 or shape.head_dim % self.dims:
            reasons.append(f"dims={self.dims} must divide the model's head_dim of {shape.head_dim}.")
        return reasons

    def fit(self, samples: Samples) -> dict[str, Tensor]:
        """For each layer the books of keys and of values, fp32 [M, dims, 256]."""
        books = {}
        for layer in samples.layers:
            for name, x in (("k", samples.keys(layer)), ("v", samples.values(layer))):
                rng = torch.Generator().manual_seed(samples.seed)
                x = x.flatten(0, 1)
                x = x[torch.randperm(len(x), generator=rng)[:ROWS]]
                books[f"{layer}.{name}"] = kmeans(self._pieces(x), CODES, rng).transpose(1, 2).contiguous()
        return books

    def fields(self, shape: Shape, page: int, layers: int) -> dict[str, Field]:
        codes = Field((shape.head_dim // self.dims, page), torch.uint8)
        return {"k": codes, "v": codes}

    def write(self, store: Store, pages: Tensor, fill: Tensor, k: Tensor, v: Tensor, span: Span) -> None:
        for name, x in (("k", k.transpose(1, 2)), ("v", v)):
            book = store.fitted(self).of(span.layer, name).to(x.device)
            flat = x.reshape(-1, x.shape[-1])
            codes = nearest_codes(self._pieces(flat), book)  # [M, S * W]
            store[name][pages] = codes.view(len(codes), len(pages), -1).transpose(0, 1)

    def read(self, store: Store, pages: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        fit = store.fitted(self)
        k, v = (looked_up(store[name][pages], fit.of(span.layer, name).to(store[name].device)) for name in ("k", "v"))
        return k.transpose(1, 2).contiguous(), v.contiguous()

    def attend(self, q: Tensor, store: Store, rows: Rows, reach: Reach, span: Span, shape: Shape) -> tuple[Tensor, Tensor] | None:
        if not few(reach):
            return None
        books = (store.fitted(self).of(span.layer, name) for name in ("k", "v"))
        at = (rows.table, rows.length, reach.spans, reach.lo, reach.hi, shape.scale)
        out, lse = attend_books(q, store["k"], store["v"], *books, *at, softcap=shape.softcap)
        return out, lse

    def cost(self, shape: Shape) -> Cost:
        return Cost(device=2 * shape.head_dim / self.dims, moved=2 * shape.head_dim / self.dims)

    def _pieces(self, x: Tensor) -> Tensor:
        """[M, n, dims] of vectors [n, D]."""
        return x.reshape(len(x), -1, self.dims).transpose(0, 1)
