"""attend_books on the GPU: a program takes one query head over a share of its row's keys. Torch makes the products with all vectors of the
keys' book before; the values' vectors are fetched by their codes, dim by dim."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_tiles import bend, capped, cores, finish, ints, merged, natural, near, pages_problem, parts, share, sight, soften


def can(
    q: Tensor, kc: Tensor, vc: Tensor, kbook: Tensor, vbook: Tensor, table: Tensor, length: Tensor, spans: tuple[int, ...], *rest: object,
    **kw: object,
) -> str | None:  # fmt: skip
    if kc.dtype != torch.uint8 or not all(x.is_contiguous() for x in (kc, vc, kbook, vbook)):
        return f"codes of {kc.dtype}, or a pool or book that is not contiguous, have no kernel"
    return pages_problem(q, q.shape[2], kc.shape[2], table, len(spans) - 1)


@triton.jit
def kernel(
    lut, kc, vc, vbook, table, length, owner, lo, hi, out, lse, tokens, heads, pages, per, cap,
    G: tl.constexpr, D: tl.constexpr, CUT: tl.constexpr, C: tl.constexpr, W: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, S: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    token, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(owner + token) * per + head // G
    n = tl.load(length + row)
    one = tl.zeros((1,), tl.int32) + token
    first, last = sight(lo, hi, one, one >= 0, n)
    first, last = tl.min(first), tl.max(last)
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    products = lut + ((token.to(tl.int64) * heads + head) * M + m) * C
    top, total, acc = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32), tl.zeros((1, BLOCK_D), tl.float32)
    begin, stop = share(first, last, split, S, SPLITS)
    for t in range(begin, stop):
        page, slot = tl.load(table + row * pages + t * S // W).to(tl.int64), t * S % W + tl.arange(0, S)
        j = t * S + tl.arange(0, S)
        there = (m < M)[:, None] & (j < n)[None, :]
        codes = tl.load(kc + page * (M * W) + m[:, None] * W + slot[None, :], mask=there, other=0).to(tl.int32)
        s = capped(tl.sum(tl.load(products[:, None] + codes, mask=there, other=0.0), 0)[None, :], cap)
        p, keep, top, total = soften(s, ((j >= first) & (j < last))[None, :], top, total)
        there = (d < D)[:, None] & (j < n)[None, :]
        codes = tl.load(vc + page * (M * W) + (d // CUT)[:, None] * W + slot[None, :], mask=there, other=0).to(tl.int32)
        v = tl.load(vbook + d[:, None] * C + codes, mask=there, other=0.0)
        acc = acc * keep[:, None] + tl.sum(v * p, 1)[None, :]
    at = (split.to(tl.int64) * tokens + one) * heads + head
    finish(out, lse, acc, total, natural(top, total), at, one >= 0, d, D)


def run(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    kbook: Tensor,
    vbook: Tensor,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    (n, heads, dim), (rows, pages), (_, pieces, page), (_, cut, many) = q.shape, table.shape, kc.shape, kbook.shape
    requests, size = len(spans) - 1, min(page, 32)
    gain, cap = bend(scale, softcap)
    lut = torch.einsum("nhmd,mdc->nhmc", q.reshape(n, heads, pieces, cut) * gain, kbook).contiguous()
    owner = ints(tuple(b for b in range(requests) for _ in range(spans[b + 1] - spans[b])), q.device)
    splits = max(1, min(2 * cores(q.device) // max(n * heads, 1), -(-pages * page // (4 * size)), 64))
    out, lse = parts(q, splits)
    table, length, lo, hi = near(q, table, length, lo, hi)
    kernel[(n, heads, splits)](
        lut, kc, vc, vbook, table, length, owner, lo, hi, out, lse, n, heads, pages, rows // requests, cap,
        G=requests * heads // rows, D=dim, CUT=cut, C=many, W=page, M=pieces, BLOCK_M=triton.next_power_of_2(pieces),
        BLOCK_D=triton.next_power_of_2(dim), S=size, SPLITS=splits,
    )  # fmt: skip
    return merged(out, lse)
