"""attend_blocks on the CPU: the core of attend_rows, with a stack per head and query block that absorbs its runs of key blocks."""

from __future__ import annotations

from array import array
from functools import cache
from itertools import pairwise

import torch
from numba.core.ccallback import CFunc
from torch import Tensor

from ...values import Blocks
from ..attend_rows.cpu import can as can_rows
from ..attend_rows.cpu import keys_of
from ..panels import callback, version
from ..schedule import TASK, at, attend, dense, launch, put_task
from ..simd import get64, put64, whole
from ..threads import helper
from ..tiles import STACK


def can(
    q: Tensor,
    kp: Tensor,
    vp: Tensor,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    blocks: Blocks,
    *rest: object,
    **kw: object,
) -> str | None:
    return can_rows(q, kp, vp, table, length, spans, lo, hi)


@helper
def add_runs(runs, used, blocks, count, size, origin):  # type: ignore[no-untyped-def]
    """Write neighbouring blocks as one run of in-row indices each; returns how many runs there are."""
    n, i = 0, 0
    while i < count:
        a = whole(blocks + 4 * i)
        i += 1
        b = a + 1
        while i < count and whole(blocks + 4 * i) == b:
            b += 1
            i += 1
        put64(runs + 16 * (used + n), max(a * size - origin, 0))
        put64(runs + 16 * (used + n) + 8, b * size - origin)
        n += 1
    return n


@cache
def plan() -> CFunc:
    """(block, part): a task for every head and query block (or part of one, where it is taller than a stack), and its runs."""
    sources = version()

    def write(block, part):  # type: ignore[no-untyped-def]
        tasks, runs, spans, requests = get64(block), get64(block + 8), get64(block + 16), get64(block + 24)
        rows, heads, index, count = get64(block + 32), get64(block + 40), get64(block + 48), get64(block + 56)
        columns, width, size, base = get64(block + 64), get64(block + 72), get64(block + 80), get64(block + 88)
        n, used = 0, 0
        for head in range(heads if sources else 0):
            column = head * columns
            for b in range(requests):
                first, end = get64(spans + 8 * b), get64(spans + 8 * b + 8)
                row, origin = b * (rows // requests) + head * rows // (heads * requests), get64(base + 8 * b)
                while first < end:
                    fresh = add_runs(runs, used, index + 4 * column * width, whole(count + 4 * column), size, origin)
                    tokens = min(size, end - first)
                    parts = (tokens + STACK - 1) // STACK
                    for k in range(parts):
                        a, c = first + tokens * k // parts, first + tokens * (k + 1) // parts
                        put_task(tasks + TASK * n, row, a, c - a, head, 1, used, fresh, -1, 1)
                        n += 1
                    used += fresh
                    first += tokens
                    column += 1
        put64(block + 96, n)

    return callback(2, write)


def run(
    q: Tensor,
    kp: Tensor,
    vp: Tensor,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    blocks: Blocks,
    base: tuple[int, ...],
    first: tuple[int, ...],
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    table, length = dense(table), dense(length)
    if hi is None:
        hi = torch.cat([torch.arange(b - a) + f + 1 - o for (a, b), o, f in zip(pairwise(spans), base, first, strict=True)])
        hi = hi.to(torch.int32)
    index, count = blocks.index.contiguous(), blocks.count.contiguous()
    most = count.numel() * -(-blocks.size // STACK)
    memory = torch.empty(TASK * most + 16 * int(count.sum()), dtype=torch.uint8)
    tasks = memory.data_ptr()
    edges, origins = array("q", spans), array("q", base)
    pattern = (index.data_ptr(), count.data_ptr(), index.shape[1], index.shape[2], blocks.size, origins.buffer_info()[0])
    job = (tasks, tasks + TASK * most, edges.buffer_info()[0], len(spans) - 1, table.shape[0], q.shape[1])
    block = array("q", (*job, *pattern, 0))
    launch(0, 0, 0, plan().address, 0, block.buffer_info()[0], 1, 0, 0)
    lo, hi = (None if x is None else dense(x) for x in (lo, hi))
    sight, keys = (at(lo), at(hi), 0, 0, 0), keys_of(kp, vp, table, length)
    return attend(q, spans, table.shape[0], keys, sight, scale, softcap, (tasks, tasks + TASK * most, block[-1]))
