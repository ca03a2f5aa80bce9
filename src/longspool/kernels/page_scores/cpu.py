"""page_scores on the CPU: each thread streams through the bounds of its part of the pages.

For kmin <= kmax, max(q*kmin, q*kmax) is the positive part of q times kmax plus the negative part times kmin: two plain products.
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
from ..schedule import launch
from ..simd import BYTES, I64, KIND, V8F, F, call, const, fold, get64, one, pointer, prefetch, put, read, size, whole
from ..threads import chunks

AT_ONCE = 4  # query heads
AHEAD = 12  # pages whose bounds are fetched before they are needed


def can(q: Tensor, kmin: Tensor, kmax: Tensor, *rest: object, **kw: object) -> str | None:
    if kmin.dtype not in (torch.float32, torch.float16) or kmax.dtype != kmin.dtype:
        return f"bounds of {kmin.dtype} and {kmax.dtype} have no kernel"
    if q.shape[2] % 8:
        return f"head_dim {q.shape[2]} is no multiple of 8"
    return None if kmin.is_contiguous() and kmax.is_contiguous() else "the bounds are not contiguous"


@intrinsic
def bound(typingctx, kind, rows, parts, kmin, kmax, dim, out):  # type: ignore[no-untyped-def]
    """out[row] = parts[row, 0] . kmax + parts[row, 1] . kmin for 1 to AT_ONCE rows of parts, float [rows, 2, dim]."""
    sig = types.void(kind, rows, parts, kmin, kmax, dim, out)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        done = builder.append_basic_block("bounds.end")
        choice = builder.switch(args[1], done)
        for n in range(1, AT_ONCE + 1):
            start = builder.append_basic_block(f"bound.{n}")
            choice.add_case(ir.Constant(I64, n), start)
            builder.position_at_end(start)
            _bound(builder, kind, n, *args[2:])
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return sig, codegen


def _bound(builder, kind, rows, parts, kmin, kmax, dim, out):  # type: ignore[no-untyped-def]
    entry, loop, done = builder.block, builder.append_basic_block("dims"), builder.append_basic_block("dims.end")
    line = builder.shl(dim, ir.Constant(I64, 2))
    builder.branch(loop)
    builder.position_at_end(loop)
    d = builder.phi(I64)
    d.add_incoming(ir.Constant(I64, 0), entry)
    old, new = [builder.phi(V8F) for _ in range(rows)], []
    offset = builder.mul(d, ir.Constant(I64, BYTES[kind]))
    high, low = read(builder, builder.add(kmax, offset), kind), read(builder, builder.add(kmin, offset), kind)
    at = builder.add(parts, builder.shl(d, ir.Constant(I64, 2)))
    for row in range(rows):
        value = old[row]
        for side in (high, low):
            value = call(builder, "fma", builder.load(pointer(builder, at, V8F), align=4), side, value)
            at = builder.add(at, line)
        new.append(value)
        old[row].add_incoming(const(0), entry)
        old[row].add_incoming(value, loop)
    after = builder.add(d, ir.Constant(I64, 8))
    d.add_incoming(after, loop)
    builder.cbranch(builder.icmp_signed("<", after, dim), loop, done)
    builder.position_at_end(done)
    for row, value in enumerate(new):
        where = pointer(builder, builder.add(out, ir.Constant(I64, 4 * row)), ir.FloatType())
        builder.store(fold(lambda b, x, y: b.fadd(x, y))(builder, value), where, align=4)


@cache
def scorer(dtype: torch.dtype) -> CFunc:
    """(block, part): the pages of one part of `parts`, counted over all rows."""
    kind, sources = KIND[dtype], version()

    def score(block, part):  # type: ignore[no-untyped-def]
        parts, kmin, kmax, table, length = get64(block), get64(block + 8), get64(block + 16), get64(block + 24), get64(block + 32)
        spans, per, rows, columns, page = get64(block + 40), get64(block + 48), get64(block + 56), get64(block + 64), get64(block + 72)
        group, dim, adds, out, cuts = get64(block + 80), get64(block + 88), get64(block + 96), get64(block + 104), get64(block + 112)
        room = get64(block + 120) + 4 * AT_ONCE * part
        for i in range(rows * columns * part // cuts, rows * columns * (part + 1) // cuts if sources else 0):
            row, p = i // columns, i % columns
            a, b = get64(spans + row // per * 8), get64(spans + row // per * 8 + 8)
            best = np.float32(-inf)
            if p * page < whole(length + 4 * row):
                if (p + AHEAD) * page < whole(length + 4 * row):
                    later = whole(table + 4 * (i + AHEAD)) * dim * size(kind)
                    for line in range(0, dim * size(kind), 64):
                        prefetch(kmin + later + line)
                        prefetch(kmax + later + line)
                at = whole(table + 4 * i) * dim * size(kind)
                for t in range(a, b):
                    total = np.float32(0) if adds else np.float32(-inf)
                    for g in range(0, group, AT_ONCE):
                        n = min(AT_ONCE, group - g)
                        q = parts + 8 * dim * ((t * per + row % per) * group + g)
                        bound(kind, n, q, kmin + at, kmax + at, dim, room)
                        for k in range(n):
                            total = total + one(room + 4 * k, F) if adds else max(total, one(room + 4 * k, F))
                    best = max(best, total)
            put(out + 4 * i, best, F)

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
    (n, heads, dim), (rows, columns) = q.shape, table.shape
    signs = torch.empty(n, heads, 2, dim)
    torch.clamp(q, min=0, out=signs[:, :, 0])
    torch.clamp(q, max=0, out=signs[:, :, 1])
    out, cuts = torch.empty(rows, columns), chunks() if rows * columns * dim > SMALL else 1
    room, edges = torch.empty(cuts * AT_ONCE), array("q", spans)
    bounds = (signs.data_ptr(), kmin.data_ptr(), kmax.data_ptr(), table.data_ptr(), length.data_ptr(), edges.buffer_info()[0])
    sizes = (rows // (len(spans) - 1), rows, columns, page, (len(spans) - 1) * heads // max(rows, 1), dim)
    block = array("q", (*bounds, *sizes, int(reduce == "sum"), out.data_ptr(), cuts, room.data_ptr()))
    launch(0, scorer(kmin.dtype).address, 0, block.buffer_info()[0], cuts, 0, 1)
    return out
