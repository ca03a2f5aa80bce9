"""append_rows on the CPU: each thread writes a part of every row's tokens."""

from __future__ import annotations

from array import array
from functools import cache

import torch
from numba.core.ccallback import CFunc
from torch import Tensor

from ..panels import callback, version
from ..record import run as call
from ..schedule import STORED, dense, launch, whole_numbers
from ..simd import KIND, F, get64, load, one, put, size, store, whole
from ..threads import chunks

SMALL = 1 << 14  # values that one thread moves sooner than two can be woken


def can(kp: Tensor, vp: Tensor, *rest: object) -> str | None:
    if kp.dtype not in STORED or vp.dtype != kp.dtype:
        return f"pages of {kp.dtype} and {vp.dtype} have no kernel"
    if kp.shape[1] % 8:
        return f"head_dim {kp.shape[1]} is no multiple of 8"
    return None if kp.is_contiguous() and vp.is_contiguous() else "the pool is not contiguous"


@cache
def writer(dtype: torch.dtype) -> CFunc:
    """(block, part): the tokens of one part of `parts`."""
    kind, sources = KIND[dtype], version()

    def write(block, part):  # type: ignore[no-untyped-def]
        kp, vp, table, columns, start = get64(block), get64(block + 8), get64(block + 16), get64(block + 24), get64(block + 32)
        k, v, offset, rows = get64(block + 40), get64(block + 48), get64(block + 56), get64(block + 64)
        dim, page, parts, ends = get64(block + 72), get64(block + 80), get64(block + 88), get64(block + 96)
        for row in range(rows if sources else 0):
            first, n = get64(offset + 8 * row), get64(offset + 8 * row + 8) - get64(offset + 8 * row)
            begin = whole(start + 4 * row) - (n if ends else 0)
            for i in range(n * part // parts, n * (part + 1) // parts):
                j = begin + i
                at, slot = whole(table + 4 * (row * columns + j // page)) * dim * page, j % page
                source = 4 * (first + i) * dim
                for d in range(dim):
                    put(kp + (at + d * page + slot) * size(kind), one(k + source + 4 * d, F), kind)
                for d in range(0, dim, 8):
                    store(vp + (at + slot * dim + d) * size(kind), load(v + source + 4 * d, F), kind)

    return callback(2, write)


def run(kp: Tensor, vp: Tensor, table: Tensor, start: Tensor, k: Tensor, v: Tensor, offset: Tensor, ends: bool = False) -> None:
    """As the op; `ends` says that `start` tells where each row's tokens end."""
    k, v, table, start, offset = dense(k), dense(v), dense(table), dense(start), whole_numbers(offset)
    parts = chunks() if k.numel() > SMALL else 1
    block = block_of(kp, vp, table, start, k, v, offset, parts, ends)
    call(launch, (0, 0, 0, writer(kp.dtype).address, 0, block.buffer_info()[0], parts, 0, 1), table, start, k, v, offset, block)


def block_of(
    kp: Tensor, vp: Tensor, table: Tensor, start: Tensor, k: Tensor, v: Tensor, offset: Tensor, parts: int, ends: bool
) -> array[int]:
    """What `writer` reads; all contiguous, offset int64."""
    pools = (kp.data_ptr(), vp.data_ptr(), table.data_ptr(), table.shape[1], start.data_ptr())
    tokens = (k.data_ptr(), v.data_ptr(), offset.data_ptr(), start.shape[0])
    return array("q", (*pools, *tokens, kp.shape[1], kp.shape[2], parts, ends))
