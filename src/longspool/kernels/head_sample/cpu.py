"""Sampling in the head's product on the CPU: each panel of 32 logits is judged while it is in the cache.

The noise of a token can win only if its uniform u satisfies -log(u) < exp(z - best), and -log(u) >= 1 - u: a comparison of integers
that spares all but a few tokens the logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numba import prange
from torch import Tensor

from ...values import Packed
from ..matmul.cpu import prepare, scratch
from ..panels import version
from ..room import room
from ..simd import F, add, exp2, highest, larger, load, mul, splat, store, sub, tanh, total
from ..simd_matmul import BITS, call, floats, longs, panel_address
from ..threads import chunks, njit, pnjit, use_threads

# A float rounded once or twice on either side of the comparison must not spare a token that would win.
MARGIN = np.float32(1.001 * 2**32)


def can(h: Tensor, head: Packed, temperature: Tensor, seed: Tensor, offset: Tensor, cap: float = 0.0, tile: int = 8192) -> str | None:
    if head.kind == "f32":
        return "an unpacked head goes by tiles through the dense product"
    if not head.address[0]:
        return f"the head is on {head.device}"
    if h.dtype != torch.float32:
        return f"states are {h.dtype}, not float32"
    return None


def run(
    h: Tensor, head: Packed, temperature: Tensor, seed: Tensor, offset: Tensor, cap: float = 0.0, tile: int = 8192
) -> tuple[Tensor, Tensor]:
    batch, cols = h.shape
    token, logprob = torch.empty(batch, dtype=torch.int64), torch.empty(batch)
    h, temperature = h.contiguous(), temperature.float().contiguous()
    seed, offset = seed.long().contiguous(), offset.long().contiguous()
    draw = (temperature.data_ptr(), seed.data_ptr(), offset.data_ptr(), float(cap), token.data_ptr(), logprob.data_ptr())
    if batch:
        space, _held = room(4 * scratch(batch, cols))
        matrix = (head.rows, panel_address(head.kind), BITS[head.kind], *head.address)
        kernel()(h.data_ptr(), space, batch, cols, *matrix, *draw, chunks())
    return token, logprob


@njit
def draw_words(seed, offset, first, words):  # type: ignore[no-untyped-def]
    """The first of Philox4x32-10's four words for the counters (offset, first + i, 0) under the key `seed`."""
    low = np.uint64(0xFFFFFFFF)
    for i in range(32):
        a, b = np.uint64(offset) & low, np.uint64(offset) >> np.uint64(32)
        c, d = np.uint64(first + i), np.uint64(0)
        k, m = np.uint64(seed) & low, np.uint64(seed) >> np.uint64(32)
        for _ in range(10):
            p, q = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
            a, b, c, d = (q >> np.uint64(32)) ^ b ^ k, q & low, (p >> np.uint64(32)) ^ d ^ m, p & low
            k, m = (k + np.uint64(0x9E3779B9)) & low, (m + np.uint64(0xBB67AE85)) & low
        words[i] = np.uint32(a)


@njit
def bend(z, cap, warm):  # type: ignore[no-untyped-def]
    """The 32 logits at z, capped and divided by the temperature in place; returns the highest."""
    top = splat(np.float32(-np.inf))
    for i in range(0, 128, 32):
        x = load(z + i, F)
        if cap > 0:
            x = mul(tanh(mul(x, splat(np.float32(1) / cap))), splat(cap))
        x = mul(x, splat(np.float32(1) / warm))
        store(z + i, x, F)
        top = larger(x, top)
    return highest(top)


@njit
def shared(z, top, share):  # type: ignore[no-untyped-def]
    """exp(z - top) of 32 logits to `share`; returns the sum."""
    whole = splat(np.float32(0))
    for i in range(0, 128, 32):
        e = exp2(mul(sub(load(z + i, F), splat(top)), splat(np.float32(1.4426950408889634))))
        store(share + i, e, F)
        whole = add(whole, e)
    return total(whole)


@njit
def judge(z, share, words, first, n, top, noisy, best):  # type: ignore[no-untyped-def]
    """n logits with the ids from `first` on: best holds the highest noisy logit, its logit, the highest logit, the sum of exp to
    it, and the token."""
    if top > best[2]:
        best[3] *= math.exp(best[2] - top)
        best[2] = top
    best[3] += shared(z.ctypes.data, np.float32(best[2]), share.ctypes.data)
    if not noisy:
        for i in range(n if top > best[0] else 0):
            if z[i] > best[0]:
                best[0], best[1], best[4] = z[i], z[i], first + i
        return
    reach = np.float32(math.exp(best[2] - best[0])) * MARGIN
    for i in range(n):
        if np.float32(~words[i]) > share[i] * reach:
            continue
        score = z[i] + np.float32(-math.log(-math.log((words[i] + 0.5) / 4294967296.0)))
        if score > best[0]:
            best[0], best[1], best[4] = score, z[i], first + i
            reach = np.float32(math.exp(best[2] - best[0])) * MARGIN


@njit
def part(space, batch, cols, rows, panel, bits, codes, scale, low, temperature, seed, offset, cap, best, lo, hi):  # type: ignore[no-untyped-def]
    """Panels lo to hi of the head for all requests."""
    sums = space + 4 * batch * cols
    tiles, groups = (batch + 5) // 6, cols // 32
    count, code_bytes, scale_bytes = (groups, 128 * bits, 64) if bits < 16 else (cols, 64, 0)
    acc, share, words = np.empty((6, 32), np.float32), np.empty(32, np.float32), np.empty(32, np.uint32)
    warm, seeds, offsets = floats(temperature), longs(seed), longs(offset)
    for p in range(lo, hi):
        at, group = codes + p * count * code_bytes, p * count * scale_bytes
        n = min(32, rows - 32 * p)
        for i in range(tiles):
            a, b = batch * i // tiles, batch * (i + 1) // tiles
            call(panel, b - a, bits, at, scale + group, low + group, space + 4 * a * cols, sums + 4 * a * groups, count, acc.ctypes.data)
            for t in range(a, b):
                z, noisy = acc[t - a], warm[t] > 0
                top = bend(z.ctypes.data, np.float32(cap), warm[t] if noisy else np.float32(1))
                if n < 32:
                    z[n:] = -np.inf
                    top = z[:n].max()
                if noisy:
                    draw_words(seeds[t], offsets[t], 32 * p, words)
                judge(z, share, words, 32 * p, n, top, noisy, best[t])


@cache
def kernel() -> Callable[..., None]:
    """Everything by address."""
    sources = version("matmul/cpu", "simd_matmul")

    def draw(  # type: ignore[no-untyped-def]
        h, space, batch, cols, rows, panel, bits, codes, scale, low, temperature, seed, offset, cap, token, logprob, pieces
    ):
        use_threads(pieces if sources else 1)
        panels, tiles = (rows + 31) // 32, (batch + 5) // 6
        prepare(h, space, batch, cols, bits, 0, tiles)
        best = np.zeros((pieces, batch, 5))
        best[:, :, :3] = -np.inf
        for c in prange(pieces):
            lo, hi = panels * c // pieces, panels * (c + 1) // pieces
            part(space, batch, cols, rows, panel, bits, codes, scale, low, temperature, seed, offset, cap, best[c], lo, hi)
        tokens, logprobs = longs(token), floats(logprob)
        for t in range(batch):
            top = best[:, t, 2].max()
            whole = 0.0
            winner = 0
            for c in range(pieces):
                if best[c, t, 3] > 0:
                    whole += best[c, t, 3] * math.exp(best[c, t, 2] - top)
                if best[c, t, 0] > best[winner, t, 0]:
                    winner = c
            tokens[t] = np.int64(best[winner, t, 4])
            logprobs[t] = best[winner, t, 1] - top - math.log(whole)

    return pnjit(draw)
