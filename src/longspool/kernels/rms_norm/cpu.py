"""Root-mean-square norm on the CPU in two sweeps over a row that stays in the cache."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from ..threads import chunks, njit, pnjit, use_threads

SMALL = 1 << 15  # values that one thread norms sooner than two can be woken


def can(x: Tensor, gain: Tensor, floor: float) -> str | None:
    return None if x.dtype == gain.dtype == torch.float32 else f"{x.dtype} has no kernel, only float32"


def run(x: Tensor, gain: Tensor, floor: float) -> Tensor:
    out = torch.empty(x.shape)
    if x.numel() <= SMALL:
        norm(x.numpy(), gain.numpy(), floor, out.numpy(), 0, x.shape[0])
    else:
        norm_apart(x.numpy(), gain.numpy(), floor, out.numpy(), chunks())
    return out


@njit
def norm(x, gain, floor, out, first, end):  # type: ignore[no-untyped-def]
    """Rows first to end."""
    width = x.shape[1]
    for n in range(first, end):
        a, b, c, d = floor * floor, 0.0, 0.0, 0.0  # four sums, since one would wait for itself
        for i in range(0, width - 3, 4):
            a += np.float64(x[n, i]) ** 2
            b += np.float64(x[n, i + 1]) ** 2
            c += np.float64(x[n, i + 2]) ** 2
            d += np.float64(x[n, i + 3]) ** 2
        for i in range(width - width % 4, width):
            a += np.float64(x[n, i]) ** 2
        share = np.float32(1 / np.sqrt(a + b + c + d))
        for i in range(width):
            out[n, i] = x[n, i] * share * gain[i]


@pnjit
def norm_apart(x, gain, floor, out, pieces):  # type: ignore[no-untyped-def]
    use_threads(pieces)
    for c in prange(pieces):
        norm(x, gain, floor, out, x.shape[0] * c // pieces, x.shape[0] * (c + 1) // pieces)
