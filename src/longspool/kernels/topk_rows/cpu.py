"""The k highest scores of each row on the CPU, in one pass: what is above the k-th highest so far joins a small heap of candidates, from
which a radix selection keeps the k highest whenever it is full."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from ..record import run as call
from ..simd import F, above, one
from ..simd_matmul import ints
from ..threads import chunks, helper, njit, pnjit, use_threads

WORTH_THREADS = 1 << 15
SPARE = 1024  # candidates beside the k highest, at least


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
def narrow(keys, held, size, want, bins):  # type: ignore[no-untyped-def]
    """Keep the `want` highest of the first `size` keys and what belongs to them, in order; of the least of these what is held."""
    least, equals = threshold(keys, size, want, bins)
    at, edge = 0, 0
    for i in range(size):
        if keys[i] > least or (keys[i] == least and equals > 0):
            if keys[i] == least:
                equals, edge = equals - 1, at
            keys[at], held[at] = keys[i], held[i]
            at += 1
    return held[edge]


@helper
def highest_of(score, have, want, keys, held, bins):  # type: ignore[no-untyped-def]
    """The indices of the `want` < `have` highest of the floats at `score`, ascending, as the first of `held`.

    What is not above the least of those found so far is passed over, eight at a time: an equal one comes later and loses."""
    bits, room = ints(score), want + max(want, SPARE)
    size = min(have, room)
    for i in range(size):
        keys[i], held[i] = order(bits[i]), i
    i = size
    if size > want:
        limit, size = one(score + 4 * np.int64(narrow(keys, held, size, want, bins)), F), want
    while i < have:
        wide = min(8, have - i)
        if wide == 8:
            hits = above(score + 4 * i, limit)
        else:
            hits = 0
            for j in range(wide):
                hits |= np.int64(one(score + 4 * (i + j), F) > limit) << j
        if hits:
            for j in range(wide):
                if hits >> j & 1:
                    keys[size], held[size] = order(bits[i + j]), i + j
                    size += 1
            if size >= room:
                limit, size = one(score + 4 * np.int64(narrow(keys, held, size, want, bins)), F), want
        i += wide
    if size > want:
        narrow(keys, held, size, want, bins)


@helper
def some(score, count, k, index, n, width, most, lo, hi):  # type: ignore[no-untyped-def]
    """Rows lo to hi."""
    room = most + max(most, SPARE) + 8
    keys, held, bins = np.empty(room, np.uint32), np.empty(room, np.int32), np.empty(2048, np.int32)
    valid, wanted, taken = ints(count), ints(k), ints(n)
    for r in range(lo, hi):
        to = ints(index + 4 * r * most)
        have = min(np.int64(valid[r]), width)
        want, at = max(min(np.int64(wanted[r]), have), 0), 0
        taken[r] = want
        if 0 < want < have:
            highest_of(score + 4 * r * width, have, want, keys, held, bins)
            for i in range(want):
                to[i] = held[i]
            at = want
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
