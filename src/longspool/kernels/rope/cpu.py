"""Rotary positions on the CPU: one pass over the heads, on one thread where waking a second would cost more."""

from __future__ import annotations

import torch
from numba import prange
from torch import Tensor

from ..threads import chunks, njit, pnjit, use_threads

SMALL = 1 << 15  # values that one thread turns sooner than two can be woken


def can(x: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    return None if x.dtype == cos.dtype == sin.dtype == torch.float32 else f"{x.dtype} has no kernel, only float32"


def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    if x.numel() <= SMALL:
        turn(x.numpy(), cos.numpy(), sin.numpy(), out.numpy(), 0, x.shape[0])
    else:
        turn_apart(x.numpy(), cos.numpy(), sin.numpy(), out.numpy(), chunks())
    return out


@njit
def turn(x, cos, sin, out, first, end):  # type: ignore[no-untyped-def]
    """Tokens first to end."""
    half, dim = cos.shape[1], x.shape[2]
    for n in range(first, end):
        for h in range(x.shape[1]):
            for i in range(half):
                a, b, c, s = x[n, h, i], x[n, h, half + i], cos[n, i], sin[n, i]
                out[n, h, i] = a * c - b * s
                out[n, h, half + i] = b * c + a * s
            for i in range(2 * half, dim):
                out[n, h, i] = x[n, h, i]


@pnjit
def turn_apart(x, cos, sin, out, pieces):  # type: ignore[no-untyped-def]
    use_threads(pieces)
    for c in prange(pieces):
        turn(x, cos, sin, out, x.shape[0] * c // pieces, x.shape[0] * (c + 1) // pieces)
