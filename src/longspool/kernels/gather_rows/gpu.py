"""gather_rows on the GPU: a program per few entries finds their rows and reads their keys across and their values along."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_tiles import near, owner, pool_problem, unreachable

TOKENS = 16


def can(kp: Tensor, vp: Tensor, table: Tensor, *rest: object) -> str | None:
    return unreachable(kp) or pool_problem(kp, vp)


@triton.jit
def kernel(
    kp, vp, table, index, offset, k, v, tokens, rows, pages,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    s, d = tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, BLOCK_D)
    live = s < tokens
    row, at = owner(offset, s, rows, BLOCK_R), tl.load(index + s, mask=live, other=0).to(tl.int32)
    page = tl.load(table + row * pages + at // W, mask=live, other=0).to(tl.int64) * (D * W)
    slot, both = at % W, live[:, None] & (d < D)[None, :]
    x = tl.load(kp + page[:, None] + d[None, :] * W + slot[:, None], mask=both)
    y = tl.load(vp + page[:, None] + slot[:, None] * D + d[None, :], mask=both)
    goal = s.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(k + goal, x.to(tl.float32), mask=both)
    tl.store(v + goal, y.to(tl.float32), mask=both)


def run(kp: Tensor, vp: Tensor, table: Tensor, index: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    _, dim, page = kp.shape
    rows, pages = table.shape
    k, v = (p.new_empty(index.shape[0], dim, dtype=torch.float32) for p in (kp, vp))
    kernel[(triton.cdiv(index.shape[0], TOKENS),)](
        kp, vp, *near(kp, table, index, offset), k, v, index.shape[0], rows, pages,
        D=dim, W=page, T=TOKENS, BLOCK_D=triton.next_power_of_2(dim), BLOCK_R=triton.next_power_of_2(rows),
    )  # fmt: skip
    return k, v
