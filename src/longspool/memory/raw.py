"""The codec that stores keys and values as they are. K pages are [D, W] and V pages [W, D], so both inner loops vectorise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels import attend_rows
from ..roles import Encode, Field, Reach, Store
from ..values import Rows, Shape, Span

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Raw(Encode):
    """Keys and values in one of fp32, fp16 and bf16."""

    dtype: torch.dtype = torch.float16
    unit: ClassVar[int] = 1

    def fields(self, shape: Shape, page: int, layers: int) -> dict[str, Field]:
        return {"k": Field((shape.head_dim, page), self.dtype, tokens=1), "v": Field((page, shape.head_dim), self.dtype, tokens=0)}

    def write(self, store: Store, pages: Tensor, fill: Tensor, k: Tensor, v: Tensor, span: Span) -> None:
        store["k"][pages] = k.to(self.dtype)
        store["v"][pages] = v.to(self.dtype)

    def read(self, store: Store, pages: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        return store["k"][pages].float(), store["v"][pages].float()

    def plain(self, store: Store) -> tuple[Tensor, Tensor]:
        return store["k"], store["v"]

    def attend(self, q: Tensor, store: Store, rows: Rows, reach: Reach, span: Span, shape: Shape) -> tuple[Tensor, Tensor]:
        return attend_rows(
            q, store["k"], store["v"], rows.table, rows.length, reach.spans, reach.lo, reach.hi, shape.scale, softcap=shape.softcap
        )
