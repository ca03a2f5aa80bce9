"""row_mass on the CPU: a thread takes a tile of a row's keys and sums the weights that all of the request's queries give it."""

from __future__ import annotations

from array import array
from functools import cache
from math import inf

import numpy as np
import torch
from numba.core.ccallback import CFunc
from torch import Tensor

from ..attend_rows.cpu import keys_of, problem
from ..panels import callback, version
from ..schedule import STORED, at, dense, job_of, launch, make_block, numbers
from ..simd import F, add, exp2, get64, load, one, splat, store, sub, take, whole
from ..threads import chunks, helper
from ..tiles import (
    GROUP,
    LOG2E,
    STACK,
    TILE,
    Stack,
    bend,
    extent,
    hide,
    open_stack,
    room_at,
    room_bytes,
    score_panels,
    unpack_tile,
    weigh,
)


def can(
    q: Tensor,
    kp: Tensor,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    *rest: object,
    **kw: object,
) -> str | None:
    if kp.dtype not in STORED:
        return f"pages of {kp.dtype} have no kernel"
    if not kp.is_contiguous():
        return "the pool is not contiguous"
    return problem(q, kp.shape[1], kp.shape[2], table, length, spans, lo, hi)


@cache
def weigher() -> CFunc:
    """(block, scratch): take tiles until there are none."""
    sources = version()

    def work(block, scratch):  # type: ignore[no-untyped-def]
        x, y, z = numbers(block)
        job = job_of(block)
        room = room_at(scratch, x.dim)
        tiles, per, step = job.count // job.rows, job.rows // job.requests, max(1, STACK // job.group)
        while sources:
            i = take(job.taken)
            if i >= job.count:
                return
            row, t = i // tiles, i % tiles * TILE
            end = min(t + TILE, y.columns * y.page)
            filled = min(end, whole(y.length + 4 * row))
            for c in range(0, TILE, 8):
                store(room.v + 4 * c, splat(np.float32(0)), F)
            fresh = True
            span = job.spans + row // per * 8
            for first in range(get64(span), get64(span + 8), step):
                tokens = min(step, get64(span + 8) - first)
                s = Stack(row, first, tokens * job.group, row % per * job.group, job.group, 0)
                a, b = open_stack(x, y, z, s, room)
                if max(a, t) >= min(b, end):
                    continue
                if fresh:
                    fresh = False
                    unpack_tile(x, y, row, t, filled, room)
                    if z.weight:
                        weigh(y, z, row, t, filled, room)
                for r in range(0, s.rows, GROUP):
                    add_weights(x, y, z, s, r, min(GROUP, s.rows - r), t, end, room)
            for c in range(0, end - t, 8):
                store(x.out + 4 * (row * y.columns * y.page + t + c), load(room.v + 4 * c, F), F)

    return callback(2, work)


@helper
def add_weights(x, y, z, s, i, n, t, end, room):  # type: ignore[no-untyped-def]
    """Add what the rows i to i + n of the stack give to the tile's keys to the sums, which stand where values would."""
    first, last = extent(i, n, t, end, room)
    if first >= last:
        return
    c0, c1 = first // 16 * 16 - t, (last - t + 7) // 8 * 8
    score_panels(x, y, i, n, t, c0 + t, last, room)
    for r in range(i, i + n):
        row = room.s + 4 * (r - i) * TILE
        bend(x, z, row, c0, c1, room)
        u, v = max(get64(room.seen + 16 * r), first), min(get64(room.seen + 16 * r + 8), last)
        hide(row, c0, max(u - t, c0), min(v - t, c1), c1)
        norm = one(x.lse + 4 * ((s.first + r // s.wide) * x.heads + s.head + r % s.wide), F)
        if norm > -inf:
            less = splat(np.float32(norm * LOG2E))
            for c in range(c0, c1, 8):
                sums = room.v + 4 * c
                store(sums, add(load(sums, F), exp2(sub(load(row + 4 * c, F), less))), F)


def run(
    q: Tensor,
    kp: Tensor,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    lse: Tensor,
    scale: float,
    softcap: float = 0.0,
    weight: Tensor | None = None,
) -> Tensor:
    (_, heads, dim), (rows, columns), page = q.shape, table.shape, kp.shape[2]
    q, lse, table, length = dense(q), dense(lse), dense(table), dense(length)
    lo, hi, weight = (None if x is None else dense(x) for x in (lo, hi, weight))
    mass = torch.empty(rows, columns * page)
    workers, room = chunks(), room_bytes(dim)
    memory, edges = torch.empty(workers * room, dtype=torch.uint8), array("q", spans)
    count = rows * -(-columns * page // TILE)
    keys = list(keys_of(kp, kp, table, length))
    keys[1] = 0
    job = (edges.buffer_info()[0], len(spans) - 1, rows, (len(spans) - 1) * heads // max(rows, 1), workers, 0, 0, 0, count, 0)
    sight = (at(lo), at(hi), 0, 0, at(weight))
    block = make_block((q.data_ptr(), mass.data_ptr(), lse.data_ptr()), q, scale, softcap, tuple(keys), sight, job)
    launch(0, 0, 0, weigher().address, 0, block.buffer_info()[0], workers, memory.data_ptr(), room)
    return mass
