"""layermean: neighbouring layers as their mean and what each of them differs from it. A toy that stores several layers in the same pages.

The differences are shrunk by `keep`, a smooth loss that any other runner can compute to the last digits: at 1 nothing is lost but the
rounding of a sum, at 0 all layers are their mean:  x_l = m + keep * (x_l - m),  m = mean_l x_l.
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
class LayerMean(Method, Encode):
    layers: int = 2
    keep: float = 0.5
    window: int = 64
    bare: bool = False

    paper: ClassVar[Paper] = Paper("", "A toy", "none")
    identity: ClassVar[dict[str, object]] = {"keep": 1.0}

    def needs(self) -> Needs:
        return Needs(recent=self.window, keys="bare" if self.bare else None)

    def across(self) -> int:
        return self.layers

    def fields(self, shape: Shape, page: int, layers: int) -> dict[str, Field]:
        k, v = (shape.head_dim, page), (page, shape.head_dim)
        return {f"{n}_mean": Field(s, torch.float32) for n, s in (("k", k), ("v", v))} | {
            f"{n}_more": Field((layers, *s), torch.float32) for n, s in (("k", k), ("v", v))
        }

    def write(self, store: Store, pages: Tensor, fill: Tensor, k: Tensor, v: Tensor, span: Span) -> None:
        for name, x, dim in (("k", k, 1), ("v", v, 2)):
            each = torch.stack(x.chunk(len(span.layers), dim), 1)
            mean = each.mean(1)
            store[f"{name}_mean"][pages] = mean
            store[f"{name}_more"][pages] = (each - mean[:, None]) * self.keep

    def read(self, store: Store, pages: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        k, v = (store[f"{n}_mean"][pages] + store[f"{n}_more"][pages, span.index] for n in ("k", "v"))
        return k, v
