"""page_bounds on the GPU: a program per page and slice of channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_tiles import STORED, near, unreachable


def can(kp: Tensor, *rest: object) -> str | None:
    if kp.dtype not in STORED or kp.shape[2] & (kp.shape[2] - 1):
        return f"pages of {kp.shape[2]} tokens in {kp.dtype} have no kernel"
    return unreachable(kp) or (None if kp.is_contiguous() else "the pool is not contiguous")


@triton.jit
def kernel(kp, pages, fill, low, high, D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    s, d, slot = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, W)
    at = tl.load(pages + s) * (D * W) + d[:, None] * W + slot[None, :]
    seen = (d < D)[:, None] & (slot < tl.load(fill + s))[None, :]
    k = tl.load(kp + at, mask=seen, other=0.0).to(tl.float32)
    goal = s.to(tl.int64) * D + d
    tl.store(low + goal, tl.min(tl.where(seen, k, float("inf")), 1), mask=d < D)
    tl.store(high + goal, tl.max(tl.where(seen, k, float("-inf")), 1), mask=d < D)


def run(kp: Tensor, pages: Tensor, fill: Tensor) -> tuple[Tensor, Tensor]:
    _, dim, page = kp.shape
    low, high = (kp.new_empty(pages.shape[0], dim, dtype=torch.float32) for _ in range(2))
    kernel[(pages.shape[0], triton.cdiv(dim, 64))](kp, *near(kp, pages, fill), low, high, D=dim, W=page, BLOCK=64)
    return low, high
