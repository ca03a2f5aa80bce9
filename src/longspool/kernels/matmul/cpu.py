"""The product on the CPU, on the packed codes for any number of tokens: no unpacked matrix is ever in memory.

Tokens go in tiles of up to six, panels of rows to the threads. Decoding a weight costs instructions on ports that the tile's
multiply-adds leave idle, so that six tokens already run near the multiply-add limit and unpacking first would gain nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from ...values import Packed
from ..room import room
from ..simd_matmul import BITS, call, floats, panel_address
from ..threads import chunks, helper, pnjit, use_threads

TILE = 6
# Activations of one sweep over the matrix, in floats: they are read again for every panel and must stay in the cache.
SWEEP = 1 << 19


def can(x: Tensor, w: Packed) -> str | None:
    if x.dtype != torch.float32:
        return f"activations are {x.dtype}, not float32"
    if not w.address[0] and w.codes.numel():
        return f"the matrix is on {w.device}"
    return None


def run(x: Tensor, w: Packed) -> Tensor:
    tokens, cols = x.shape
    if w.kind == "f32":
        return torch.mm(x, w.codes.T)
    out = torch.empty(tokens, w.rows)
    if 0 in (tokens, cols, w.rows):
        return out.zero_()
    if not x.is_contiguous():
        x = x.contiguous()
    source, sink, panel, bits = x.data_ptr(), out.data_ptr(), panel_address(w.kind), BITS[w.kind]
    step = max(TILE, SWEEP // cols // TILE * TILE)
    space, _held = room(4 * scratch(min(step, tokens), cols))
    for lo in range(0, tokens, step):
        n = min(step, tokens - lo)
        kernel(source + 4 * lo * cols, sink + 4 * lo * w.rows, space, n, cols, w.rows, panel, bits, *w.address, chunks())
    return out


def scratch(tokens: int, cols: int) -> int:
    """Floats that a product needs besides: the turned activations [N, K] and their groups' sums behind them."""
    return tokens * (cols + cols // 32)


@helper
def tile(tokens, tiles, i):  # type: ignore[no-untyped-def]
    """First token of tile i; tiles differ by at most one token."""
    return tokens * i // tiles


@helper
def turn8(x, n, cols, xt, sums):  # type: ignore[no-untyped-def]
    """n tokens x [n, cols] to xt [cols, n], and each group's sum to sums [G, n]."""
    for c in range(cols):
        for t in range(n):
            xt[c * n + t] = x[t * cols + c]
    for g in range(cols // 32):
        for t in range(n):
            total = np.float32(0)
            for c in range(32):
                total += x[t * cols + 32 * g + c]
            sums[g * n + t] = total


@helper
def turn4(x, n, cols, xt, sums):  # type: ignore[no-untyped-def]
    """The same with the columns in the order of the 4-bit codes, divided by the power of 16 that the code comes with."""
    for g in range(cols // 32):
        for t in range(n):
            total = np.float32(0)
            for word in range(4):
                unit = np.float32(1)
                for i in range(8):
                    value = x[t * cols + 32 * g + 16 * (i & 1) + 4 * word + (i >> 1)]
                    total += value
                    xt[(32 * g + 8 * word + i) * n + t] = value if i == 7 else value * unit
                    unit *= np.float32(0.0625)
            sums[g * n + t] = total


@helper
def prepare(x, space, tokens, cols, bits, lo, hi):  # type: ignore[no-untyped-def]
    """Tiles lo to hi of the activations, turned."""
    sums = space + 4 * tokens * cols
    tiles, groups = (tokens + 5) // 6, cols // 32
    for i in range(lo, hi):
        a = tile(tokens, tiles, i)
        n = tile(tokens, tiles, i + 1) - a
        from_, to, totals = floats(x + 4 * a * cols), floats(space + 4 * a * cols), floats(sums + 4 * a * groups)
        if bits == 4:
            turn4(from_, n, cols, to, totals)
        else:
            turn8(from_, n, cols, to, totals)


@helper
def sweep(out, stride, space, tokens, cols, rows, panel, bits, codes, scale, low, lo, hi):  # type: ignore[no-untyped-def]
    """Panels lo to hi for all tokens, tile by tile; `stride` floats from token to token of out."""
    sums = space + 4 * tokens * cols
    tiles, groups = (tokens + 5) // 6, cols // 32
    count, code_bytes, scale_bytes = (groups, 128 * bits, 64) if bits < 16 else (cols, 64, 0)
    acc, into = np.empty((6, 32), np.float32), floats(out)
    for p in range(lo, hi):
        at, group = codes + p * count * code_bytes, p * count * scale_bytes
        top = min(32, rows - 32 * p)
        for i in range(tiles):
            a = tile(tokens, tiles, i)
            n = tile(tokens, tiles, i + 1) - a
            call(panel, n, bits, at, scale + group, low + group, space + 4 * a * cols, sums + 4 * a * groups, count, acc.ctypes.data)
            for t in range(n):
                for r in range(top):
                    into[(a + t) * stride + 32 * p + r] = acc[t, r]


@pnjit
def kernel(x, out, space, tokens, cols, rows, panel, bits, codes, scale, low, pieces):  # type: ignore[no-untyped-def]
    """x [N, K] times the matrix to out [N, M], everything by address."""
    use_threads(pieces)
    panels, tiles = (rows + 31) // 32, (tokens + 5) // 6
    if tiles == 1:
        prepare(x, space, tokens, cols, bits, 0, 1)
    else:
        for c in prange(pieces):
            prepare(x, space, tokens, cols, bits, tiles * c // pieces, tiles * (c + 1) // pieces)
    for c in prange(pieces):
        lo, hi = panels * c // pieces, panels * (c + 1) // pieces
        sweep(out, rows, space, tokens, cols, rows, panel, bits, codes, scale, low, lo, hi)
