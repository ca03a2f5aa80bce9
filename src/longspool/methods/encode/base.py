"""What the page codecs share: keys per channel of a page, values per token, attended without decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels import attend_codes
from ...kernels.codes import decode_k, decode_v, encode_k, encode_v
from ...method import Cost, Method, Needs
from ...roles import Encode, Field, Reach, Store
from ...values import Rows, Shape, Span


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
