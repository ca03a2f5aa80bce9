"""row_mass on the GPU: a program per tile of keys walks the queries that see it; no sum is shared between programs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_tiles import (
    LOG2E,
    STORED,
    bend,
    capped,
    ints,
    levelled,
    load_keys,
    load_queries,
    locate,
    near,
    pages_problem,
    product,
    sight,
    stacked,
    tiling,
    weighed,
)


def can(q: Tensor, kp: Tensor, table: Tensor, length: Tensor, spans: tuple[int, ...], *rest: object, **kw: object) -> str | None:
    if kp.dtype not in STORED:
        return f"pages of {kp.dtype} have no kernel"
    if not kp.is_contiguous():
        return "the pool is not contiguous"
    return pages_problem(q, kp.shape[1], kp.shape[2], table, len(spans) - 1)


@triton.jit
def kernel(
    q, kp, table, length, spans, lo, hi, lse, weight, mass, heads, pages, per, gain, cap,
    G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, M: tl.constexpr, T: tl.constexpr, S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t, row = tl.program_id(0), tl.program_id(1)
    n = tl.load(length + row)
    page, slot, j = locate(table + row * pages, t, n, W, T, S)
    keys = load_keys(kp, page, slot, j, n, D, W, T, BLOCK_D)
    at, got = tl.reshape(j, (T,)), tl.zeros((T,), tl.float32)
    a, b = tl.load(spans + row // per), tl.load(spans + row // per + 1)
    tiles = tl.where(t * T < n, ((b - a) * G + M - 1) // M, 0)
    for tile in range(tiles):
        token, head, live, _, _ = stacked(spans, row, per, tile, G, M)
        first, last = sight(lo, hi, token, live, n)
        if (tl.min(first) < t * T + T) & (tl.max(last) > t * T):
            query, undo = levelled(load_queries(q, token, head, live, heads, D, BLOCK_D), gain)
            s = capped(product(query, keys) * undo[:, None], cap)
            if weight is not None:
                s = weighed(s, weight, page, slot, j, n, W, T)
            norm = tl.load(lse + token * heads + head, mask=live, other=float("-inf")) * LOG2E
            seen = (at[None, :] >= first[:, None]) & (at[None, :] < last[:, None]) & (norm > float("-inf"))[:, None]
            got += tl.sum(tl.where(seen, tl.exp2(tl.where(seen, s - norm[:, None], 0.0)), 0.0), 0)
    tl.store(mass + row.to(tl.int64) * pages * W + at, got, mask=at < pages * W)


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
    (rows, pages), (_, dim, page) = table.shape, kp.shape
    form = tiling(q, rows, spans, dim, page, 0, kp.dtype == torch.float32)
    gain, cap = bend(scale, softcap)
    table, length, lo, hi, lse, weight = near(q, table, length, lo, hi, lse, weight)
    mass = q.new_empty(rows, pages * page)
    kernel[(triton.cdiv(pages * page, form.t), rows)](
        q.contiguous(), kp, table, length, ints(spans, q.device), lo, hi, lse, weight, mass,
        q.shape[1], pages, rows // (len(spans) - 1), gain, cap,
        G=form.group, D=dim, W=page, M=form.m, T=form.t, S=form.s, BLOCK_D=form.block_d, num_warps=form.warps,
    )  # fmt: skip
    return mass
