"""matmul on the GPU: the packed matrix is read once for a tile of tokens; narrow products split their columns among programs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...values import Packed
from ..triton_packed import layout, multiply, tensors
from ..triton_tiles import cores, unreachable


def can(x: Tensor, w: Packed) -> str | None:
    return unreachable(x)


@triton.jit
def kernel(
    x, codes, scale, low, y, tokens, rows, cols, BITS: tl.constexpr, OFFSET: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    split, n, m = tl.program_id(2), tl.program_id(1) * N + tl.arange(0, N), tl.program_id(0) * M + tl.arange(0, M)
    real, live, groups = n < tokens, m < rows, (cols + 31) // 32
    each = (groups + SPLITS - 1) // SPLITS
    acc = multiply(x, codes, scale, low, n, m, real, live, split * each, tl.minimum(split * each + each, groups), cols, BITS, OFFSET, N, M)
    at = (split * tokens + n).to(tl.int64)[:, None] * rows + m[None, :]
    tl.store(y + at, acc, mask=real[:, None] & live[None, :])


def run(x: Tensor, w: Packed) -> Tensor:
    if w.kind == "f32":
        return x @ w.codes.T
    tokens, form = x.shape[0], layout(w)
    n, m, warps = (1, 64, 4) if tokens == 1 else (16, 64, 4) if tokens <= 16 else (64, 128, 8)
    tiles = triton.cdiv(w.rows, m), triton.cdiv(tokens, n)
    # Two rounds over the device, and at least eight groups of columns to a program.
    splits = max(1, min(2 * cores(x.device) // max(tiles[0] * tiles[1], 1), w.cols // 256))
    y = x.new_empty(splits, tokens, w.rows)
    kernel[(*tiles, splits)](
        x.contiguous(), *tensors(w), y, tokens, w.rows, w.cols,
        BITS=form.bits, OFFSET=form.middle, N=n, M=m, SPLITS=splits, num_warps=warps,
    )  # fmt: skip
    return y[0] if splits == 1 else y.sum(0)
