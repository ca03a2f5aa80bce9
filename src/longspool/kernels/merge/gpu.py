"""merge on the GPU: all parts in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_tiles import finish, heap, unreachable


def can(outs: list[Tensor], lses: list[Tensor]) -> str | None:
    return unreachable(outs[0])


@triton.jit
def kernel(outs, lses, out, lse, count, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    acc, top, total = tl.zeros((BLOCK, BLOCK_D), tl.float32), tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(len(outs)):
        acc, top, total = heap(acc, top, total, outs[part], lses[part], at, live, D, BLOCK_D)
    finish(out, lse, acc, total, top + tl.log(tl.where(total > 0, total, 1.0)), at, live, tl.arange(0, BLOCK_D), D)


def run(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    outs, lses = [o.contiguous() for o in outs], [s.contiguous() for s in lses]
    out, lse, dim = torch.empty_like(outs[0]), torch.empty_like(lses[0]), outs[0].shape[-1]
    block_d = triton.next_power_of_2(dim)
    block = max(1024 // block_d, 1)
    kernel[(triton.cdiv(lse.numel(), block),)](tuple(outs), tuple(lses), out, lse, lse.numel(), D=dim, BLOCK_D=block_d, BLOCK=block)
    return out, lse
