"""The highest scores on the CPU: the k-th highest by partial sorting, then one pass in order."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from ..threads import chunks, njit, pnjit, use_threads

SMALL = 1 << 13  # scores that one thread searches sooner than two can be woken


def can(score: Tensor, count: Tensor, k: Tensor) -> str | None:
    return None if score.dtype == torch.float32 else f"scores of {score.dtype} have no kernel, only float32"


def run(score: Tensor, count: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    rows = score.shape[0]
    index = torch.full((rows, int(k.max()) if rows else 0), -1, dtype=torch.int32)
    n = torch.empty(rows, dtype=torch.int32)
    arrays = (score.contiguous().numpy(), count.numpy(), k.numpy(), index.numpy(), n.numpy())
    if score.numel() <= SMALL:
        pick(*arrays, 0, rows)
    else:
        pick_apart(*arrays, chunks())
    return index, n


@njit
def pick(score, count, k, index, n, first, end):  # type: ignore[no-untyped-def]
    """Rows first to end."""
    for r in range(first, end):
        width, take = count[r], max(min(k[r], count[r]), 0)
        n[r] = take
        if take == 0:
            continue
        if take == width:
            for p in range(width):
                index[r, p] = p
            continue
        least = -np.partition(-score[r, :width], take - 1)[take - 1]
        ties = take
        for p in range(width):
            ties -= score[r, p] > least
        at = 0
        for p in range(width):
            tied = score[r, p] == least and ties > 0
            if score[r, p] > least or tied:
                index[r, at] = p
                at += 1
                ties -= tied


@pnjit
def pick_apart(score, count, k, index, n, pieces):  # type: ignore[no-untyped-def]
    use_threads(pieces)
    for c in prange(pieces):
        pick(score, count, k, index, n, len(n) * c // pieces, len(n) * (c + 1) // pieces)
