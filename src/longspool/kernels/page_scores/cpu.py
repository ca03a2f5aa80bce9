"""page_scores on the CPU: each thread streams through the bounds of its part of the pages.

For kmin <= kmax, max(q*kmin, q*kmax) is q times the bound that q's sign chooses: one blend and one multiply-add. Two pages, or four,
meet all heads of a group at once, so that the sums fill the registers and what is loaded of the queries serves several pages.
"""

from __future__ import annotations

from array import array
from functools import cache
from math import inf
from typing import Literal

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic
from torch import Tensor

from ..append_rows.cpu import SMALL
from ..panels import callback, version
from ..record import run as call_
from ..room import room
from ..schedule import dense, launch
from ..simd import BYTES, F32, I32, I64, KIND, V8F, V8I, F, call, const, get64, one, pointer, prefetch, put, read, size, whole
from ..threads import chunks, helper

AT_ONCE = 4  # query heads
AHEAD = 12  # pages whose bounds are fetched before they are needed
ROOM = 64  # bytes of a thread, for the numbers of four pages and of four more


def can(q: Tensor, kmin: Tensor, kmax: Tensor, *rest: object, **kw: object) -> str | None:
    if kmin.dtype not in (torch.float32, torch.float16) or kmax.dtype != kmin.dtype:
        return f"bounds of {kmin.dtype} and {kmax.dtype} have no kernel"
    if q.shape[2] % 8:
        return f"head_dim {q.shape[2]} is no multiple of 8"
    return None if kmin.is_contiguous() and kmax.is_contiguous() else "the bounds are not contiguous"


@intrinsic
def bounds(typingctx, kind, wide, rows, q, kmin, kmax, a, b, c, d, dim, adds, out):  # type: ignore[no-untyped-def]
    """out[i] = the maximum over the rows, or their sum where `adds`, of the sum of max(q[row] * kmin, q[row] * kmax) over the bounds at
    the i-th of the byte offsets a to d. `wide` of these are read: 2 for 1 to AT_ONCE rows of q, float [rows, dim], or 4 for 1 or 2."""
    sig = types.void(kind, wide, rows, q, kmin, kmax, a, b, c, d, dim, adds, out)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        done = builder.append_basic_block("bounds.end")
        # Eight steps at a time where dim allows it: the usual 64 dims make a loop too short to be foreseen.
        odd = builder.icmp_signed("!=", builder.and_(args[10], ir.Constant(I64, 63)), ir.Constant(I64, 0))
        which = builder.add(builder.shl(args[1], ir.Constant(I64, 4)), builder.shl(args[2], ir.Constant(I64, 1)))
        choice = builder.switch(builder.add(which, builder.zext(odd, I64)), done)
        for pages, most in ((2, AT_ONCE), (4, 2)):
            for n in range(1, most + 1):
                for steps in (8, 1):
                    start = builder.append_basic_block(f"bounds.{pages}.{n}.{steps}")
                    choice.add_case(ir.Constant(I64, 16 * pages + 2 * n + (steps == 1)), start)
                    builder.position_at_end(start)
                    sums = _bounds(builder, kind, n, steps, args[3], args[4], args[5], args[6 : 6 + pages], args[10])
                    _over_rows(builder, sums, builder.icmp_signed("!=", args[11], ir.Constant(I64, 0)), args[12])
                    builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return sig, codegen


def _bounds(builder, kind, rows, steps, q, kmin, kmax, pages, dim):  # type: ignore[no-untyped-def]
    """Sums [page][row], vectors of which the lanes are yet to be added."""
    entry, loop, done = builder.block, builder.append_basic_block("dims"), builder.append_basic_block("dims.end")
    line, zero = builder.shl(dim, ir.Constant(I64, 2)), ir.Constant(I64, 0)
    where = [(builder.add(kmin, page), builder.add(kmax, page)) for page in pages]
    builder.branch(loop)
    builder.position_at_end(loop)
    d = builder.phi(I64)
    start = [[builder.phi(V8F) for _ in range(rows)] for _ in pages]
    sums, at = start, d
    for _ in range(steps):
        sums = _fma_bounds(builder, kind, sums, q, line, where, at)
        at = builder.add(at, ir.Constant(I64, 8))
    flat, ends = [x for page in start for x in page], [x for page in sums for x in page]
    for phi, first, then in [(d, zero, at), *zip(flat, [const(0)] * len(flat), ends, strict=True)]:
        phi.add_incoming(first, entry)
        phi.add_incoming(then, loop)
    builder.cbranch(builder.icmp_signed("<", at, dim), loop, done)
    builder.position_at_end(done)
    return sums


def _fma_bounds(builder, kind, sums, q, line, where, d):  # type: ignore[no-untyped-def]
    """sums[page][row] + q * the bound that q's sign chooses, for eight dims."""
    offset, at = builder.mul(d, ir.Constant(I64, BYTES[kind])), builder.add(q, builder.shl(d, ir.Constant(I64, 2)))
    boxes = [[read(builder, builder.add(base, offset), kind) for base in pair] for pair in where]
    out = [list(page) for page in sums]
    for row in range(len(sums[0])):
        x = builder.load(pointer(builder, at, V8F), align=4)
        negative = builder.icmp_signed("<", builder.bitcast(x, V8I), ir.Constant(V8I, [0] * 8))
        for page, (low, high) in enumerate(boxes):
            out[page][row] = call(builder, "fma", x, builder.select(negative, low, high), sums[page][row])
        at = builder.add(at, line)
    return out


def _over_rows(builder, sums, adds, out):  # type: ignore[no-untyped-def]
    """Add up the lanes of sums [page][row], all at once, and fold each page's rows."""
    lanes, rows = 8 // len(sums), len(sums[0])
    vectors = [x for page in sums for x in (*page, *[const(0)] * (lanes - rows))]
    for gap, near in ((1, [0, 8, 2, 10, 4, 12, 6, 14]), (2, [0, 1, 8, 9, 4, 5, 12, 13]), (4, [0, 1, 2, 3, 8, 9, 10, 11])):
        masks = [ir.Constant(V8I, [i + more for i in near]) for more in (0, gap)]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.fadd(*(builder.shuffle_vector(a, b, mask) for mask in masks)) for a, b in pairs]
    added = most = vectors[0]
    if rows < lanes:  # the largest of all must be a row's
        most = builder.shuffle_vector(added, added, ir.Constant(V8I, [i if i % lanes < rows else i - i % lanes for i in range(8)]))
    for gap in (1, 2)[: lanes.bit_length() - 1]:
        mask = ir.Constant(V8I, [i ^ gap for i in range(8)])
        added = builder.fadd(added, builder.shuffle_vector(added, added, mask))
        other = builder.shuffle_vector(most, most, mask)
        most = builder.select(builder.fcmp_ordered(">", most, other), most, other)
    result = builder.select(adds, added, most)
    for page in range(len(sums)):
        where = pointer(builder, builder.add(out, ir.Constant(I64, 4 * page)), F32)
        builder.store(builder.extract_element(result, ir.Constant(I32, lanes * page)), where, align=4)


@helper
def fetch_bounds(kmin, kmax, at, line):  # type: ignore[no-untyped-def]
    for byte in range(0, line, 64):
        prefetch(kmin + at + byte)
        prefetch(kmax + at + byte)


@helper
def score_token(kind, wide, q, kmin, kmax, a, b, c, d, dim, group, adds, to):  # type: ignore[no-untyped-def]
    """At `to`, the sum or the maximum of the bounds of `wide` pages over the heads of one token; what comes behind them is overwritten."""
    most = 2 if wide == 4 else AT_ONCE
    bounds(kind, wide, min(most, group), q, kmin, kmax, a, b, c, d, dim, adds, to)
    for g in range(most, group, most):
        bounds(kind, wide, min(most, group - g), q + 4 * dim * g, kmin, kmax, a, b, c, d, dim, adds, to + 4 * wide)
        for i in range(wide):
            old, new = one(to + 4 * i, F), one(to + 4 * (wide + i), F)
            put(to + 4 * i, old + new if adds else max(old, new), F)


@cache
def scorer(dtype: torch.dtype) -> CFunc:
    """(block, part): the pages of one part of `parts`, counted over all rows."""
    kind, sources = KIND[dtype], version()

    def score(block, part):  # type: ignore[no-untyped-def]
        g = get64
        queries, kmin, kmax, table, length, spans = g(block), g(block + 8), g(block + 16), g(block + 24), g(block + 32), g(block + 40)
        per, rows, columns, page, group, dim = g(block + 48), g(block + 56), g(block + 64), g(block + 72), g(block + 80), g(block + 88)
        adds, out, cuts, room = g(block + 96), g(block + 104), g(block + 112), g(block + 120) + ROOM * part
        begin, stop = rows * columns * part // cuts, rows * columns * (part + 1) // cuts
        line, heads, wide = dim * size(kind), per * group, 4 if group < 3 else 2
        for row in range(rows if sources else 0):
            span, q = spans + row // per * 8, queries + 4 * dim * (row % per * group)
            n = (whole(length + 4 * row) + page - 1) // page if g(span) < g(span + 8) else 0
            end = min(stop - row * columns, columns)
            for p in range(max(begin - row * columns, 0), end, wide):
                ids, to = table + 4 * (row * columns + p), out + 4 * (row * columns + p)
                live, last = min(wide, end - p, n - p), min(end, n) - p - 1
                for i in range(max(live, 0), min(wide, end - p)):
                    put(to + 4 * i, np.float32(-inf), F)
                if live <= 0:
                    continue
                near = whole(ids)
                # Pages in a line are foreseen by the processor itself.
                if p + AHEAD + wide <= n and whole(ids + 4 * (AHEAD + wide - 1)) - near != AHEAD + wide - 1:
                    for i in range(wide):
                        fetch_bounds(kmin, kmax, whole(ids + 4 * (i + AHEAD)) * line, line)
                a, b = near * line, whole(ids + 4 * min(1, last)) * line
                c, d = whole(ids + 4 * min(2, last)) * line, whole(ids + 4 * min(3, last)) * line
                for t in range(g(span), g(span + 8)):
                    score_token(kind, wide, q + 4 * dim * heads * t, kmin, kmax, a, b, c, d, dim, group, adds, room)
                    for i in range(live):
                        x = one(room + 4 * i, F)
                        put(to + 4 * i, x if t == g(span) else max(one(to + 4 * i, F), x), F)

    return callback(2, score)


def run(
    q: Tensor,
    kmin: Tensor,
    kmax: Tensor,
    table: Tensor,
    length: Tensor,
    page: int,
    spans: tuple[int, ...],
    reduce: Literal["max", "sum"] = "max",
) -> Tensor:
    (_, heads, dim), (rows, columns) = q.shape, table.shape
    q, table, length = dense(q), dense(table), dense(length)
    out, cuts = torch.empty(rows, columns), chunks() if rows * columns * dim > SMALL else 1
    (space, held), edges = room(ROOM * cuts), array("q", spans)
    bounds = (q.data_ptr(), kmin.data_ptr(), kmax.data_ptr(), table.data_ptr(), length.data_ptr(), edges.buffer_info()[0])
    sizes = (rows // (len(spans) - 1), rows, columns, page, (len(spans) - 1) * heads // max(rows, 1), dim)
    block = array("q", (*bounds, *sizes, int(reduce == "sum"), out.data_ptr(), cuts, space))
    call_(launch, (0, 0, 0, scorer(kmin.dtype).address, 0, block.buffer_info()[0], cuts, 0, 1), q, table, length, edges, block, held)
    return out
