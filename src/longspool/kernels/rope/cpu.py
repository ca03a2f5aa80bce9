"""Rotary positions on the CPU, in one pass over the heads."""

from __future__ import annotations

import torch
from numba import prange
from torch import Tensor

from ..simd_matmul import floats
from ..threads import chunks, helper, njit, pnjit, use_threads

# Fewer numbers than this are turned before a second thread is awake.
WORTH_THREADS = 1 << 15


def can(x: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    if not x.dtype == cos.dtype == sin.dtype == torch.float32:
        return f"the numbers are {x.dtype}, {cos.dtype} and {sin.dtype}, not float32"
    if x.numel() and x.stride(2) != 1:
        return "the numbers of a head are not neighbours"
    return None


def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n, heads, dim = x.shape
    out = torch.empty(n, heads, dim)
    if x.numel():
        if not (cos.is_contiguous() and sin.is_contiguous()):
            cos, sin = cos.contiguous(), sin.contiguous()
        a, b, _ = x.stride()
        r = cos.shape[1]
        turn = few if n * heads * dim < WORTH_THREADS else many
        turn(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), n, heads, dim, r, a, b, chunks())
    return out


@helper
def tokens(x, cos, sin, out, heads, dim, r, a, b, lo, hi):  # type: ignore[no-untyped-def]
    """Tokens lo to hi; a and b are the strides of x from token to token and from head to head. out may be x."""
    for n in range(lo, hi):
        c, s = floats(cos + 4 * n * r), floats(sin + 4 * n * r)
        for h in range(heads):
            from_, to = floats(x + 4 * (n * a + h * b)), floats(out + 4 * (n * heads + h) * dim)
            for i in range(r):
                u, v = from_[i], from_[r + i]
                to[i] = u * c[i] - v * s[i]
                to[r + i] = v * c[i] + u * s[i]
            for i in range(2 * r, dim):
                to[i] = from_[i]


@njit
def few(x, cos, sin, out, n, heads, dim, r, a, b, pieces):  # type: ignore[no-untyped-def]
    tokens(x, cos, sin, out, heads, dim, r, a, b, 0, n)


@pnjit
def many(x, cos, sin, out, n, heads, dim, r, a, b, pieces):  # type: ignore[no-untyped-def]
    use_threads(pieces)
    for c in prange(pieces):
        tokens(x, cos, sin, out, heads, dim, r, a, b, n * c // pieces, n * (c + 1) // pieces)
