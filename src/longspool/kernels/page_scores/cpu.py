"""page_scores on the CPU: each thread streams through the bounds of its part of the pages.

For kmin <= kmax, max(q*kmin, q*kmax) is q times the bound that q's sign chooses: one blend and one multiply-add.
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
from ..simd import BYTES, F32, I64, KIND, V8F, V8I, F, call, const, fold, get64, one, pointer, prefetch, put, read, size, whole
from ..threads import chunks, helper

AT_ONCE = 4  # query heads
AHEAD = 12  # pages whose bounds are fetched before they are needed


def can(q: Tensor, kmin: Tensor, kmax: Tensor, *rest: object, **kw: object) -> str | None:
    if kmin.dtype not in (torch.float32, torch.float16) or kmax.dtype != kmin.dtype:
        return f"bounds of {kmin.dtype} and {kmax.dtype} have no kernel"
    if q.shape[2] % 8:
        return f"head_dim {q.shape[2]} is no multiple of 8"
    return None if kmin.is_contiguous() and kmax.is_contiguous() else "the bounds are not contiguous"


@intrinsic
def bound(typingctx, kind, rows, q, kmin, kmax, dim, out):  # type: ignore[no-untyped-def]
    """out[row] = the sum of max(q[row] * kmin, q[row] * kmax) for 1 to AT_ONCE rows of q, float [rows, dim]."""
    sig = types.void(kind, rows, q, kmin, kmax, dim, out)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        done = builder.append_basic_block("bounds.end")
        # Eight steps at a time where dim allows it: the usual 64 dims make a loop too short to be foreseen.
        odd = builder.icmp_signed("!=", builder.and_(args[5], ir.Constant(I64, 63)), ir.Constant(I64, 0))
        choice = builder.switch(builder.add(builder.shl(args[1], ir.Constant(I64, 1)), builder.zext(odd, I64)), done)
        for n in range(1, AT_ONCE + 1):
            for steps in (8, 1):
                start = builder.append_basic_block(f"bound.{n}.{steps}")
                choice.add_case(ir.Constant(I64, 2 * n + (steps == 1)), start)
                builder.position_at_end(start)
                _bound(builder, kind, n, steps, *args[2:])
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return sig, codegen


def _bound(builder, kind, rows, steps, q, kmin, kmax, dim, out):  # type: ignore[no-untyped-def]
    entry, loop, done = builder.block, builder.append_basic_block("dims"), builder.append_basic_block("dims.end")
    line, zero = builder.shl(dim, ir.Constant(I64, 2)), ir.Constant(I64, 0)
    builder.branch(loop)
    builder.position_at_end(loop)
    d = builder.phi(I64)
    # Two sums a row that take turns, since a multiply-add takes four cycles and there are few rows to fill them.
    turns = [[builder.phi(V8F) for _ in range(rows)] for _ in range(2)]
    elder, younger, at = turns[0], turns[1], d
    for _ in range(steps):
        elder, younger = younger, _fma_bounds(builder, kind, elder, q, line, kmin, kmax, at)
        at = builder.add(at, ir.Constant(I64, 8))
    for phi, first, then in [(d, zero, at), *zip(turns[0] + turns[1], [const(0)] * 2 * rows, elder + younger, strict=True)]:
        phi.add_incoming(first, entry)
        phi.add_incoming(then, loop)
    builder.cbranch(builder.icmp_signed("<", at, dim), loop, done)
    builder.position_at_end(done)
    for row in range(rows):
        where = pointer(builder, builder.add(out, ir.Constant(I64, 4 * row)), F32)
        both = builder.fadd(elder[row], younger[row])
        builder.store(fold(lambda b, x, y: b.fadd(x, y))(builder, both), where, align=4)


def _fma_bounds(builder, kind, sums, q, line, kmin, kmax, d):  # type: ignore[no-untyped-def]
    """sums[row] + q * the bound that q's sign chooses, for eight dims."""
    offset, at = builder.mul(d, ir.Constant(I64, BYTES[kind])), builder.add(q, builder.shl(d, ir.Constant(I64, 2)))
    low, high = (read(builder, builder.add(base, offset), kind) for base in (kmin, kmax))
    out = []
    for old in sums:
        x = builder.load(pointer(builder, at, V8F), align=4)
        negative = builder.icmp_signed("<", builder.bitcast(x, V8I), ir.Constant(V8I, [0] * 8))
        out.append(call(builder, "fma", x, builder.select(negative, low, high), old))
        at = builder.add(at, line)
    return out


@helper
def fetch_bounds(kmin, kmax, at, line):  # type: ignore[no-untyped-def]
    for byte in range(0, line, 64):
        prefetch(kmin + at + byte)
        prefetch(kmax + at + byte)


@helper
def score_token(kind, q, kmin, kmax, dim, group, adds, room):  # type: ignore[no-untyped-def]
    """The sum or the maximum of a page's bounds over the heads of one token."""
    total = np.float32(0) if adds else np.float32(-inf)
    for g in range(0, group, AT_ONCE):
        n = min(AT_ONCE, group - g)
        bound(kind, n, q + 4 * dim * g, kmin, kmax, dim, room)
        for k in range(n):
            total = total + one(room + 4 * k, F) if adds else max(total, one(room + 4 * k, F))
    return total


@cache
def scorer(dtype: torch.dtype) -> CFunc:
    """(block, part): the pages of one part of `parts`, counted over all rows."""
    kind, sources = KIND[dtype], version()

    def score(block, part):  # type: ignore[no-untyped-def]
        g = get64
        queries, kmin, kmax, table, length, spans = g(block), g(block + 8), g(block + 16), g(block + 24), g(block + 32), g(block + 40)
        per, rows, columns, page, group, dim = g(block + 48), g(block + 56), g(block + 64), g(block + 72), g(block + 80), g(block + 88)
        adds, out, cuts, room = g(block + 96), g(block + 104), g(block + 112), g(block + 120) + 4 * AT_ONCE * part
        begin, stop = rows * columns * part // cuts, rows * columns * (part + 1) // cuts
        line, heads = dim * size(kind), per * group
        for row in range(rows if sources else 0):
            span, q = spans + row // per * 8, queries + 4 * dim * (row % per * group)
            n = (whole(length + 4 * row) + page - 1) // page if g(span) < g(span + 8) else 0
            for p in range(max(begin - row * columns, 0), min(stop - row * columns, columns)):
                best = np.float32(-inf)
                if p < n:
                    ids = table + 4 * (row * columns + p)
                    if p + AHEAD < n:
                        fetch_bounds(kmin, kmax, whole(ids + 4 * AHEAD) * line, line)
                    at = whole(ids) * line
                    for t in range(g(span), g(span + 8)):
                        best = max(best, score_token(kind, q + 4 * dim * heads * t, kmin + at, kmax + at, dim, group, adds, room))
                put(out + 4 * (row * columns + p), best, F)

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
    (space, held), edges = room(4 * cuts * AT_ONCE), array("q", spans)
    bounds = (q.data_ptr(), kmin.data_ptr(), kmax.data_ptr(), table.data_ptr(), length.data_ptr(), edges.buffer_info()[0])
    sizes = (rows // (len(spans) - 1), rows, columns, page, (len(spans) - 1) * heads // max(rows, 1), dim)
    block = array("q", (*bounds, *sizes, int(reduce == "sum"), out.data_ptr(), cuts, space))
    call_(launch, (0, 0, 0, scorer(kmin.dtype).address, 0, block.buffer_info()[0], cuts, 0, 1), q, table, length, edges, block, held)
    return out
