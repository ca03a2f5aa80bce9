"""What codecs share: integer codes of pages (keys per channel, values per token), when codes are attended, and vectors by k-means."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels import attend_codes, nearest_codes
from ...kernels.codes import decode_k, decode_v, encode_k, encode_v
from ...method import Cost, Method, Needs
from ...roles import Encode, Field, Reach, Store
from ...values import Rows, Shape, Span

FEW = 8  # tokens of a request for which attending codes one query at a time costs less than decoding their pages
ROUNDS = 10  # of k-means


def few(reach: Reach) -> bool:
    """Whether a step's queries are few, as in decoding and in verifying."""
    return max(b - a for a, b in pairwise(reach.spans)) <= FEW


def kmeans(x: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """The `count` means [B, count, d] of each of B sets of vectors x [B, n, d]."""
    return torch.stack([_means(part, count, rng) for part in x])


def _means(x: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Lloyd's rounds from a random choice of the vectors. A mean that loses all of its own takes one of those farthest from theirs."""
    distinct: Tensor = torch.unique(x, dim=0)
    means = distinct[torch.randperm(len(distinct), generator=rng)[:count]]
    if len(distinct) <= count:
        return means[torch.arange(count).clamp_max(len(means) - 1)]
    for _ in range(ROUNDS):
        code = nearest_codes(x[None], means.T[None].contiguous())[0].long()
        sizes = torch.bincount(code, minlength=count)[:, None]
        sums = torch.zeros_like(means).index_add_(0, code, x)
        means = torch.where(sizes > 0, sums / sizes.clamp_min(1), means)
        if len(lost := (sizes[:, 0] == 0).nonzero()[:, 0]):
            means[lost] = x[(x - means[code]).square().sum(1).topk(len(lost)).indices]
    return means


@dataclass(frozen=True)
class Codes(Method, Encode):
    """Integer codes of `bits`; the newest `window` tokens stay raw."""

    window: int = 64

    bits: ClassVar[int]
    unit: ClassVar[int] = 16

    def needs(self) -> Needs:
        return Needs(recent=self.window)

    def check(self, shape: Shape) -> list[str]:
        return [] if self.window >= 0 else [f"window={self.window} must not be negative."]

    def cost(self, shape: Shape) -> Cost:
        return Cost(device=2 * shape.head_dim * self.bits / 8, moved=2 * shape.head_dim * self.bits / 8)

    def fields(self, shape: Shape, page: int, layers: int) -> dict[str, Field]:
        dim, packed = shape.head_dim, 8 // self.bits
        code = torch.int8 if self.bits == 8 else torch.uint8
        fields = {
            "k": Field((dim, page // packed), code, tokens=1),
            "v": Field((page, dim // packed), code, tokens=0),
            "k_scale": Field((dim,), torch.float16),
            "v_scale": Field((page,), torch.float16, tokens=0),
        }
        if self.bits == 4:
            fields |= {"k_zero": Field((dim,), torch.float16), "v_zero": Field((page,), torch.float16, tokens=0)}
        return fields

    def write(self, store: Store, pages: Tensor, fill: Tensor, k: Tensor, v: Tensor, span: Span) -> None:
        for name, encoded in (("k", encode_k(k, self.bits, fill)), ("v", encode_v(v, self.bits, fill))):
            for part, value in zip((name, f"{name}_scale", f"{name}_zero"), encoded, strict=True):
                if value is not None:
                    store[part][pages] = value

    def read(self, store: Store, pages: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        k_zero, v_zero = (store[n][pages] if self.bits == 4 else None for n in ("k_zero", "v_zero"))
        k = decode_k(store["k"][pages], store["k_scale"][pages], k_zero, self.bits)
        return k, decode_v(store["v"][pages], store["v_scale"][pages], v_zero, self.bits)

    def attend(self, q: Tensor, store: Store, rows: Rows, reach: Reach, span: Span, shape: Shape) -> tuple[Tensor, Tensor]:
        k_zero, v_zero = (store[n] if self.bits == 4 else None for n in ("k_zero", "v_zero"))
        codes = (store["k"], store["v"], store["k_scale"], k_zero, store["v_scale"], v_zero)
        out, lse = attend_codes(
            q, *codes, self.bits, rows.table, rows.length, reach.spans, reach.lo, reach.hi, shape.scale, softcap=shape.softcap
        )
        return out, lse
