"""attend_blocks on the GPU: a program per head and tile of one query block walks the key blocks that are listed for it, and no others."""

from __future__ import annotations

import functools
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...values import Blocks
from ..triton_tiles import (
    bend,
    capped,
    finish,
    ints,
    levelled,
    load_keys,
    load_queries,
    load_values,
    locate,
    natural,
    near,
    pages_problem,
    pool_problem,
    product,
    sight,
    soften,
    tiling,
)


def can(
    q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, length: Tensor, spans: tuple[int, ...], *rest: object, **kw: object
) -> str | None:
    return pages_problem(q, kp.shape[1], kp.shape[2], table, len(spans) - 1) or pool_problem(kp, vp)


@functools.lru_cache(maxsize=64)
def owners(spans: tuple[int, ...], size: int) -> tuple[int, ...]:
    """(request, first token) of every query block, flat."""
    return tuple(x for b, (a, e) in enumerate(pairwise(spans)) for first in range(a, e, size) for x in (b, first))


@triton.jit
def place(owner, spans, tile, size, M: tl.constexpr, PER: tl.constexpr):
    """Request, query block, tokens int32 [M] and which are real, of a tile: PER tiles cut up a query block."""
    block, part = tile // PER, tile % PER
    request, start = tl.load(owner + 2 * block), tl.load(owner + 2 * block + 1)
    end = tl.minimum(tl.load(spans + request + 1), start + size)
    token = start + part * M + tl.arange(0, M)
    return request, block, token, token < end


@triton.jit
def kernel(
    q, kp, vp, table, length, spans, owner, base, ordinal, lo, hi, index, count, out, lse,
    heads, pages, per, lists, listed, size, gain, cap,
    G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, M: tl.constexpr, T: tl.constexpr, S: tl.constexpr, BLOCK_D: tl.constexpr,
    PER: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    request, block, token, live = place(owner, spans, tl.program_id(0), size, M, PER)
    row, origin = request * per + head // G, tl.load(base + request)
    n = tl.load(length + row)
    first, last = sight(lo, hi, token, live, n)
    if hi is None:
        last = tl.minimum(last, tl.load(ordinal + request) + token - tl.load(spans + request) - origin + 1)
    query, undo = levelled(load_queries(q, token, head, live, heads, D, BLOCK_D), gain)
    top = tl.full((M,), float("-inf"), tl.float32)
    total, acc = tl.zeros((M,), tl.float32), tl.zeros((M, BLOCK_D), tl.float32)
    begin, stop, entry = tl.min(first), tl.max(last), head * lists + block
    for i in range(tl.load(count + entry)):
        left = tl.load(index + entry * listed + i) * size - origin
        for t in range(tl.maximum(left, begin) // T, (tl.minimum(left + size, stop) + T - 1) // T):
            page, slot, j = locate(table + row * pages, t, n, W, T, S)
            at = tl.reshape(j, (T,))
            s = capped(product(query, load_keys(kp, page, slot, j, n, D, W, T, BLOCK_D)) * undo[:, None], cap)
            seen = (at >= left)[None, :] & (at < left + size)[None, :] & (at[None, :] >= first[:, None]) & (at[None, :] < last[:, None])
            p, keep, top, total = soften(s, seen, top, total)
            acc = acc * keep[:, None] + product(p, load_values(vp, page, slot, j, n, D, W, T, BLOCK_D))
    finish(out, lse, acc, total, natural(top, total), token.to(tl.int64) * heads + head, live, tl.arange(0, BLOCK_D), D)


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
    (rows, pages), (_, dim, page), requests = table.shape, kp.shape, len(spans) - 1
    # A tile holds one head here, so it is as tall as a query block and not G times that.
    form = tiling(q, requests * q.shape[1], (0, min(blocks.size, q.shape[0])), dim, page, 0, kp.dtype == torch.float32)
    t = min(form.t, max(triton.next_power_of_2(blocks.size), 16))
    owner, per = owners(spans, blocks.size), -(-blocks.size // form.m)
    q, (gain, cap) = q.contiguous(), bend(scale, softcap)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
    table, length, lo, hi, index, count = near(q, table, length, lo, hi, blocks.index, blocks.count)
    kernel[(len(owner) // 2 * per, q.shape[1])](
        q, kp, vp, table, length, ints(spans, q.device), ints(owner, q.device), ints(tuple(base), q.device),
        ints(tuple(first), q.device), lo, hi, index, count, out, lse,
        q.shape[1], pages, rows // requests, blocks.index.shape[1], blocks.index.shape[2], blocks.size, gain, cap,
        G=requests * q.shape[1] // rows, D=dim, W=page, M=form.m, T=t, S=min(page, t), BLOCK_D=form.block_d, PER=per,
        num_warps=form.warps,
    )  # fmt: skip
    return out, lse
