"""topk_rows on the GPU: a program per row finds its k-th highest score bit by bit, then lists in order what lies above it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_tiles import near, unreachable


def can(score: Tensor, count: Tensor, k: Tensor) -> str | None:
    return unreachable(score)


@triton.jit
def ranks(score, at, valid):
    """Scores as int64 in 0 .. 2**32 - 1 in the same order; -1 past the row's end."""
    x = tl.load(score + at, mask=at < valid, other=0.0)
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0 ties with 0
    rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    return tl.where(at < valid, rank, -1)


@triton.jit
def above(score, valid, cut, BLOCK: tl.constexpr):
    """How many of a row's scores rank at `cut` or higher."""
    found = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, valid, BLOCK):
        found += (ranks(score, first + tl.arange(0, BLOCK), valid) >= cut).to(tl.int32)
    return tl.sum(found)


@triton.jit
def kernel(score, count, n, index, width, most, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    valid, keep, score = tl.load(count + row), tl.load(n + row), score + row * width
    cut, bit = tl.zeros((), tl.int64), tl.full((), 2147483648, tl.int64)
    for _ in range(32):
        cut = tl.where(above(score, valid, cut + bit, BLOCK) >= keep, cut + bit, cut)
        bit = bit // 2
    ties = keep - above(score, valid, cut + 1, BLOCK)  # of the scores at the cut, the first ones
    listed = tl.zeros((), tl.int32)
    for first in range(0, valid, BLOCK):
        at = first + tl.arange(0, BLOCK)
        rank = ranks(score, at, valid)
        tied = (rank == cut).to(tl.int32)
        taken = (rank > cut) | ((rank == cut) & (tl.cumsum(tied, 0) <= ties))
        place = listed + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(index + row * most + place, at, mask=taken)
        ties, listed = ties - tl.sum(tied), listed + tl.sum(taken.to(tl.int32))


def run(score: Tensor, count: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = score.shape
    most = int(k.max()) if rows else 0
    count, k = near(score, count, k)
    n = torch.minimum(k, count).clamp_min(0).to(torch.int32)
    index = torch.full((rows, most), -1, dtype=torch.int32, device=score.device)
    block = min(max(triton.next_power_of_2(width), 16), 4096)
    kernel[(rows,)](score.contiguous(), count, n, index, width, most, BLOCK=block, num_warps=8 if block > 1024 else 4)
    return index, n
