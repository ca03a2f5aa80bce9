"""What attention over codes shares where one query token meets one row at a time: which keys it sees, and the softmax over its logits.

Codes that no product of matrices can read are not worth tall stacks of queries: these kernels are for a few tokens, as decoding has them.
Addresses stand in for arrays, logits are in base 2, as in tiles.py.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numba import types

from .simd import F, add, exp2, get64, highest, larger, load, mul, splat, store, sub, tanh, total, whole
from .simd_matmul import memory_of
from .threads import helper
from .tiles import hide

octets = memory_of(types.uint8)
"""Bytes at an address, to be indexed."""


@helper
def request_of(spans, token):  # type: ignore[no-untyped-def]
    """The request that a token belongs to."""
    b = 0
    while token >= get64(spans + 8 * b + 8):
        b += 1
    return b


@helper
def sight(lo, hi, length, token, row):  # type: ignore[no-untyped-def]
    """The range of in-row indices that a token sees."""
    n = whole(length + 4 * row)
    a = max(whole(lo + 4 * token), 0) if lo else 0
    b = min(whole(hi + 4 * token), n) if hi else n
    return a, max(a, b)


@helper
def soften(at, count, u, v, cap):  # type: ignore[no-untyped-def]
    """`count` logits, a multiple of 8, of which u to v are seen, to weights exp2(logit - top); returns the top and the weights' sum."""
    if cap > 0:
        bound = splat(np.float32(cap))
        for c in range(0, count, 8):
            store(at + 4 * c, mul(tanh(load(at + 4 * c, F)), bound), F)
    hide(at, 0, u, v, count)
    best = splat(np.float32(-inf))
    for c in range(0, count, 8):
        best = larger(load(at + 4 * c, F), best)
    top = highest(best)
    less = splat(top if top > -inf else np.float32(0))
    sums = splat(np.float32(0))
    for c in range(0, count, 8):
        w = exp2(sub(load(at + 4 * c, F), less))
        sums = add(sums, w)
        store(at + 4 * c, w, F)
    return top, total(sums)
