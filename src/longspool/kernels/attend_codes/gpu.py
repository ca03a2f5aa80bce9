"""attend_codes on the GPU: codes are multiplied as they are. A page's key scales go into the queries, and its zeros into one number per
query; value scales go into the softmax weights. Nibbles are not put in order: the tokens and dims are counted in the codes' own order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..triton_tiles import (
    bend,
    capped,
    finish,
    ints,
    levelled,
    load_queries,
    merged,
    natural,
    near,
    pages_problem,
    parts,
    product,
    share,
    sight,
    soften,
    stacked,
    tiling,
)


def can(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    kscale: Tensor,
    kzero: Tensor | None,
    vscale: Tensor,
    vzero: Tensor | None,
    bits: int,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    *rest: object,
    **kw: object,
) -> str | None:
    dim = q.shape[2]
    if bits not in (4, 8) or (bits == 4 and dim % 16):
        return f"codes of {bits} bits with head_dim {dim} have no kernel"
    if not (kc.is_contiguous() and vc.is_contiguous()):
        return "the pool is not contiguous"
    return pages_problem(q, dim, vscale.shape[1], table, len(spans) - 1)


@triton.jit
def order(c, BITS: tl.constexpr):
    """Which code of a row stands at place c when its bytes are taken apart, the low nibble first (kernels/codes.py has the chunks)."""
    if BITS == 4:
        c = c // 16 * 16 + c % 2 * 8 + c % 16 // 2
    return c


@triton.jit
def spread(codes, BITS: tl.constexpr):
    """Bytes [A, B] as fp16 numbers [A, B * 8 / BITS], exactly."""
    if BITS == 4:
        codes = tl.interleave(codes & 15, codes >> 4)
    return codes.to(tl.float16)


@triton.jit
def score(query, undo, kc, kscale, kzero, page, slot, D: tl.constexpr, W: tl.constexpr, S: tl.constexpr, BLOCK_D: tl.constexpr,
          BITS: tl.constexpr):  # fmt: skip
    """Logits [M, S] of a part of a page, in the codes' order."""
    each: tl.constexpr = 8 // BITS
    d = tl.arange(0, BLOCK_D)
    at = page * (D * W // each) + d[:, None] * (W // each) + (slot // each + tl.arange(0, S // each))[None, :]
    codes = spread(tl.load(kc + at, mask=(d < D)[:, None], other=0), BITS)
    scale = tl.load(kscale + page * D + d, mask=d < D, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(scale))
    s = product(query * (scale / most)[None, :], codes) * (undo * most)[:, None]
    if BITS == 4:
        zero = tl.load(kzero + page * D + d, mask=d < D, other=0.0).to(tl.float32)
        s += (tl.sum(query * zero[None, :], 1) * undo)[:, None]
    return s


@triton.jit
def blend(acc, p, vc, vscale, vzero, page, slot, seen, D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BITS: tl.constexpr):
    """acc plus the weights p [M, S] times the values of the tokens `slot` [S] of a page."""
    each: tl.constexpr = 8 // BITS
    y = tl.arange(0, BLOCK_D // each)
    at = page * (D * W // each) + slot[:, None] * (D // each) + y[None, :]
    codes = spread(tl.load(vc + at, mask=(y < D // each)[None, :], other=0), BITS)
    scale = tl.load(vscale + page * W + slot, mask=seen, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(scale)), 1e-30)
    acc += product(p * (scale / most)[None, :], codes) * most
    if BITS == 4:
        zero = tl.load(vzero + page * W + slot, mask=seen, other=0.0).to(tl.float32)
        acc += tl.sum(p * zero[None, :], 1)[:, None]
    return acc


@triton.jit
def kernel(
    q, kc, vc, kscale, kzero, vscale, vzero, table, length, spans, lo, hi, out, lse, tokens, heads, pages, per, gain, cap,
    G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, M: tl.constexpr, S: tl.constexpr, BLOCK_D: tl.constexpr, BITS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    tile, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, head, live, a, b = stacked(spans, row, per, tile, G, M)
    if a + tile * M // G >= b:
        return
    n = tl.load(length + row)
    first, last = sight(lo, hi, token, live, n)
    query, undo = levelled(load_queries(q, token, head, live, heads, D, BLOCK_D), gain)
    top = tl.full((M,), float("-inf"), tl.float32)
    total, acc = tl.zeros((M,), tl.float32), tl.zeros((M, BLOCK_D), tl.float32)
    place = order(tl.arange(0, S), BITS)
    begin, stop = share(tl.min(first), tl.max(last), split, S, SPLITS)
    for t in range(begin, stop):
        page, slot = tl.load(table + row * pages + t * S // W).to(tl.int64), t * S % W
        j = t * S + place
        s = capped(score(query, undo, kc, kscale, kzero, page, slot, D, W, S, BLOCK_D, BITS), cap)
        seen = (j[None, :] >= first[:, None]) & (j[None, :] < last[:, None])
        p, keep, top, total = soften(s, seen, top, total)
        acc = blend(acc * keep[:, None], p, vc, vscale, vzero, page, slot + place, j < n, D, W, BLOCK_D, BITS)
    at = (split.to(tl.int64) * tokens + token) * heads + head
    finish(out, lse, acc, total, natural(top, total), at, live, order(tl.arange(0, BLOCK_D), BITS), D)


def run(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    kscale: Tensor,
    kzero: Tensor | None,
    vscale: Tensor,
    vzero: Tensor | None,
    bits: int,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    (rows, pages), page, dim = table.shape, vscale.shape[1], q.shape[2]
    form = tiling(q, rows, spans, dim, page, pages * page, False)
    q, (gain, cap) = q.contiguous(), bend(scale, softcap)
    out, lse = parts(q, form.splits)
    scales, (table, length, lo, hi) = near(q, kscale, kzero, vscale, vzero), near(q, table, length, lo, hi)
    kernel[(form.tiles, rows, form.splits)](
        q, kc, vc, *scales, table, length, ints(spans, q.device), lo, hi, out, lse,
        q.shape[0], q.shape[1], pages, rows // (len(spans) - 1), gain, cap,
        G=form.group, D=dim, W=page, M=form.m, S=form.s, BLOCK_D=form.block_d, BITS=bits, SPLITS=form.splits, num_warps=form.warps,
    )  # fmt: skip
    return merged(out, lse)
