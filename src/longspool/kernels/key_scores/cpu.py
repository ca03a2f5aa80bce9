"""key_scores on the CPU: each thread reads its part of the pages, and of each page only the asked components' lines.

A page holds its keys component by component, so eight tokens' scores are a vector and a subset of components costs in proportion.
All components are the product that attention makes of a page.
"""

from __future__ import annotations

from array import array
from functools import cache
from math import inf

import numpy as np
import torch
from numba.core.ccallback import CFunc
from torch import Tensor

from ..append_rows.cpu import SMALL
from ..panels import callback, product, version
from ..record import run as call
from ..schedule import STORED, at, dense, launch
from ..simd import KIND, F, fma, get64, invoke, load, one, put, size, splat, store, whole
from ..threads import chunks, helper

AT_ONCE = 4  # query heads
AHEAD = 4  # pages that are fetched before they are needed


def can(q: Tensor, kp: Tensor, table: Tensor, length: Tensor, spans: tuple[int, ...], dims: Tensor | None = None) -> str | None:
    if kp.dtype not in STORED or q.dtype is not torch.float32:
        return f"queries of {q.dtype} over pages of {kp.dtype} have no kernel"
    if kp.shape[2] % 8 or not kp.is_contiguous():
        return f"pages of {kp.shape[2]} tokens, or not contiguous, have no kernel"
    right = all(x is None or x.dtype is torch.int32 for x in (table, length, dims))
    return None if right else "the table, length or components are not int32"


@helper
def store_both(at, a, b):  # type: ignore[no-untyped-def]
    store(at, a, F)
    store(at + 32, b, F)


@helper
def score_page(kind, q, count, dim, keys, page, dims, used, out, line):  # type: ignore[no-untyped-def]
    """A page's scores by some components for 1 to AT_ONCE queries that stand one after another at q; `line` bytes part their scores."""
    b, c, d = min(1, count - 1), min(2, count - 1), min(3, count - 1)
    for w in range(0, page // 16 * 16, 16):
        s0, s1, s2, s3 = splat(np.float32(0)), splat(np.float32(0)), splat(np.float32(0)), splat(np.float32(0))
        t0, t1, t2, t3 = s0, s1, s2, s3
        for i in range(used):
            x = whole(dims + 4 * i)
            k, l = load(keys + (x * page + w) * size(kind), kind), load(keys + (x * page + w + 8) * size(kind), kind)
            y = splat(one(q + 4 * x, F))
            s0, t0 = fma(y, k, s0), fma(y, l, t0)
            y = splat(one(q + 4 * (b * dim + x), F))
            s1, t1 = fma(y, k, s1), fma(y, l, t1)
            y = splat(one(q + 4 * (c * dim + x), F))
            s2, t2 = fma(y, k, s2), fma(y, l, t2)
            y = splat(one(q + 4 * (d * dim + x), F))
            s3, t3 = fma(y, k, s3), fma(y, l, t3)
        store_both(out + 4 * w, s0, t0)
        store_both(out + b * line + 4 * w, s1, t1)
        store_both(out + c * line + 4 * w, s2, t2)
        store_both(out + d * line + 4 * w, s3, t3)
    for w in range(page // 16 * 16, page, 8):
        s0, s1, s2, s3 = splat(np.float32(0)), splat(np.float32(0)), splat(np.float32(0)), splat(np.float32(0))
        for i in range(used):
            x = whole(dims + 4 * i)
            k = load(keys + (x * page + w) * size(kind), kind)
            s0 = fma(splat(one(q + 4 * x, F)), k, s0)
            s1 = fma(splat(one(q + 4 * (b * dim + x), F)), k, s1)
            s2 = fma(splat(one(q + 4 * (c * dim + x), F)), k, s2)
            s3 = fma(splat(one(q + 4 * (d * dim + x), F)), k, s3)
        store(out + 4 * w, s0, F)
        store(out + b * line + 4 * w, s1, F)
        store(out + c * line + 4 * w, s2, F)
        store(out + d * line + 4 * w, s3, F)


@cache
def scorer(dtype: torch.dtype) -> CFunc:
    """(block, part): the pages of one part of `parts`, counted over all rows."""
    kind, sources = KIND[dtype], version()

    def score(block, part):  # type: ignore[no-untyped-def]
        g = get64
        queries, kp, table, length, spans, dims = g(block), g(block + 8), g(block + 16), g(block + 24), g(block + 32), g(block + 40)
        per, rows, columns, page, group, dim = g(block + 48), g(block + 56), g(block + 64), g(block + 72), g(block + 80), g(block + 88)
        used, out, parts, times = g(block + 96), g(block + 104), g(block + 112), g(block + 120)
        begin, stop = rows * columns * part // parts, rows * columns * (part + 1) // parts
        heads, line = per * group, 4 * columns * page
        for row in range(rows if sources else 0):
            n, span, mine = whole(length + 4 * row), spans + row // per * 8, (dims + 4 * row * used if dims else 0)
            for p in range(max(begin - row * columns, 0), min(stop - row * columns, columns)):
                filled, ids, each = min(max(n - p * page, 0), page), table + 4 * (row * columns + p), dim * page * size(kind)
                keys = kp + whole(ids) * each if filled else 0
                hop = (whole(ids + 4 * AHEAD) - whole(ids)) * each if n > (p + AHEAD) * page else 0
                for t in range(g(span), g(span + 8)):
                    first = t * heads + row % per * group
                    to = out + first * line + 4 * p * page
                    if filled and not used:
                        invoke(times, (group, queries + 4 * dim * first, 4 * dim, keys, page * size(kind), dim, to, line, page, 0, hop))
                    for h in range(0, group if filled and used else 0, AT_ONCE):
                        x = queries + 4 * dim * (first + h)
                        score_page(kind, x, min(AT_ONCE, group - h), dim, keys, page, mine, used, to + h * line, line)
                    for h in range(group):
                        for w in range(filled, page):
                            put(to + h * line + 4 * w, np.float32(-inf), F)

    return callback(2, score)


def run(q: Tensor, kp: Tensor, table: Tensor, length: Tensor, spans: tuple[int, ...], dims: Tensor | None = None) -> Tensor:
    (n, heads, dim), (rows, columns), page = q.shape, table.shape, kp.shape[2]
    q, table, length, dims = dense(q), dense(table), dense(length), None if dims is None else dense(dims)
    out, used = torch.empty(n, heads, columns * page), 0 if dims is None else dims.shape[1]
    parts, edges = chunks() if rows * columns * page * (used or dim) > SMALL else 1, array("q", spans)
    given = (q.data_ptr(), kp.data_ptr(), table.data_ptr(), length.data_ptr(), edges.buffer_info()[0], at(dims))
    sizes = (rows // (len(spans) - 1), rows, columns, page, (len(spans) - 1) * heads // max(rows, 1), dim)
    block = array("q", (*given, *sizes, used, out.data_ptr(), parts, product(kp.dtype).address))
    held = (q, table, length, edges, dims, out, block)
    call(launch, (0, 0, 0, scorer(kp.dtype).address, 0, block.buffer_info()[0], parts, 0, 1), *held)
    return out
