"""Cuts attention into tasks for the threads and runs them: tall stacks of queries, or short ones that share a long row's keys.

A call is a block of int64 numbers at an address. `plan` (rows) or the caller (blocks) writes the tasks, `work` takes them one by one
until none is left, `join` merges the stacks that were cut into pieces. All three are C functions, compiled once for every op.
"""

from __future__ import annotations

from array import array
from functools import cache, lru_cache
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from numba import prange
from numba.core.ccallback import CFunc
from torch import Tensor

from .panels import callback, version
from .record import run
from .room import room
from .simd import F, exp2, float_at, fma, get64, invoke, lane, load, mul, one, put, put64, splat, store, take, whole
from .threads import chunks, helper, pnjit, use_threads
from .tiles import LOG2E, STACK, Keys, Queries, Sight, Stack, absorb, close_stack, open_stack, room_at, room_bytes, settle

PIECES = 8  # per thread, so that the last ones to finish wait little
SHORTEST = 256  # keys a piece must have
TASK = 8 * 9  # bytes


class Job(NamedTuple):
    """What the threads share. Addresses of int64: spans [B+1], tasks [count, 9], runs [.., 2]; of floats: partial."""

    spans: int
    requests: int
    rows: int
    group: int
    workers: int
    tasks: int
    runs: int
    partial: int
    count: int
    taken: int  # tasks that some thread has begun


class Task(NamedTuple):
    """Tokens first to first + tokens, heads head to head + wide, against `ranges` pairs of `runs` from `run` on.

    `slot` is where a piece of a cut stack keeps its sums, in rows of `partial`, or -1; `pieces` is told by the stack's first piece.
    """

    row: int
    first: int
    tokens: int
    head: int
    wide: int
    run: int
    ranges: int
    slot: int
    pieces: int


@helper
def numbers(at):  # type: ignore[no-untyped-def]
    """The tuples of a call's block."""
    g = get64
    x = Queries(g(at), g(at + 8), g(at + 16), g(at + 24), g(at + 32), float_at(at + 40), float_at(at + 48))
    a, b = at + 56, at + 112
    low = (g(a), g(a + 8), g(a + 16), g(a + 24), g(a + 32), g(a + 40), g(a + 48))
    y = Keys(*low, g(b), g(b + 8), g(b + 16), g(b + 24), g(b + 32), g(b + 40), g(b + 48), g(b + 56))
    c = at + 176
    return x, y, Sight(g(c), g(c + 8), g(c + 16), g(c + 24), g(c + 32))


JOB = 8 * 27  # where it begins in a block


@helper
def job_of(at):  # type: ignore[no-untyped-def]
    g, a, b = get64, at + JOB, at + JOB + 40
    return Job(g(a), g(a + 8), g(a + 16), g(a + 24), g(a + 32), g(b), g(b + 8), g(b + 16), g(b + 24), b + 32)


@helper
def task_at(job, i):  # type: ignore[no-untyped-def]
    g, a = get64, job.tasks + TASK * i
    return Task(g(a), g(a + 8), g(a + 16), g(a + 24), g(a + 32), g(a + 40), g(a + 48), g(a + 56), g(a + 64))


@helper
def put_task(at, row, first, tokens, head, wide, run, ranges, slot, pieces):  # type: ignore[no-untyped-def]
    put64(at, row)
    put64(at + 8, first)
    put64(at + 16, tokens)
    put64(at + 24, head)
    put64(at + 32, wide)
    put64(at + 40, run)
    put64(at + 48, ranges)
    put64(at + 56, slot)
    put64(at + 64, pieces)


@helper
def add_task(job, i, row, first, tokens, a, b, slot, pieces):  # type: ignore[no-untyped-def]
    """Task i, whose one run is a to b, for all heads of the row."""
    head = row % (job.rows // job.requests) * job.group
    put_task(job.tasks + TASK * i, row, first, tokens, head, job.group, i, 1, slot, pieces)
    put64(job.runs + 16 * i, a)
    put64(job.runs + 16 * i + 8, b)


@helper
def seen_by(y, z, row, first, count):  # type: ignore[no-untyped-def]
    """The range of the row's keys that any of the tokens sees."""
    length = whole(y.length + 4 * row)
    a, b = (length if z.lo else 0), (0 if z.hi else length)
    for t in range(first, first + count):
        if z.lo:
            a = min(a, max(whole(z.lo + 4 * t), 0))
        if z.hi:
            b = max(b, min(whole(z.hi + 4 * t), length))
    return a, max(a, b)


@cache
def plan() -> CFunc:
    """(block): one task per stack, or several with a part of the keys each where stacks are few."""

    sources = version()

    def write(block):  # type: ignore[no-untyped-def]
        _, y, z = numbers(block)
        job = job_of(block)
        step, per = max(1, STACK // job.group), job.rows // job.requests
        share = 0
        for measured in range(2 if sources else 0):
            cost, n, slots = 0, 0, 0
            for row in range(job.rows):
                span = job.spans + row // per * 8
                end = get64(span + 8)
                for first in range(get64(span), end, step):
                    tokens = min(step, end - first)
                    a, b = seen_by(y, z, row, first, tokens)
                    cost += tokens * (b - a)
                    if not measured:
                        continue
                    pieces = max(1, min((tokens * (b - a) + share - 1) // share, (b - a) // SHORTEST)) if job.workers > 1 else 1
                    size = max(((b - a + pieces - 1) // pieces + 127) // 128 * 128, 1)
                    pieces = max(1, (b - a + size - 1) // size)
                    for k in range(pieces):
                        slot = slots + k * tokens * job.group if pieces > 1 else -1
                        add_task(job, n, row, first, tokens, a + k * size, min(a + (k + 1) * size, b), slot, 0 if k else pieces)
                        n += 1
                    slots += pieces * tokens * job.group if pieces > 1 else 0
            share = cost // (job.workers * PIECES) + 1
        put64(block + JOB + 64, n)
        put64(job.taken, 0)  # a block may be run again

    return callback(1, write)


@cache
def work() -> CFunc:
    """(block, scratch): take tasks until there are none."""

    sources = version()

    def run(block, scratch):  # type: ignore[no-untyped-def]
        x, y, z = numbers(block)
        job = job_of(block)
        room = room_at(scratch, x.dim)
        while sources:
            i = job.count - 1 - take(job.taken)  # from the end: causal work grows, and the largest should not come last
            if i < 0:
                return
            t = task_at(job, i)
            span = job.spans + t.row // (job.rows // job.requests) * 8
            start, end = get64(span), get64(span + 8)
            top = whole(z.hi + 4 * start) if z.hi else whole(y.length + 4 * t.row)
            s = Stack(t.row, t.first, t.tokens * t.wide, t.head, t.wide, top - (end - start))
            u, v = open_stack(x, y, z, s, room)
            for k in range(t.run, t.run + t.ranges):
                absorb(x, y, z, s, max(get64(job.runs + 16 * k), u), min(get64(job.runs + 16 * k + 8), v), room)
            if t.slot < 0:
                close_stack(x, s, room)
            else:
                lay_by(s, room, job.partial + 4 * t.slot * (room.wide + 8))

    return callback(2, run)


@helper
def lay_by(s, room, at):  # type: ignore[no-untyped-def]
    """Keep a piece's sums: per query row the padded dims, then top, mass and zero."""
    for i in range(s.rows):
        for d in range(0, room.wide, 8):
            store(at + 4 * d, load(room.o + 4 * (i * room.wide + d), F), F)
        tail = at + 4 * room.wide
        put(tail, one(room.top + 4 * i, F), F)
        put(tail + 4, one(room.mass + 4 * i, F), F)
        put(tail + 8, one(room.zero + 4 * i, F), F)
        at += 4 * (room.wide + 8)


@cache
def join() -> CFunc:
    """(block): merge the pieces of every stack that was cut into its first piece, and write the results."""

    sources = version()

    def merge(block):  # type: ignore[no-untyped-def]
        x, _, _ = numbers(block)
        job = job_of(block)
        wide = (x.dim + 15) // 16 * 16
        line = 4 * (wide + 8)
        for n in range(job.count if sources else 0):
            t = task_at(job, n)
            if t.slot >= 0 and t.pieces > 0:
                rows = t.tokens * t.wide
                for i in range(rows):
                    at = job.partial + line * (t.slot + i)
                    for k in range(1, t.pieces):
                        blend(at, at + line * k * rows, wide)
                    where = (t.first + i // t.wide) * x.heads + t.head + i % t.wide
                    settle(x, at, at + 4 * wide, at + 4 * wide + 4, at + 4 * wide + 8, where)

    return callback(1, merge)


@helper
def blend(at, other, wide):  # type: ignore[no-untyped-def]
    """Add the sums at `other` to those at `at`, each by its own largest logit."""
    a, b = one(at + 4 * wide, F), one(other + 4 * wide, F)
    top = max(a, b)
    base = top if top > -inf else np.float32(0)
    u, v = exp2(splat(np.float32(a - base))), exp2(splat(np.float32(b - base)))
    for d in range(0, wide, 8):
        store(at + 4 * d, fma(load(other + 4 * d, F), v, mul(load(at + 4 * d, F), u)), F)
    put(at + 4 * wide, top, F)
    for d in (wide + 1, wide + 2):
        put(at + 4 * d, one(at + 4 * d, F) * lane(u) + one(other + 4 * d, F) * lane(v), F)


@pnjit
def launch(first, given, before, during, after, block, workers, scratch, each):  # type: ignore[no-untyped-def]
    """Run C functions: first(given, 0), before(block), during(block, scratch) on every thread, after(block). 0 stands for none."""
    if first:
        invoke(first, (given, 0))
    if before:
        invoke(before, (block,))
    if workers == 1:
        invoke(during, (block, scratch))
    else:
        use_threads(workers)
        for w in prange(workers):
            invoke(during, (block, scratch + w * each))
    if after:
        invoke(after, (block,))


@cache
def stages() -> tuple[int, int, int]:
    """The addresses of plan, work and join."""
    return plan().address, work().address, join().address


STORED = (torch.float32, torch.float16, torch.bfloat16)


def dense(x: Tensor) -> Tensor:
    """For kernels that see addresses only."""
    return x if x.is_contiguous() else x.contiguous()


def at(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def whole_numbers(x: Tensor) -> Tensor:
    """As contiguous int64, without a copy where it is that already."""
    return x.to(torch.int64).contiguous()


@lru_cache(maxsize=256)
def space(spans: tuple[int, ...], rows: int, group: int, workers: int) -> tuple[int, int]:
    """The most tasks that `plan` writes, and the most rows of partial sums."""
    step = max(1, STACK // group)
    stacks, longest = 0, 0
    for a, b in pairwise(spans):
        stacks, longest = stacks + (b - a + step - 1) // step, max(longest, b - a)
    cut = workers * PIECES
    return stacks * (rows // (len(spans) - 1)) + cut + 1, 2 * cut * min(STACK, longest * group) if workers > 1 else 0


def make_block(
    addresses: tuple[int, int, int],
    q: Tensor,
    scale: float,
    softcap: float,
    keys: tuple[int, ...],
    sight: tuple[int, ...],
    job: tuple[int, ...],
) -> array:
    """The numbers of a call: addresses of q, out and lse; keys, sight and job are the numbers of Keys, Sight and Job."""
    return array("q", (*addresses, q.shape[1], q.shape[2], *bent(scale, softcap), *keys, *sight, *job))


@lru_cache(maxsize=64)
def bent(scale: float, softcap: float) -> tuple[int, ...]:
    """Gain and cap of Queries, doubles as the int64 of the same bits."""
    gain, cap = (scale / softcap, softcap * LOG2E) if softcap > 0 else (scale * LOG2E, 0.0)
    return tuple(np.array((gain, cap)).view(np.int64).tolist())


def attend(
    q: Tensor,
    spans: tuple[int, ...],
    rows: int,
    keys: tuple[int, ...],
    sight: tuple[int, ...],
    scale: float,
    softcap: float,
    given: tuple[int, int, int] | None = None,
    first: tuple[int, int] = (0, 0),
) -> tuple[Tensor, Tensor]:
    """out and lse over the rows. keys and sight as in make_block; given: tasks, runs and count, else planned here; first: what to call
    before, with which block."""
    n, heads, dim = q.shape
    q, out, lse = q.contiguous(), torch.empty(n, heads, dim), torch.empty(n, heads)
    if n == 0:
        return out, lse
    workers, each, group = chunks(), room_bytes(dim), (len(spans) - 1) * heads // rows
    tasks, partial = (0, 0) if given else space(spans, rows, group, workers)
    sums, scratch = TASK * tasks + 16 * tasks, TASK * tasks + 16 * tasks + 4 * partial * (dim + 24)
    (at, held), edges = room(scratch + workers * each), array("q", spans)
    plans, runs, count = given or (at, at + TASK * tasks, 0)
    job = (edges.buffer_info()[0], len(spans) - 1, rows, group, workers, plans, runs, at + sums, count, 0)
    block = make_block((q.data_ptr(), out.data_ptr(), lse.data_ptr()), q, scale, softcap, keys, sight, job)
    before, during, after = stages()
    if given:
        before, after = 0, 0
    numbers = (*first, before, during, after, block.buffer_info()[0], workers, at + scratch, each)
    run(launch, numbers, q, out, lse, edges, block, held)
    return out, lse
