"""key_scores on the CPU: each thread reads its part of the pages, and of each page only the asked components' lines.

A page holds its keys component by component, so eight tokens' scores are a vector and a subset of components costs in proportion.
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
from ..panels import callback, version
from ..record import run as call
from ..schedule import STORED, at, dense, launch
from ..simd import KIND, F, fma, get64, load, one, put, size, splat, store, whole
from ..threads import chunks, helper

AT_ONCE = 4  # query heads


def can(q: Tensor, kp: Tensor, table: Tensor, length: Tensor, spans: tuple[int, ...], dims: Tensor | None = None) -> str | None:
    if kp.dtype not in STORED or q.dtype is not torch.float32:
        return f"queries of {q.dtype} over pages of {kp.dtype} have no kernel"
    if kp.shape[2] % 8 or not kp.is_contiguous():
        return f"pages of {kp.shape[2]} tokens, or not contiguous, have no kernel"
    right = all(x is None or x.dtype is torch.int32 for x in (table, length, dims))
    return None if right else "the table, length or components are not int32"


@helper
def score_page(kind, q, count, dim, keys, page, dims, used, out, line):  # type: ignore[no-untyped-def]
    """A page's scores for 1 to AT_ONCE queries that stand one after another at q; `line` bytes part their scores."""
    b, c, d = min(1, count - 1), min(2, count - 1), min(3, count - 1)
    for w in range(0, page, 8):
        s0, s1, s2, s3 = splat(np.float32(0)), splat(np.float32(0)), splat(np.float32(0)), splat(np.float32(0))
        for i in range(used):
            x = whole(dims + 4 * i) if dims else i
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
        used, out, parts = g(block + 96), g(block + 104), g(block + 112)
        begin, stop = rows * columns * part // parts, rows * columns * (part + 1) // parts
        heads, line = per * group, 4 * columns * page
        for row in range(rows if sources else 0):
            n, span, mine = whole(length + 4 * row), spans + row // per * 8, (dims + 4 * row * used if dims else 0)
            for p in range(max(begin - row * columns, 0), min(stop - row * columns, columns)):
                filled = min(max(n - p * page, 0), page)
                for t in range(g(span), g(span + 8)):
                    for h in range(0, group, AT_ONCE):
                        head, count = t * heads + row % per * group + h, min(AT_ONCE, group - h)
                        to = out + head * line + 4 * p * page
                        if filled:
                            keys = kp + whole(table + 4 * (row * columns + p)) * dim * page * size(kind)
                            score_page(kind, queries + 4 * dim * head, count, dim, keys, page, mine, used, to, line)
                        for k in range(count):
                            for w in range(filled, page):
                                put(to + k * line + 4 * w, np.float32(-inf), F)

    return callback(2, score)


def run(q: Tensor, kp: Tensor, table: Tensor, length: Tensor, spans: tuple[int, ...], dims: Tensor | None = None) -> Tensor:
    (n, heads, dim), (rows, columns), page = q.shape, table.shape, kp.shape[2]
    q, table, length, dims = dense(q), dense(table), dense(length), None if dims is None else dense(dims)
    out, used = torch.empty(n, heads, columns * page), dim if dims is None else dims.shape[1]
    parts, edges = chunks() if rows * columns * page * used > SMALL else 1, array("q", spans)
    given = (q.data_ptr(), kp.data_ptr(), table.data_ptr(), length.data_ptr(), edges.buffer_info()[0], at(dims))
    sizes = (rows // (len(spans) - 1), rows, columns, page, (len(spans) - 1) * heads // max(rows, 1), dim)
    block = array("q", (*given, *sizes, used, out.data_ptr(), parts))
    held = (q, table, length, edges, dims, out, block)
    call(launch, (0, 0, 0, scorer(kp.dtype).address, 0, block.buffer_info()[0], parts, 0, 1), *held)
    return out
