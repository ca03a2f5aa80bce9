"""matmul on the GPU: codes are multiplied as exact fp16 numbers, group after group of 32 columns, and scaled in fp32 after that.

One token is multiplied without tensor cores, which would compute fifteen more; more tokens stand in a tile. Narrow products split
their columns among programs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...values import Packed
from ..triton_packed import column, group_codes, group_number, layout, tensors
from ..triton_tiles import cores, levelled, product, unreachable


def can(x: Tensor, w: Packed) -> str | None:
    return unreachable(x)


@triton.jit
def groups(cols, SPLITS: tl.constexpr):
    """The first and past-the-last group of columns of this program."""
    count = (cols + 31) // 32
    each = (count + SPLITS - 1) // SPLITS
    first = tl.program_id(2) * each
    return first, tl.minimum(first + each, count)


@triton.jit
def one(
    x, codes, scale, low, y, tokens, rows, cols, BITS: tl.constexpr, OFFSET: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    m, i = tl.program_id(0) * M + tl.arange(0, M), column(tl.arange(0, 32), BITS)
    live, acc, flat = m < rows, tl.zeros((32, M), tl.float32), tl.zeros((M,), tl.float32)
    begin, end = groups(cols, SPLITS)
    for group in range(begin, end):
        k = group * 32 + i
        a = tl.load(x + k, mask=k < cols, other=0.0)
        part = a[:, None] * group_codes(codes, group, m, live, cols, BITS, OFFSET).to(tl.float32)
        if scale is not None:
            part *= group_number(scale, group, m, live, cols)[None, :]
        acc += part
        if low is not None:
            flat += tl.sum(a) * group_number(low, group, m, live, cols)
    tl.store(y + tl.program_id(2) * rows + m, tl.sum(acc, 0) + flat, mask=live)


@triton.jit
def many(
    x, codes, scale, low, y, tokens, rows, cols, BITS: tl.constexpr, OFFSET: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    n, m = tl.program_id(1) * N + tl.arange(0, N), tl.program_id(0) * M + tl.arange(0, M)
    real, live, i = n < tokens, m < rows, column(tl.arange(0, 32), BITS)
    acc, at = tl.zeros((N, M), tl.float32), n.to(tl.int64)[:, None] * cols
    begin, end = groups(cols, SPLITS)
    for group in range(begin, end):
        k = group * 32 + i
        a = tl.load(x + at + k[None, :], mask=real[:, None] & (k < cols)[None, :], other=0.0)
        level, undo = levelled(a, 1.0)
        part = product(level, group_codes(codes, group, m, live, cols, BITS, OFFSET)) * undo[:, None]
        if scale is not None:
            part *= group_number(scale, group, m, live, cols)[None, :]
        if low is not None:
            part += tl.sum(a, 1)[:, None] * group_number(low, group, m, live, cols)[None, :]
        acc += part
    goal = (tl.program_id(2) * tokens + n).to(tl.int64)[:, None] * rows + m[None, :]
    tl.store(y + goal, acc, mask=real[:, None] & live[None, :])


def run(x: Tensor, w: Packed) -> Tensor:
    if w.kind == "f32":
        return x @ w.codes.T
    tokens, form = x.shape[0], layout(w)
    kernel, n, m, warps = (one, 1, 64, 4) if tokens == 1 else (many, 16, 64, 4) if tokens <= 16 else (many, 64, 128, 8)
    tiles = triton.cdiv(w.rows, m), triton.cdiv(tokens, n)
    # Two rounds over the device, and at least eight groups of columns to a program.
    splits = max(1, min(2 * cores(x.device) // max(tiles[0] * tiles[1], 1), w.cols // 256))
    y = x.new_empty(splits, tokens, w.rows)
    kernel[(*tiles, splits)](
        x.contiguous(), *tensors(w), y, tokens, w.rows, w.cols,
        BITS=form.bits, OFFSET=form.offset, N=n, M=m, SPLITS=splits, num_warps=warps,
    )  # fmt: skip
    return y[0] if splits == 1 else y.sum(0)
