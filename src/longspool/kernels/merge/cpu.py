"""The exact merge on the CPU: parts are folded in one after another."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from ..threads import chunks, njit, pnjit, use_threads

SMALL = 1 << 15  # values that one thread merges sooner than two can be woken


def can(outs: list[Tensor], lses: list[Tensor]) -> str | None:
    kinds = {t.dtype for t in (*outs, *lses)}
    return None if kinds == {torch.float32} else f"{', '.join(map(str, kinds))} have no kernel, only float32"


def run(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = outs[0].shape
    out, lse = torch.zeros(tokens * heads, dim), torch.full((tokens * heads,), -torch.inf)
    into, total = out.numpy(), lse.numpy()
    for part, weight in zip(outs, lses, strict=True):
        add, more = part.reshape(-1, dim).numpy(), weight.reshape(-1).numpy()
        if out.numel() <= SMALL:
            fold(into, total, add, more, 0, len(total))
        else:
            fold_apart(into, total, add, more, chunks())
    return out.view(tokens, heads, dim), lse.view(tokens, heads)


@njit
def fold(out, lse, part, more, first, end):  # type: ignore[no-untyped-def]
    """Take a part into rows first to end of what is merged so far. A part that saw nothing may hold anything, NaN included."""
    for r in range(first, end):
        if more[r] == -np.inf:
            continue
        top = max(lse[r], more[r])
        old, new = np.exp(np.float64(lse[r] - top)), np.exp(np.float64(more[r] - top))
        a, b = np.float32(old / (old + new)), np.float32(new / (old + new))
        lse[r] = np.float32(top + np.log(old + new))
        for d in range(out.shape[1]):
            out[r, d] = a * out[r, d] + b * part[r, d]


@pnjit
def fold_apart(out, lse, part, more, pieces):  # type: ignore[no-untyped-def]
    use_threads(pieces)
    for c in prange(pieces):
        fold(out, lse, part, more, len(lse) * c // pieces, len(lse) * (c + 1) // pieces)
