"""attend_books on the CPU: a query's products with all vectors of a book, then nothing but look-ups.

A thread takes query tokens of a row one by one. The weights of a head's keys are summed up by code before they meet the values' book.
"""

from __future__ import annotations

from array import array
from functools import cache
from math import inf, log

import numpy as np
import torch
from numba.core.ccallback import CFunc
from torch import Tensor

from ..pairs import octets, request_of, sight, soften
from ..panels import callback, version
from ..record import run as call
from ..room import room
from ..schedule import at, bent, dense, launch
from ..simd import F, add, float_at, fma, get64, load, mul, one, put, splat, store, total, whole
from ..simd_matmul import floats
from ..threads import chunks, helper

LN2 = log(2)


def can(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    kbook: Tensor,
    vbook: Tensor,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    *rest: object,
    **kw: object,
) -> str | None:
    if kc.dtype != torch.uint8 or vc.dtype != torch.uint8 or kbook.shape[2] % 8:
        return f"codes of {kc.dtype} in books of {kbook.shape[2]} have no kernel"
    if kc.shape[2] % 8:
        return f"pages of {kc.shape[2]} tokens have no kernel"
    if not all(x.is_contiguous() for x in (kc, vc, kbook, vbook)):
        return "the pool or a book is not contiguous"
    whole_numbers = all(x is None or x.dtype is torch.int32 for x in (table, length, lo, hi))
    return None if whole_numbers and q.dtype is torch.float32 else "q is not float32, or the table, length, lo or hi are not int32"


@helper
def products(q, book, lut, pieces, part, many, gain):  # type: ignore[no-untyped-def]
    """lut[m, c] = gain * q_m . book[m, :, c]."""
    for m in range(pieces):
        for c in range(0, many, 8):
            sums = splat(np.float32(0))
            for d in range(part):
                x = splat(np.float32(one(q + 4 * (m * part + d), F) * np.float32(gain)))
                sums = fma(x, load(book + 4 * ((m * part + d) * many + c), F), sums)
            store(lut + 4 * (m * many + c), sums, F)


@helper
def look_up(kc, lut, to, pieces, page, many):  # type: ignore[no-untyped-def]
    """The logits of a page's tokens."""
    sums = floats(to)
    for t in range(page):
        sums[t] = np.float32(0)
    for m in range(pieces):
        codes, found = octets(kc + m * page), floats(lut + 4 * m * many)
        for t in range(page):
            sums[t] += found[codes[t]]


@helper
def tally(vc, weights, sums, pieces, page, first, last, many):  # type: ignore[no-untyped-def]
    """Add the weights of a page's tokens first to last to the sums of their codes."""
    given = floats(weights)
    for m in range(pieces):
        codes, mine = octets(vc + m * page), floats(sums + 4 * m * many)
        for t in range(first, last):
            mine[codes[t]] += given[t]


@helper
def blend(book, sums, out, pieces, part, many, mass):  # type: ignore[no-untyped-def]
    """out_m = sum_c sums[m, c] * book[m, :, c] / mass."""
    for m in range(pieces):
        for d in range(part):
            acc = splat(np.float32(0))
            for c in range(0, many, 8):
                acc = add(acc, mul(load(sums + 4 * (m * many + c), F), load(book + 4 * ((m * part + d) * many + c), F)))
            put(out + 4 * (m * part + d), np.float32(total(acc) / mass if mass > 0 else np.float32(0)), F)


@cache
def worker() -> CFunc:
    """(block, part): every `parts`-th share of the pairs of query token and row."""
    sources = version("pairs", "simd_matmul")

    def work(block, part):  # type: ignore[no-untyped-def]
        g = get64
        queries, kc, vc, kbook, vbook = g(block), g(block + 8), g(block + 16), g(block + 24), g(block + 32)
        table, length, spans, lo, hi = g(block + 40), g(block + 48), g(block + 56), g(block + 64), g(block + 72)
        out, lse, per, columns, page = g(block + 80), g(block + 88), g(block + 96), g(block + 104), g(block + 112)
        group, heads, dim, cut, many = g(block + 120), g(block + 128), g(block + 136), g(block + 144), g(block + 152)
        pairs, parts, space = g(block + 160), g(block + 168), g(block + 176) + g(block + 184) * part
        gain, cap = float_at(block + 192), float_at(block + 200)
        pieces = dim // cut
        lut, sums = space, space + 4 * pieces * many
        logits = sums + 4 * pieces * many
        for i in range(pairs * part // parts, pairs * (part + 1) // parts if sources else 0):
            token = i // per
            row = request_of(spans, token) * per + i % per
            a, b = sight(lo, hi, length, token, row)
            begin, pages = a // page, (b + page - 1) // page
            for head in range(i % per * group, i % per * group + group):
                where = token * heads + head
                products(queries + 4 * dim * where, kbook, lut, pieces, cut, many, gain)
                for p in range(begin, pages if a < b else begin):
                    at_page = whole(table + 4 * (row * columns + p)) * pieces * page
                    look_up(kc + at_page, lut, logits + 4 * (p - begin) * page, pieces, page, many)
                count = (pages - begin) * page if a < b else 0
                top, mass = soften(logits, count, a - begin * page, b - begin * page, cap)
                for c in range(0, pieces * many, 8):
                    store(sums + 4 * c, splat(np.float32(0)), F)
                for p in range(begin, begin + count // page):
                    at_page = whole(table + 4 * (row * columns + p)) * pieces * page
                    first, last = max(a - p * page, 0), min(b - p * page, page)
                    tally(vc + at_page, logits + 4 * (p - begin) * page, sums, pieces, page, first, last, many)
                blend(vbook, sums, out + 4 * dim * where, pieces, cut, many, mass)
                put(lse + 4 * where, np.float32((top + np.log2(mass)) * LN2 if mass > 0 else -inf), F)

    return callback(2, work)


def run(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    kbook: Tensor,
    vbook: Tensor,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    (n, heads, dim), (rows, columns), (_, pieces, page), (_, cut, many) = q.shape, table.shape, kc.shape, kbook.shape
    q, table, length = dense(q), dense(table), dense(length)
    lo, hi = (None if x is None else dense(x) for x in (lo, hi))
    out, lse, requests = torch.empty(n, heads, dim), torch.empty(n, heads), len(spans) - 1
    per = rows // requests
    pairs, each = n * per, 4 * (2 * pieces * many + columns * page)
    parts = max(min(chunks(), pairs), 1)
    (space, held), edges = room(each * parts), array("q", spans)
    pool = (q.data_ptr(), kc.data_ptr(), vc.data_ptr(), kbook.data_ptr(), vbook.data_ptr(), table.data_ptr(), length.data_ptr())
    ends = (edges.buffer_info()[0], at(lo), at(hi), out.data_ptr(), lse.data_ptr(), per, columns, page)
    sizes = (requests * heads // max(rows, 1), heads, dim, cut, many, pairs, parts, space, each)
    block = array("q", (*pool, *ends, *sizes, *bent(scale, softcap)))
    numbers = (0, 0, 0, worker().address, 0, block.buffer_info()[0], parts, 0, 1)
    call(launch, numbers, q, kbook, vbook, table, length, lo, hi, out, lse, edges, block, held)
    return out, lse
