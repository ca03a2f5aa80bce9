"""gather_rows on the CPU: each thread reads a part of every row's indices."""

from __future__ import annotations

from array import array
from functools import cache

import torch
from numba.core.ccallback import CFunc
from torch import Tensor

from ..append_rows.cpu import SMALL, can
from ..panels import callback, version
from ..schedule import dense, launch, whole_numbers
from ..simd import KIND, F, get64, load, one, put, size, store, whole
from ..threads import chunks

__all__ = ["can", "run"]


@cache
def reader(dtype: torch.dtype) -> CFunc:
    """(block, part): the tokens of one part of `parts`."""
    kind, sources = KIND[dtype], version()

    def read(block, part):  # type: ignore[no-untyped-def]
        kp, vp, table, columns, index = get64(block), get64(block + 8), get64(block + 16), get64(block + 24), get64(block + 32)
        k, v, offset, rows = get64(block + 40), get64(block + 48), get64(block + 56), get64(block + 64)
        dim, page, parts = get64(block + 72), get64(block + 80), get64(block + 88)
        for row in range(rows if sources else 0):
            first, n = get64(offset + 8 * row), get64(offset + 8 * row + 8) - get64(offset + 8 * row)
            for i in range(first + n * part // parts, first + n * (part + 1) // parts):
                j = get64(index + 8 * i)
                at, slot = whole(table + 4 * (row * columns + j // page)) * dim * page, j % page
                for d in range(dim):
                    put(k + 4 * (i * dim + d), one(kp + (at + d * page + slot) * size(kind), kind), F)
                for d in range(0, dim, 8):
                    store(v + 4 * (i * dim + d), load(vp + (at + slot * dim + d) * size(kind), kind), F)

    return callback(2, read)


def run(kp: Tensor, vp: Tensor, table: Tensor, index: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    table, index, offset = dense(table), dense(index), whole_numbers(offset)
    n, dim, page = index.shape[0], kp.shape[1], kp.shape[2]
    k, v = torch.empty(n, dim), torch.empty(n, dim)
    parts = chunks() if k.numel() > SMALL else 1
    pools = (kp.data_ptr(), vp.data_ptr(), table.data_ptr(), table.shape[1], index.data_ptr())
    tokens = (k.data_ptr(), v.data_ptr(), offset.data_ptr(), offset.shape[0] - 1)
    block = array("q", (*pools, *tokens, dim, page, parts))
    launch(0, 0, 0, reader(kp.dtype).address, 0, block.buffer_info()[0], parts, 0, 1)
    return k, v
