"""head_sample on the GPU: a program per tile of the vocabulary keeps its best noisy logit and its log-sum-exp; a second pass picks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...values.packed import Packed
from ..triton_packed import layout, multiply, tensors
from ..triton_tiles import capped, near, unreachable


def can(h: Tensor, head: Packed, *rest: object, **kw: object) -> str | None:
    return unreachable(h)


@triton.jit
def gumbel(seed, offset, ids):
    """Standard Gumbel noise fp32 [N, M] of seeds and offsets int64 [N] and ids int32 [M]; near 1 a uniform needs fp64."""
    low, high = (offset & 0xFFFFFFFF).to(tl.uint32)[:, None], (offset >> 32 & 0xFFFFFFFF).to(tl.uint32)[:, None]
    ids = ids.to(tl.uint32)[None, :]
    word, _, _, _ = tl.philox(seed[:, None], low, high, ids, ids * 0)
    return -tl.log((-tl.log((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10)).to(tl.float32))


@triton.jit
def sweep(
    h, codes, scale, low, temperature, seed, offset, best, token, logit, lse, batch, rows, cols, cap,
    BITS: tl.constexpr, OFFSET: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    n, ids = tl.program_id(1) * N + tl.arange(0, N), tl.program_id(0) * M + tl.arange(0, M)
    real, live = n < batch, ids < rows
    z = multiply(h, codes, scale, low, n, ids, real, live, 0, (cols + 31) // 32, cols, BITS, OFFSET, N, M)
    if cap is not None:
        z = capped(z / cap, cap)
    warm = tl.load(temperature + n, mask=real, other=0.0)
    z = tl.where(live[None, :], z / tl.where(warm > 0, warm, 1.0)[:, None], float("-inf"))
    noise = gumbel(tl.load(seed + n, mask=real, other=0), tl.load(offset + n, mask=real, other=0), ids)
    noisy = z + tl.where(warm > 0, 1.0, 0.0)[:, None] * noise
    most, top = tl.max(noisy, 1), tl.max(z, 1)
    first = tl.min(tl.where(noisy == most[:, None], ids[None, :], rows), 1)
    at = tl.program_id(0) * batch + n
    tl.store(best + at, most, mask=real)
    tl.store(token + at, first, mask=real)
    tl.store(logit + at, tl.sum(tl.where(ids[None, :] == first[:, None], z, 0.0), 1), mask=real)
    tl.store(lse + at, top + tl.log(tl.sum(tl.exp(z - top[:, None]), 1)), mask=real)


@triton.jit
def choose(best, token, logit, lse, chosen, logprob, batch, tiles, rows, BLOCK: tl.constexpr):
    b, t = tl.program_id(0), tl.arange(0, BLOCK)
    at, there = t * batch + b, t < tiles
    noisy, sums = tl.load(best + at, mask=there, other=float("-inf")), tl.load(lse + at, mask=there, other=float("-inf"))
    ids = tl.load(token + at, mask=there, other=rows)
    first = tl.min(tl.where(noisy == tl.max(noisy), ids, rows))
    top = tl.max(sums)
    total = top + tl.log(tl.sum(tl.exp(sums - top)))
    z = tl.sum(tl.where(there & (ids == first), tl.load(logit + at, mask=there, other=0.0), 0.0))
    tl.store(chosen + b, first.to(tl.int64))
    tl.store(logprob + b, z - total)


def run(
    h: Tensor, head: Packed, temperature: Tensor, seed: Tensor, offset: Tensor, cap: float = 0.0, tile: int = 8192
) -> tuple[Tensor, Tensor]:
    batch, form = h.shape[0], layout(head)
    n, m = (1, 64) if batch == 1 else (16, 64)
    tiles = triton.cdiv(head.rows, m)
    h, temperature, seed, offset = near(h, h, temperature, seed, offset)
    best, logit, lse = h.new_empty(3, tiles, batch)
    token = h.new_empty(tiles, batch, dtype=torch.int32)
    chosen, logprob = h.new_empty(batch, dtype=torch.int64), h.new_empty(batch)
    sweep[(tiles, triton.cdiv(batch, n))](
        h, *tensors(head), temperature, seed, offset, best, token, logit, lse, batch, head.rows, head.cols, cap if cap > 0 else None,
        BITS=form.bits, OFFSET=form.middle, N=n, M=m,
    )  # fmt: skip
    block = triton.next_power_of_2(tiles)
    choose[(batch,)](best, token, logit, lse, chosen, logprob, batch, tiles, head.rows, BLOCK=block, num_warps=8 if block > 1024 else 4)
    return chosen, logprob
