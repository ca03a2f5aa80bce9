"""unpack on the GPU: a program per group of columns and some rows. A code times its scale is exact in fp32, so nothing can differ."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...values import Packed
from ..triton_packed import column, group_codes, group_number, layout, tensors
from ..triton_tiles import unreachable


def can(w: Packed) -> str | None:
    return unreachable(w.codes)


@triton.jit
def kernel(
    codes, scale, low, y, rows, cols,
    BITS: tl.constexpr, OFFSET: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    group, m = tl.program_id(1), tl.program_id(0) * M + tl.arange(0, M)
    live, k = m < rows, group * 32 + column(tl.arange(0, 32), BITS)
    x = group_codes(codes, group, m, live, cols, BITS, OFFSET).to(tl.float32)
    if scale is not None:
        x *= group_number(scale, group, m, live, cols)[None, :]
    if low is not None:
        x += group_number(low, group, m, live, cols)[None, :]
    tl.store(y + m.to(tl.int64)[None, :] * cols + k[:, None], x, mask=live[None, :] & (k < cols)[:, None])


def run(w: Packed) -> Tensor:
    if w.kind == "f32":
        return w.codes
    y, form = torch.empty(w.rows, w.cols, device=w.device), layout(w)
    kernel[(triton.cdiv(w.rows, 64), triton.cdiv(w.cols, 32))](*tensors(w), y, w.rows, w.cols, BITS=form.bits, OFFSET=form.offset, M=64)
    return y
