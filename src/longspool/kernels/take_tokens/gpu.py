"""take_tokens on the GPU: a program per row and few tokens reads their keys across and their values along."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..triton_tiles import near, pool_problem, unreachable

TOKENS = 16


def can(kp: Tensor, vp: Tensor, slots: Tensor, length: Tensor) -> str | None:
    return unreachable(kp) or pool_problem(kp, vp)


@triton.jit
def kernel(kp, vp, slots, length, k, v, most, wide, D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr):
    i, row, d = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1), tl.arange(0, BLOCK_D)
    live, inside = i < tl.load(length + row), (i < wide * W)[:, None] & (d < D)[None, :]
    slot = tl.load(slots + row * most + i, mask=live, other=0)
    page, at = (slot // W).to(tl.int64) * (D * W), slot % W
    there = live[:, None] & (d < D)[None, :]
    x = tl.load(kp + page[:, None] + d[None, :] * W + at[:, None], mask=there, other=0.0)
    y = tl.load(vp + page[:, None] + at[:, None] * D + d[None, :], mask=there, other=0.0)
    goal, to = (row * wide + i // W).to(tl.int64) * (D * W), i % W
    tl.store(k + goal[:, None] + d[None, :] * W + to[:, None], x, mask=inside)
    tl.store(v + goal[:, None] + to[:, None] * D + d[None, :], y, mask=inside)


def run(kp: Tensor, vp: Tensor, slots: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    (rows, most), (_, dim, page) = slots.shape, kp.shape
    wide = triton.cdiv(most, page)
    k, v = kp.new_empty(rows * wide, dim, page), vp.new_empty(rows * wide, page, dim)
    if rows * wide:
        kernel[(triton.cdiv(wide * page, TOKENS), rows)](
            kp, vp, *near(kp, slots, length), k, v, most, wide,
            D=dim, W=page, T=TOKENS, BLOCK_D=triton.next_power_of_2(dim),
        )  # fmt: skip
    return k, v
