"""page_scores on the GPU: a program per row and some of its pages, whose bounds are read once for all queries."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_tiles import ints, near, rows_problem, unreachable


def can(
    q: Tensor, kmin: Tensor, kmax: Tensor, table: Tensor, length: Tensor, page: int, spans: tuple[int, ...], **kw: object
) -> str | None:
    if kmin.dtype not in (torch.float32, torch.float16) or kmax.dtype != kmin.dtype:
        return f"bounds of {kmin.dtype} and {kmax.dtype} have no kernel"
    return (
        unreachable(q)
        or rows_problem(q, table, len(spans) - 1)
        or (None if kmin.is_contiguous() and kmax.is_contiguous() else "the bounds are not contiguous")
    )


@triton.jit
def kernel(
    q, kmin, kmax, table, length, spans, score, page, heads, pages, per,
    G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    row, p, d = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    live = p < (tl.load(length + row) + page - 1) // page
    bounds = tl.load(table + row * pages + p, mask=live, other=0).to(tl.int64)[:, None] * D + d[None, :]
    there = live[:, None] & (d < D)[None, :]
    low, high = tl.load(kmin + bounds, mask=there, other=0.0).to(tl.float32), tl.load(kmax + bounds, mask=there, other=0.0).to(tl.float32)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for token in range(tl.load(spans + row // per), tl.load(spans + row // per + 1)):
        over = tl.zeros((BLOCK,), tl.float32) + (0.0 if SUM else float("-inf"))
        for g in range(G):
            x = tl.load(q + (token * heads + row % per * G + g) * D + d, mask=d < D, other=0.0)[None, :]
            bound = tl.sum(tl.maximum(x * low, x * high), 1)
            over = over + bound if SUM else tl.maximum(over, bound)
        best = tl.maximum(best, over)
    tl.store(score + row.to(tl.int64) * pages + p, tl.where(live, best, float("-inf")), mask=p < pages)


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
    (rows, pages), dim, requests = table.shape, q.shape[2], len(spans) - 1
    score = q.new_empty(rows, pages)
    block = 32 if dim <= 128 else 16
    kernel[(triton.cdiv(pages, block), rows)](
        q.contiguous(), kmin, kmax, *near(q, table, length), ints(spans, q.device), score, page, q.shape[1], pages,
        rows // requests, G=requests * q.shape[1] // rows, D=dim, BLOCK=block, BLOCK_D=triton.next_power_of_2(dim), SUM=reduce == "sum",
    )  # fmt: skip
    return score
