"""attend_groups on the CPU: a token's codes become floats in the first cache, for all heads of their row, and nothing else is kept."""

from __future__ import annotations

from array import array
from functools import cache
from math import inf, log

import numpy as np
import torch
from numba.core.ccallback import CFunc
from torch import Tensor

from ..pairs import request_of, sight, soften
from ..panels import callback, version
from ..record import run as call
from ..room import room
from ..schedule import at, bent, dense, launch
from ..simd import HALF, F, float_at, fma, get64, load, load_nibbles, mul, one, put, splat, store, total, whole
from ..threads import chunks, helper

LN2 = log(2)


def can(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    kscale: Tensor,
    kzero: Tensor,
    vscale: Tensor,
    vzero: Tensor,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    *rest: object,
    **kw: object,
) -> str | None:
    dim, page = q.shape[2], kc.shape[1]
    if kc.dtype != torch.uint8 or dim % kscale.shape[2] or dim // kscale.shape[2] % 16 or page % 8:
        return f"{kscale.shape[2]} groups of head_dim {dim} in pages of {page} have no kernel (groups of 16, pages of 8)"
    if not all(x.is_contiguous() for x in (kc, vc, kscale, kzero, vscale, vzero)):
        return "the pool is not contiguous"
    whole_numbers = all(x is None or x.dtype is torch.int32 for x in (table, length, lo, hi))
    return None if whole_numbers and q.dtype is torch.float32 else "q is not float32, or the table, length, lo or hi are not int32"


@helper
def spread(codes, to, dim):  # type: ignore[no-untyped-def]
    """A token's codes as floats, in order."""
    for d in range(0, dim, 16):
        store(to + 4 * d, load_nibbles(codes + d // 2, False), F)
        store(to + 4 * d + 32, load_nibbles(codes + d // 2, True), F)


@helper
def open_queries(q, to, sums, group, dim, size, gain):  # type: ignore[no-untyped-def]
    """The scaled queries of a row's heads, and each one's sums over the groups of its dims."""
    factor = splat(np.float32(gain))
    for h in range(group):
        for u in range(0, dim, size):
            rest = np.float32(0)
            for d in range(u, u + size, 8):
                x = mul(load(q + 4 * (h * dim + d), F), factor)
                store(to + 4 * (h * dim + d), x, F)
                rest += total(x)
            put(sums + 4 * (h * (dim // size) + u // size), rest, F)


@helper
def score(q, sums, line, scale, zero, to, stride, group, dim, size):  # type: ignore[no-untyped-def]
    """A token's logits under the heads of its row, `stride` bytes apart."""
    parts = dim // size
    for h in range(group):
        s = np.float32(0)
        for u in range(parts):
            acc = splat(np.float32(0))
            for d in range(u * size, u * size + size, 8):
                acc = fma(load(q + 4 * (h * dim + d), F), load(line + 4 * d, F), acc)
            s += one(scale + 2 * u, HALF) * total(acc) + one(zero + 2 * u, HALF) * one(sums + 4 * (h * parts + u), F)
        put(to + h * stride, np.float32(s), F)


@helper
def value(line, scale, zero, dim, size):  # type: ignore[no-untyped-def]
    """A token's codes to its value."""
    for u in range(dim // size):
        gain, base = splat(one(scale + 2 * u, HALF)), splat(one(zero + 2 * u, HALF))
        for d in range(u * size, u * size + size, 8):
            store(line + 4 * d, fma(load(line + 4 * d, F), gain, base), F)


@helper
def gather(line, weight, stride, acc, group, dim):  # type: ignore[no-untyped-def]
    """Add a token's value to the sums of each head, by its weight."""
    for h in range(group):
        w = splat(one(weight + h * stride, F))
        for d in range(0, dim, 8):
            to = acc + 4 * (h * dim + d)
            store(to, fma(w, load(line + 4 * d, F), load(to, F)), F)


@helper
def fill(to, count, x):  # type: ignore[no-untyped-def]
    for d in range(0, count, 8):
        store(to + 4 * d, splat(np.float32(x)), F)


@cache
def worker() -> CFunc:
    """(block, part): a share of the pairs of query token and row."""
    sources = version("pairs")

    def work(block, part):  # type: ignore[no-untyped-def]
        g = get64
        queries, kc, vc, ks, kz, vs, vz = g(block), g(block + 8), g(block + 16), g(block + 24), g(block + 32), g(block + 40), g(block + 48)
        table, length, spans, lo, hi = g(block + 56), g(block + 64), g(block + 72), g(block + 80), g(block + 88)
        out, lse, per, columns, page = g(block + 96), g(block + 104), g(block + 112), g(block + 120), g(block + 128)
        group, heads, dim, size = g(block + 136), g(block + 144), g(block + 152), g(block + 160)
        pairs, parts, space = g(block + 168), g(block + 176), g(block + 184) + g(block + 192) * part
        gain, cap = float_at(block + 200), float_at(block + 208)
        q, acc = space, space + 4 * group * dim
        line, sums = acc + 4 * group * dim, acc + 4 * (group + 1) * dim
        logits, stride, groups = sums + 4 * group * (dim // size), 4 * columns * page, dim // size
        for i in range(pairs * part // parts, pairs * (part + 1) // parts if sources else 0):
            token = i // per
            row = request_of(spans, token) * per + i % per
            first = token * heads + i % per * group
            a, b = sight(lo, hi, length, token, row)
            begin = a // page * page
            count = (b - begin + page - 1) // page * page if a < b else 0
            open_queries(queries + 4 * dim * first, q, sums, group, dim, size, gain)
            for h in range(group):
                fill(logits + h * stride, count, 0)
            for j in range(a, b):
                where = whole(table + 4 * (row * columns + j // page)) * page + j % page
                spread(kc + where * (dim // 2), line, dim)
                by = where * groups * 2
                score(q, sums, line, ks + by, kz + by, logits + 4 * (j - begin), stride, group, dim, size)
            for h in range(group):
                top, mass = soften(logits + h * stride, count, a - begin, b - begin, cap)
                put(lse + 4 * (first + h), np.float32((top + np.log2(mass)) * LN2 if mass > 0 else -inf), F)
                put(sums + 4 * h, np.float32(1 / mass if mass > 0 else 0), F)
            fill(acc, group * dim, 0)
            for j in range(a, b):
                where = whole(table + 4 * (row * columns + j // page)) * page + j % page
                spread(vc + where * (dim // 2), line, dim)
                by = where * groups * 2
                value(line, vs + by, vz + by, dim, size)
                gather(line, logits + 4 * (j - begin), stride, acc, group, dim)
            for h in range(group):
                share = splat(one(sums + 4 * h, F))
                for d in range(0, dim, 8):
                    store(out + 4 * (dim * (first + h) + d), mul(load(acc + 4 * (h * dim + d), F), share), F)

    return callback(2, work)


def run(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    kscale: Tensor,
    kzero: Tensor,
    vscale: Tensor,
    vzero: Tensor,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    (n, heads, dim), (rows, columns), page = q.shape, table.shape, kc.shape[1]
    q, table, length = dense(q), dense(table), dense(length)
    lo, hi = (None if x is None else dense(x) for x in (lo, hi))
    out, lse, requests, groups = torch.empty(n, heads, dim), torch.empty(n, heads), len(spans) - 1, kscale.shape[2]
    per, group = rows // requests, requests * heads // max(rows, 1)
    pairs, each = n * per, 4 * (group * (2 * dim + groups + columns * page) + dim + 8)
    parts = max(min(chunks(), pairs), 1)
    (space, held), edges = room(each * parts), array("q", spans)
    pool = (kc.data_ptr(), vc.data_ptr(), kscale.data_ptr(), kzero.data_ptr(), vscale.data_ptr(), vzero.data_ptr())
    ends = (table.data_ptr(), length.data_ptr(), edges.buffer_info()[0], at(lo), at(hi), out.data_ptr(), lse.data_ptr())
    sizes = (per, columns, page, group, heads, dim, dim // groups, pairs, parts, space, each)
    block = array("q", (q.data_ptr(), *pool, *ends, *sizes, *bent(scale, softcap)))
    numbers = (0, 0, 0, worker().address, 0, block.buffer_info()[0], parts, 0, 1)
    call(launch, numbers, q, table, length, lo, hi, out, lse, edges, block, held)
    return out, lse
