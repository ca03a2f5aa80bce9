"""append_rows on the GPU: a program per few tokens finds their rows and writes their keys across and their values along."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..triton_tiles import near, owner, pool_problem, rounded, unreachable

TOKENS = 16


def can(kp: Tensor, vp: Tensor, table: Tensor, *rest: object) -> str | None:
    return unreachable(kp) or pool_problem(kp, vp)


@triton.jit
def kernel(
    kp, vp, table, start, k, v, offset, tokens, rows, pages,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    s, d = tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, BLOCK_D)
    live = s < tokens
    row = owner(offset, s, rows, BLOCK_R)
    at = tl.load(start + row, mask=live, other=0) + s - tl.load(offset + row, mask=live, other=0).to(tl.int32)
    page = tl.load(table + row * pages + at // W, mask=live, other=0).to(tl.int64) * (D * W)
    slot, both = at % W, live[:, None] & (d < D)[None, :]
    source = s.to(tl.int64)[:, None] * D + d[None, :]
    x, y = tl.load(k + source, mask=both), tl.load(v + source, mask=both)
    tl.store(kp + page[:, None] + d[None, :] * W + slot[:, None], rounded(x, kp.dtype.element_ty), mask=both)
    tl.store(vp + page[:, None] + slot[:, None] * D + d[None, :], rounded(y, vp.dtype.element_ty), mask=both)


def run(kp: Tensor, vp: Tensor, table: Tensor, start: Tensor, k: Tensor, v: Tensor, offset: Tensor) -> None:
    _, dim, page = kp.shape
    rows, pages = table.shape
    kernel[(triton.cdiv(k.shape[0], TOKENS),)](
        kp, vp, *near(kp, table, start, k, v, offset), k.shape[0], rows, pages,
        D=dim, W=page, T=TOKENS, BLOCK_D=triton.next_power_of_2(dim), BLOCK_R=triton.next_power_of_2(rows),
    )  # fmt: skip
