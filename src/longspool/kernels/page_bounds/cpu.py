"""page_bounds on the CPU: each thread folds a part of the pages."""

from __future__ import annotations

from array import array
from functools import cache
from math import inf

import numpy as np
import torch
from numba.core.ccallback import CFunc
from torch import Tensor

from ..append_rows.cpu import SMALL
from ..panels import callback, version
from ..schedule import STORED, dense, launch
from ..simd import KIND, F, get64, highest, larger, load, lowest, one, put, size, smaller, splat, whole
from ..threads import chunks


def can(kp: Tensor, pages: Tensor, fill: Tensor) -> str | None:
    if kp.dtype not in STORED:
        return f"pages of {kp.dtype} have no kernel"
    return None if kp.is_contiguous() else "the pool is not contiguous"


@cache
def folder(dtype: torch.dtype) -> CFunc:
    """(block, part): the pages of one part of `parts`."""
    kind, sources = KIND[dtype], version()

    def fold(block, part):  # type: ignore[no-untyped-def]
        kp, pages, fill, kmin, kmax = get64(block), get64(block + 8), get64(block + 16), get64(block + 24), get64(block + 32)
        n, dim, page, parts = get64(block + 40), get64(block + 48), get64(block + 56), get64(block + 64)
        for i in range(n * part // parts, n * (part + 1) // parts if sources else 0):
            count = whole(fill + 4 * i)
            for d in range(dim):
                at = kp + (get64(pages + 8 * i) * dim + d) * page * size(kind)
                low, high = splat(np.float32(inf)), splat(np.float32(-inf))
                for w in range(0, count - 7, 8):
                    v = load(at + w * size(kind), kind)
                    low, high = smaller(v, low), larger(v, high)
                a, b = lowest(low), highest(high)
                for w in range(count // 8 * 8, count):
                    x = one(at + w * size(kind), kind)
                    a, b = min(a, x), max(b, x)
                put(kmin + 4 * (i * dim + d), a, F)
                put(kmax + 4 * (i * dim + d), b, F)

    return callback(2, fold)


def run(kp: Tensor, pages: Tensor, fill: Tensor) -> tuple[Tensor, Tensor]:
    pages, fill = dense(pages), dense(fill)
    n, dim, page = pages.shape[0], kp.shape[1], kp.shape[2]
    kmin, kmax = torch.empty(n, dim), torch.empty(n, dim)
    parts = chunks() if n * dim * page > SMALL else 1
    addresses = (kp.data_ptr(), pages.data_ptr(), fill.data_ptr(), kmin.data_ptr(), kmax.data_ptr())
    block = array("q", (*addresses, n, dim, page, parts))
    launch(0, 0, 0, folder(kp.dtype).address, 0, block.buffer_info()[0], parts, 0, 1)
    return kmin, kmax
