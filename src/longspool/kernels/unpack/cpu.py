"""A packed matrix as floats on the CPU: blocks of 8 rows by 8 columns are turned in the registers, panels go to the threads."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from ...values import Packed
from ..simd_matmul import BITS, blocks_address, call, floats
from ..threads import chunks, njit, pnjit, use_threads


def can(w: Packed) -> str | None:
    if not w.address[0] and w.codes.numel():
        return f"the matrix is on {w.device}"
    if w.cols < 8:
        return "rows shorter than 8 columns are not worth a kernel"
    return None


def run(w: Packed) -> Tensor:
    if w.kind == "f32":
        return w.codes.clone()
    out = torch.empty(w.rows, w.cols)
    if w.rows:
        kernel(*w.address, out.data_ptr(), w.rows, w.cols, blocks_address(w.kind), BITS[w.kind], chunks())
    return out


@njit
def panel(codes, scale, low, out, cols, blocks, bits):  # type: ignore[no-untyped-def]
    """32 rows, a few hundred columns at a time so that the codes stay in the cache while the strips of 8 rows pass over them."""
    if bits < 16:
        for g in range(0, cols // 32, 16):
            n = min(16, cols // 32 - g)
            call(blocks, codes + g * 128 * bits, scale + 64 * g, low + 64 * g, out + 128 * g, 4 * cols, n)
    else:
        for i in range(0, cols // 8, 64):
            call(blocks, codes + 512 * i, scale, low, out + 32 * i, 4 * cols, min(64, cols // 8 - i))
        if cols % 8:  # the last block overlaps
            call(blocks, codes + 64 * (cols - 8), scale, low, out + 4 * (cols - 8), 4 * cols, 1)


@njit
def panels(codes, scale, low, out, rows, cols, blocks, bits, lo, hi):  # type: ignore[no-untyped-def]
    code_bytes, scale_bytes = (4 * bits * cols, 2 * cols) if bits < 16 else (64 * cols, 0)
    spare = np.empty((32 if 32 * hi > rows else 0, cols), np.float32)
    into = floats(out)
    for p in range(lo, hi):
        whole = 32 * (p + 1) <= rows
        to = out + 128 * p * cols if whole else spare.ctypes.data
        panel(codes + p * code_bytes, scale + p * scale_bytes, low + p * scale_bytes, to, cols, blocks, bits)
        if not whole:
            for r in range(rows - 32 * p):
                for c in range(cols):
                    into[(32 * p + r) * cols + c] = spare[r, c]


@pnjit
def kernel(codes, scale, low, out, rows, cols, blocks, bits, pieces):  # type: ignore[no-untyped-def]
    use_threads(pieces)
    count = (rows + 31) // 32
    for c in prange(pieces):
        panels(codes, scale, low, out, rows, cols, blocks, bits, count * c // pieces, count * (c + 1) // pieces)
