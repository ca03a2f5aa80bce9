"""attend_rows on the GPU: an online softmax over the pages of a row, its query heads stacked; few queries split a row's pages among
many programs and merge what these found."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..append_rows import gpu as append_rows
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
    merged,
    natural,
    near,
    pages_problem,
    parts,
    pool_problem,
    product,
    share,
    sight,
    soften,
    stacked,
    tiling,
    weighed,
)


def can(
    q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, length: Tensor, spans: tuple[int, ...], *rest: object, **kw: object
) -> str | None:
    return pages_problem(q, kp.shape[1], kp.shape[2], table, len(spans) - 1) or pool_problem(kp, vp)


@triton.jit
def branch(seen, tree, token, live, j, end, own, width):
    """Leave of the request's own tokens, the last `own` below `end`, those that the tree lets a query see."""
    column = j - (end - own)
    asked = live[:, None] & (column >= 0)[None, :] & (column < width)[None, :]
    allowed = tl.load(tree + token.to(tl.int64)[:, None] * width + column[None, :], mask=asked, other=0)
    return seen & ((column < 0)[None, :] | (allowed != 0))


@triton.jit
def kernel(
    q, kp, vp, table, length, spans, lo, hi, weight, tree, out, lse,
    tokens, heads, pages, per, branches, gain, cap,
    G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, M: tl.constexpr, T: tl.constexpr, S: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    tile, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, head, live, a, b = stacked(spans, row, per, tile, G, M)
    if a + tile * M // G >= b:
        return
    n = tl.load(length + row)
    first, last = sight(lo, hi, token, live, n)
    query, undo = levelled(load_queries(q, token, head, live, heads, D, BLOCK_D), gain)
    end = n
    if tree is not None and hi is not None:
        end = tl.load(hi + a)
    top = tl.full((M,), float("-inf"), tl.float32)
    total, acc = tl.zeros((M,), tl.float32), tl.zeros((M, BLOCK_D), tl.float32)
    begin, stop = share(tl.min(first), tl.max(last), split, T, SPLITS)
    for t in range(begin, stop):
        page, slot, j = locate(table + row * pages, t, n, W, T, S)
        at = tl.reshape(j, (T,))
        s = product(query, load_keys(kp, page, slot, j, n, D, W, T, BLOCK_D)) * undo[:, None]
        s = capped(s, cap)
        if weight is not None:
            s = weighed(s, weight, page, slot, j, n, W, T)
        seen = (at[None, :] >= first[:, None]) & (at[None, :] < last[:, None])
        if tree is not None:
            seen = branch(seen, tree, token, live, at, end, b - a, branches)
        p, keep, top, total = soften(s, seen, top, total)
        acc = acc * keep[:, None] + product(p, load_values(vp, page, slot, j, n, D, W, T, BLOCK_D))
    at = (split.to(tl.int64) * tokens + token) * heads + head
    finish(out, lse, acc, total, natural(top, total), at, live, tl.arange(0, BLOCK_D), D)


def run(
    q: Tensor,
    kp: Tensor,
    vp: Tensor,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    weight: Tensor | None = None,
    tree: Tensor | None = None,
    fresh: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    if fresh is not None:
        k, v, offset = fresh
        append_rows.run(kp, vp, table, length - offset.diff().to(length), k, v, offset)
    _, dim, page = kp.shape
    rows, pages = table.shape
    form = tiling(q, rows, spans, dim, page, pages * page, kp.dtype == torch.float32)
    q, (gain, cap) = q.contiguous(), bend(scale, softcap)
    out, lse = parts(q, form.splits)
    table, length, lo, hi, weight, mask = near(q, table, length, lo, hi, weight, None if tree is None else tree.view(torch.uint8))
    kernel[(form.tiles, rows, form.splits)](
        q, kp, vp, table, length, ints(spans, q.device), lo, hi, weight, mask, out, lse,
        q.shape[0], q.shape[1], pages, rows // (len(spans) - 1), 0 if tree is None else tree.shape[1], gain, cap,
        G=form.group, D=dim, W=page, M=form.m, T=form.t, S=form.s, BLOCK_D=form.block_d, SPLITS=form.splits,
        num_warps=form.warps,
    )  # fmt: skip
    return merged(out, lse)
