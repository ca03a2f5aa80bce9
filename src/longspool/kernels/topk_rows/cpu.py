"""The k highest scores of each row on the CPU: a radix selection finds the k-th score, one pass collects the indices in order."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from ..record import run as call
from ..simd_matmul import ints
from ..threads import chunks, helper, njit, pnjit, use_threads

WORTH_THREADS = 1 << 15


def can(score: Tensor, count: Tensor, k: Tensor) -> str | None:
    if score.dtype != torch.float32:
        return f"scores are {score.dtype}, not float32"
    if not count.dtype == k.dtype == torch.int32:
        return f"counts are {count.dtype} and {k.dtype}, not int32"
    return None


def run(score: Tensor, count: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = score.shape
    score, count, k = score.contiguous(), count.contiguous(), k.contiguous()
    most = widest(k.data_ptr(), rows)
    index, n = torch.empty(rows, most, dtype=torch.int32), torch.empty(rows, dtype=torch.int32)
    choose = few if rows * width < WORTH_THREADS else many
    numbers = (score.data_ptr(), count.data_ptr(), k.data_ptr(), index.data_ptr(), n.data_ptr(), rows, width, most, chunks())
    call(choose, numbers, score, count, k)
    return index, n


@njit
def widest(k, rows):  # type: ignore[no-untyped-def]
    most, numbers = 0, ints(k)
    for r in range(rows):
        most = max(most, numbers[r])
    return most


@helper
def order(bits):  # type: ignore[no-untyped-def]
    """A float's bits as an unsigned integer that sorts alike; -0 becomes 0."""
    bits = np.uint32(bits)
    if bits == np.uint32(0x80000000):
        bits = np.uint32(0)
    return ~bits if bits >> np.uint32(31) else bits | np.uint32(0x80000000)


@helper
def threshold(keys, count, k, bins):  # type: ignore[no-untyped-def]
    """The k-th highest of the keys, and how many of its equals are taken: 11, 11 and 10 bits at a time, from the top."""
    prefix, mask, left = np.uint32(0), np.uint32(0), k
    for shift, width in ((21, 11), (10, 11), (0, 10)):
        bins[:] = 0
        low = np.uint32((1 << width) - 1)
        for i in range(count):
            if keys[i] & mask == prefix:
                bins[(keys[i] >> np.uint32(shift)) & low] += 1
        digit = np.int64(low)
        while bins[digit] < left:
            left -= bins[digit]
            digit -= 1
        prefix |= np.uint32(digit) << np.uint32(shift)
        mask |= low << np.uint32(shift)
    return prefix, left


@helper
def some(score, count, k, index, n, width, most, lo, hi):  # type: ignore[no-untyped-def]
    """Rows lo to hi."""
    keys, bins = np.empty(width, np.uint32), np.empty(2048, np.int32)
    valid, wanted, taken = ints(count), ints(k), ints(n)
    for r in range(lo, hi):
        bits, to = ints(score + 4 * r * width), ints(index + 4 * r * most)
        have = min(np.int64(valid[r]), width)
        want, at = max(min(np.int64(wanted[r]), have), 0), 0
        taken[r] = want
        if 0 < want < have:
            for i in range(have):
                keys[i] = order(bits[i])
            least, equals = threshold(keys, have, want, bins)
            for i in range(have):
                if keys[i] > least or (keys[i] == least and equals > 0):
                    equals -= keys[i] == least
                    to[at] = i
                    at += 1
        for i in range(at, want):
            to[i] = i
        for i in range(want, most):
            to[i] = -1


@njit
def few(score, count, k, index, n, rows, width, most, pieces):  # type: ignore[no-untyped-def]
    some(score, count, k, index, n, width, most, 0, rows)


@pnjit
def many(score, count, k, index, n, rows, width, most, pieces):  # type: ignore[no-untyped-def]
    use_threads(pieces)
    for c in prange(pieces):
        some(score, count, k, index, n, width, most, rows * c // pieces, rows * (c + 1) // pieces)
