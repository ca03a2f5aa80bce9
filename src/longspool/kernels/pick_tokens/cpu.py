"""pick_tokens on the CPU: topk_rows' selection, and the look-up while the indices are in the cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from numba import prange
from torch import Tensor

from ..panels import version
from ..pick_pages.cpu import can as can
from ..record import run as call
from ..room import room
from ..simd_matmul import ints
from ..threads import chunks, helper, pnjit, use_threads
from ..topk_rows.cpu import WORTH_THREADS, some, widest


def run(score: Tensor, table: Tensor, length: Tensor, page: int, k: Tensor) -> tuple[Tensor, Tensor]:
    (rows, width), columns, many = score.shape, table.shape[1], max(score.shape[0] // max(table.shape[0], 1), 1)
    score, table, length, k = score.contiguous(), table.contiguous(), length.contiguous(), k.contiguous()
    most = widest(k.data_ptr(), rows)
    slots, n = torch.empty(rows, most, dtype=torch.int32), torch.empty(rows, dtype=torch.int32)
    at, held = room(4 * rows)
    pieces = 1 if rows * width < WORTH_THREADS else chunks()
    given = (score.data_ptr(), table.data_ptr(), length.data_ptr(), k.data_ptr())
    numbers = (*given, slots.data_ptr(), n.data_ptr(), at, rows, many, width, columns, most, page, pieces)
    call(picker(), numbers, score, table, length, k, slots, n, held)
    return slots, n


@helper
def part(score, table, length, k, slots, n, space, many, width, columns, most, page, lo, hi):  # type: ignore[no-untyped-def]
    """Rows lo to hi."""
    have, taken, lengths = ints(space), ints(n), ints(length)
    for s in range(lo, hi):
        have[s] = lengths[s // many]
    some(score, space, k, slots, n, width, most, lo, hi)
    for s in range(lo, hi):
        pages, chosen = ints(table + 4 * (s // many) * columns), ints(slots + 4 * s * most)
        for i in range(taken[s]):
            chosen[i] = pages[chosen[i] // page] * page + chosen[i] % page


@cache
def picker() -> Callable[..., None]:
    """Everything by address."""
    sources = version("topk_rows/cpu")

    def pick(score, table, length, k, slots, n, space, rows, many, width, columns, most, page, pieces):  # type: ignore[no-untyped-def]
        if pieces == 1:
            part(score, table, length, k, slots, n, space, many, width, columns, most, page, 0, rows)
            return
        use_threads(pieces if sources else 1)
        for c in prange(pieces):
            lo, hi = rows * c // pieces, rows * (c + 1) // pieces
            part(score, table, length, k, slots, n, space, many, width, columns, most, page, lo, hi)

    return pnjit(pick)
