"""headmean: the heads of a layer as their mean and what each of them differs from it. A toy that stores all heads in the same pages.

The differences are shrunk by `keep`. What is stored is less c, the mean of all numbers of the first pages, which is learnt; at keep=1
nothing is lost but the rounding of sums:  x_h = c + m + keep * (x_h - c - m),  m = mean_h (x_h - c).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from longspool.method import Method, Needs, Paper
from longspool.roles import Encode, Field, Store
from longspool.values import Shape, Span


@dataclass(frozen=True)
class HeadMean(Method, Encode):
    keep: float = 0.5
    window: int = 64
    bare: bool = False

    paper: ClassVar[Paper] = Paper("", "A toy", "none")
    identity: ClassVar[dict[str, object]] = {"keep": 1.0}
    joins: ClassVar[bool] = True
    packs: ClassVar[bool] = True

    def needs(self) -> Needs:
        return Needs(recent=self.window, keys="bare" if self.bare else None)

    def fields(self, shape: Shape, page: int, layers: int) -> dict[str, Field]:
        one = Field((page, shape.head_dim), torch.float32)
        each = Field((page, shape.kv_heads, shape.head_dim), torch.float32)
        return {"k_mean": one, "v_mean": one, "k_more": each, "v_more": each}

    def learns(self, shape: Shape, layers: int) -> dict[str, Field]:
        return {"k": Field((), torch.float32), "v": Field((), torch.float32)}

    def learn(self, k: list[Tensor], v: list[Tensor], span: Span) -> dict[str, Tensor]:
        return {name: torch.stack([x.mean() for x in rows]) for name, rows in (("k", k), ("v", v))}

    def write(self, store: Store, pages: Tensor, fill: Tensor, k: Tensor, v: Tensor, span: Span) -> None:
        for name, x in (("k", k.transpose(1, 2)), ("v", v)):
            middle = store.learnt(name, pages).to(x)[:, None, None, None]
            each = x.unflatten(2, (-1, store[f"{name}_mean"].shape[2])) - middle
            mean = each.mean(2)
            store[f"{name}_mean"][pages] = mean
            store[f"{name}_more"][pages] = (each - mean[:, :, None]) * self.keep

    def read(self, store: Store, pages: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        k, v = (
            store.learnt(n, pages)[:, None, None, None] + store[f"{n}_mean"][pages][:, :, None] + store[f"{n}_more"][pages]
            for n in ("k", "v")
        )
        return k.flatten(2).transpose(1, 2).contiguous(), v.flatten(2)
