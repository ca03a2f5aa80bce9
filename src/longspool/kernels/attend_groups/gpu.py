"""attend_groups on the GPU: a program takes one query head over a share of its row's keys; codes are undone in the registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_tiles import bend, capped, cores, finish, ints, merged, natural, near, pages_problem, parts, share, sight, soften


def can(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    kscale: Tensor,
    kzero: Tensor,
    vscale: Tensor,
    vzero: Tensor,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    *rest: object,
    **kw: object,
) -> str | None:
    if kc.dtype != torch.uint8 or q.shape[2] % kscale.shape[2] or q.shape[2] // kscale.shape[2] % 16:
        return f"{kscale.shape[2]} groups of head_dim {q.shape[2]} have no kernel (groups of 16 dims)"
    if not all(x.is_contiguous() for x in (kc, vc, kscale, kzero, vscale, vzero)):
        return "the pool is not contiguous"
    return pages_problem(q, q.shape[2], kc.shape[1], table, len(spans) - 1)


@triton.jit
def undone(codes, scale, zero, slot, d, there, D: tl.constexpr, GROUP: tl.constexpr):
    """Values [BLOCK_D, S] of the tokens `slot` of the pool; kernels/codes.py has the chunks in which nibbles lie."""
    byte = tl.load(codes + slot[None, :] * (D // 2) + (d // 16 * 8 + d % 8)[:, None], mask=there, other=0).to(tl.int32)
    code = tl.where((d % 16 >= 8)[:, None], byte >> 4, byte & 15).to(tl.float32)
    at = slot[None, :] * (D // GROUP) + (d // GROUP)[:, None]
    gain = tl.load(scale + at, mask=there, other=0.0).to(tl.float32)
    return code * gain + tl.load(zero + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def kernel(
    q, kc, vc, kscale, kzero, vscale, vzero, table, length, owner, lo, hi, out, lse, tokens, heads, pages, per, gain, cap,
    G: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, S: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    token, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(owner + token) * per + head // G
    n = tl.load(length + row)
    one, d = tl.zeros((1,), tl.int32) + token, tl.arange(0, BLOCK_D)
    first, last = sight(lo, hi, one, one >= 0, n)
    first, last = tl.min(first), tl.max(last)
    query = tl.load(q + (token.to(tl.int64) * heads + head) * D + d, mask=d < D, other=0.0) * gain
    top, total, acc = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32), tl.zeros((1, BLOCK_D), tl.float32)
    begin, stop = share(first, last, split, S, SPLITS)
    for t in range(begin, stop):
        page, j = tl.load(table + row * pages + t * S // W).to(tl.int64), t * S + tl.arange(0, S)
        slot = page * W + t * S % W + tl.arange(0, S)
        there = (d < D)[:, None] & (j < n)[None, :]
        s = tl.sum(undone(kc, kscale, kzero, slot, d, there, D, GROUP) * query[:, None], 0)
        p, keep, top, total = soften(capped(s[None, :], cap), ((j >= first) & (j < last))[None, :], top, total)
        acc = acc * keep[:, None] + tl.sum(undone(vc, vscale, vzero, slot, d, there, D, GROUP) * p, 1)[None, :]
    at = (split.to(tl.int64) * tokens + one) * heads + head
    finish(out, lse, acc, total, natural(top, total), at, one >= 0, d, D)


def run(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    kscale: Tensor,
    kzero: Tensor,
    vscale: Tensor,
    vzero: Tensor,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    (n, heads, dim), (rows, pages), page = q.shape, table.shape, kc.shape[1]
    requests, size = len(spans) - 1, min(page, 32)
    gain, cap = bend(scale, softcap)
    owner = ints(tuple(b for b in range(requests) for _ in range(spans[b + 1] - spans[b])), q.device)
    splits = max(1, min(2 * cores(q.device) // max(n * heads, 1), -(-pages * page // (4 * size)), 64))
    out, lse = parts(q, splits)
    table, length, lo, hi = near(q, table, length, lo, hi)
    kernel[(n, heads, splits)](
        q.contiguous(), kc, vc, kscale, kzero, vscale, vzero, table, length, owner, lo, hi, out, lse, n, heads, pages, rows // requests,
        gain, cap, G=requests * heads // rows, D=dim, GROUP=dim // kscale.shape[2], W=page, BLOCK_D=triton.next_power_of_2(dim),
        S=size, SPLITS=splits,
    )  # fmt: skip
    return merged(out, lse)
