"""The exact merge of attention over parts on the CPU, in one pass."""

from __future__ import annotations

import math
from array import array

import numpy as np
import torch
from numba import prange
from torch import Tensor

from ..record import run as call
from ..simd_matmul import floats, longs
from ..threads import chunks, njit, pnjit, use_threads

WORTH_THREADS = 1 << 15


def can(outs: list[Tensor], lses: list[Tensor]) -> str | None:
    for t in (*outs, *lses):
        if t.dtype != torch.float32:
            return f"a part is {t.dtype}, not float32"
        if t.is_cuda:
            return "a part is on the GPU"
    return None


def run(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    n, heads, dim = outs[0].shape
    out, lse = torch.empty(n, heads, dim), torch.empty(n, heads)
    if n * heads:
        held = [t.contiguous() for t in (*outs, *lses)]
        parts = array("q", [t.data_ptr() for t in held])
        merge = few if n * heads * dim * len(outs) < WORTH_THREADS else many
        call(merge, (parts.buffer_info()[0], len(outs), out.data_ptr(), lse.data_ptr(), n * heads, dim, chunks()), parts, held)
    return out, lse


@njit
def queries(at, count, out, lse, dim, lo, hi):  # type: ignore[no-untyped-def]
    """Queries lo to hi of the parts at int64 [2 * count]: the addresses of the outputs, then of their log-sums."""
    parts = longs(at)
    weight, total_lse = np.empty(count, np.float32), floats(lse)
    for q in range(lo, hi):
        top = np.float32(-np.inf)
        for p in range(count):
            top = max(top, floats(parts[count + p])[q])
        to = floats(out + 4 * q * dim)
        for i in range(dim):
            to[i] = np.float32(0)
        total_lse[q] = top
        if top == -np.inf:
            continue
        total = np.float32(0)
        for p in range(count):
            weight[p] = math.exp(floats(parts[count + p])[q] - top)
            total += weight[p]
        total_lse[q] = top + math.log(total)
        for p in range(count):
            share = weight[p] / total
            if share > 0:  # what a part that saw nothing holds may be NaN
                part = floats(parts[p] + 4 * q * dim)
                for i in range(dim):
                    to[i] += share * part[i]


@njit
def few(parts, of, out, lse, count, dim, pieces):  # type: ignore[no-untyped-def]
    queries(parts, of, out, lse, dim, 0, count)


@pnjit
def many(parts, of, out, lse, count, dim, pieces):  # type: ignore[no-untyped-def]
    use_threads(pieces)
    for c in prange(pieces):
        queries(parts, of, out, lse, dim, count * c // pieces, count * (c + 1) // pieces)
