"""rope on the GPU: a program per few heads of few tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..triton_tiles import unreachable


def can(x: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    return unreachable(x)


@triton.jit
def kernel(x, cos, sin, y, count, heads, dim, half, by_token, by_head, T: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr):
    at, i = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T), tl.arange(0, HALF)
    n, head, live = at // heads, at % heads, at < count
    there, angle = live[:, None] & (i < half)[None, :], n[:, None] * half + i[None, :]
    c, s = tl.load(cos + angle, mask=there), tl.load(sin + angle, mask=there)
    source, goal = (x + n * by_token + head * by_head)[:, None], (y + at * dim)[:, None]
    a, b = tl.load(source + i[None, :], mask=there), tl.load(source + half + i[None, :], mask=there)
    tl.store(goal + i[None, :], a * c - b * s, mask=there)
    tl.store(goal + half + i[None, :], b * c + a * s, mask=there)
    if REST:
        j = 2 * half + tl.arange(0, REST)
        there = live[:, None] & (j < dim)[None, :]
        tl.store(goal + j[None, :], tl.load(source + j[None, :], mask=there), mask=there)


def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (n, heads, dim), half = x.shape, cos.shape[-1]
    x = x if x.stride(2) == 1 else x.contiguous()
    y, t = x.new_empty(x.shape), min(triton.next_power_of_2(n * heads), 32) if n else 1
    kernel[(triton.cdiv(n * heads, t),)](
        x, cos.contiguous(), sin.contiguous(), y, n * heads, heads, dim, half, x.stride(0), x.stride(1),
        T=t, HALF=triton.next_power_of_2(half), REST=triton.next_power_of_2(dim - 2 * half) if dim > 2 * half else 0,
    )  # fmt: skip
    return y
