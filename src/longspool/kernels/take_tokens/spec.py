"""take_tokens(kp, vp, slots, length) -> (k [R*C, D, W], v [R*C, W, D]): single tokens as pages of their own.

kp [Pages, D, W], vp [Pages, W, D] (fp32 | fp16 | bf16); slots int32 [R, K], pool slots (page * W + offset) of which the first
length[r] of row r count, in any order; length int32 [R]. C = ceil(K / W): token i of row r is at page r*C + i // W, offset i % W, of
pages in the pool's dtype; 0 past a row's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..samples import pool

TOLERANCE = (0.0, 0.0)


def case(seed: int, lengths: list[int], counts: list[int], most: int, dim: int, page: int, dtype: torch.dtype) -> tuple:
    """Row r takes counts[r] of its lengths[r] tokens, in a random order."""
    p = pool(seed, lengths, dim, page, dtype)
    rng = torch.Generator().manual_seed(seed)
    slots = torch.full((len(lengths), most), -1, dtype=torch.int32)
    for row, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        at = torch.randperm(n, generator=rng)[:count]
        slots[row, :count] = p.table[row, at // page] * page + at % page
    return p.kp, p.vp, slots, torch.tensor(counts, dtype=torch.int32)


def samples() -> Iterator[tuple[str, tuple, dict]]:
    yield "ragged", case(1, [1, 40, 33, 70], [1, 25, 0, 17], 25, 64, 16, torch.float16), {}
    yield "long", case(2, [500, 300], [400, 300], 400, 128, 64, torch.bfloat16), {}
    yield "tiny", case(3, [5, 9], [5, 3], 7, 8, 32, torch.float32), {}
    yield "whole pages", case(4, [64, 64, 64], [32, 32, 16], 32, 16, 16, torch.float32), {}
    yield "nothing", case(5, [5], [0], 0, 16, 16, torch.float32), {}
