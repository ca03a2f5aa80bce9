"""pick_pages on the CPU: topk_rows' selection, and the look-up while the indices are in the cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from numba import prange
from torch import Tensor

from ..panels import version
from ..record import run as call
from ..room import room
from ..simd_matmul import ints
from ..threads import chunks, helper, pnjit, use_threads
from ..topk_rows.cpu import WORTH_THREADS, some, widest


def can(score: Tensor, table: Tensor, length: Tensor, page: int, k: Tensor) -> str | None:
    if score.dtype != torch.float32:
        return f"scores are {score.dtype}, not float32"
    if not table.dtype == length.dtype == k.dtype == torch.int32:
        return f"tables, lengths and counts are {table.dtype}, {length.dtype} and {k.dtype}, not int32"
    return None


def run(score: Tensor, table: Tensor, length: Tensor, page: int, k: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = score.shape
    score, table, length, k = score.contiguous(), table.contiguous(), length.contiguous(), k.contiguous()
    most = widest(k.data_ptr(), rows)
    picked, tokens = torch.empty(rows, most, dtype=torch.int32), torch.empty(rows, dtype=torch.int32)
    at, held = room(8 * rows)
    pieces = 1 if rows * width < WORTH_THREADS else chunks()
    given = (score.data_ptr(), table.data_ptr(), length.data_ptr(), k.data_ptr())
    numbers = (*given, picked.data_ptr(), tokens.data_ptr(), at, rows, width, most, page, pieces)
    call(picker(), numbers, score, table, length, k, held)
    return picked, tokens


@helper
def part(score, table, length, k, picked, tokens, space, rows, width, most, page, lo, hi):  # type: ignore[no-untyped-def]
    """Rows lo to hi."""
    have, taken, lengths, sums = ints(space), ints(space + 4 * rows), ints(length), ints(tokens)
    for r in range(lo, hi):
        have[r] = (lengths[r] + page - 1) // page
    some(score, space, k, picked, space + 4 * rows, width, most, lo, hi)
    for r in range(lo, hi):
        pages, chosen = ints(table + 4 * r * width), ints(picked + 4 * r * most)
        total = 0
        for i in range(taken[r]):
            total += min(page, lengths[r] - chosen[i] * page)
            chosen[i] = pages[chosen[i]]
        sums[r] = total


@cache
def picker() -> Callable[..., None]:
    """Everything by address."""
    sources = version("topk_rows/cpu")

    def pick(score, table, length, k, picked, tokens, space, rows, width, most, page, pieces):  # type: ignore[no-untyped-def]
        if pieces == 1:
            part(score, table, length, k, picked, tokens, space, rows, width, most, page, 0, rows)
            return
        use_threads(pieces if sources else 1)
        for c in prange(pieces):
            part(score, table, length, k, picked, tokens, space, rows, width, most, page, rows * c // pieces, rows * (c + 1) // pieces)

    return pnjit(pick)
