"""Root-mean-square norm on the CPU in two sweeps over a row that stays in the cache."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from ..simd_matmul import floats
from ..threads import chunks, helper, njit, pnjit, use_threads

SMALL = 1 << 15  # values that one thread norms sooner than two can be woken


def can(x: Tensor, gain: Tensor, floor: float) -> str | None:
    return None if x.dtype == gain.dtype == torch.float32 else f"{x.dtype} has no kernel, only float32"


def run(x: Tensor, gain: Tensor, floor: float) -> Tensor:
    x, gain = x.contiguous(), gain.contiguous()
    out = torch.empty(x.shape)
    norm = few if x.numel() <= SMALL else many
    norm(x.data_ptr(), gain.data_ptr(), floor, out.data_ptr(), *x.shape, chunks())
    return out


@helper
def norm_row(x, gain, floor, out, width):  # type: ignore[no-untyped-def]
    """One row by addresses; out may be x."""
    x, gain, out = floats(x), floats(gain), floats(out)
    a, b, c, d = floor * floor, 0.0, 0.0, 0.0  # four sums, since one would wait for itself
    for i in range(0, width - 3, 4):
        a += np.float64(x[i]) ** 2
        b += np.float64(x[i + 1]) ** 2
        c += np.float64(x[i + 2]) ** 2
        d += np.float64(x[i + 3]) ** 2
    for i in range(width - width % 4, width):
        a += np.float64(x[i]) ** 2
    share = np.float32(1 / np.sqrt(a + b + c + d))
    for i in range(width):
        out[i] = x[i] * share * gain[i]


@njit
def few(x, gain, floor, out, rows, width, pieces):  # type: ignore[no-untyped-def]
    for n in range(rows):
        norm_row(x + 4 * n * width, gain, floor, out + 4 * n * width, width)


@pnjit
def many(x, gain, floor, out, rows, width, pieces):  # type: ignore[no-untyped-def]
    use_threads(pieces)
    for c in prange(pieces):
        for n in range(rows * c // pieces, rows * (c + 1) // pieces):
            norm_row(x + 4 * n * width, gain, floor, out + 4 * n * width, width)
