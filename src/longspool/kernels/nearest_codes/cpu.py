"""nearest_codes on the CPU: a vector's distances stay in the first cache, and its least one is looked for among them."""

from __future__ import annotations

from array import array
from functools import cache
from math import inf

import numpy as np
import torch
from numba.core.ccallback import CFunc
from torch import Tensor

from ..append_rows.cpu import SMALL
from ..pairs import octets
from ..panels import callback, version
from ..record import run as call
from ..room import room
from ..schedule import dense, launch
from ..simd import F, fma, get64, load, lowest, one, smaller, splat, store
from ..threads import chunks


def can(x: Tensor, book: Tensor) -> str | None:
    if x.dtype is not torch.float32 or book.dtype is not torch.float32:
        return f"vectors of {x.dtype} and {book.dtype} have no kernel"
    return None if book.shape[2] % 8 == 0 and book.shape[2] <= 256 else f"{book.shape[2]} vectors have no kernel"


@cache
def worker() -> CFunc:
    """(block, part): a share of all vectors."""
    sources = version("pairs", "simd_matmul")

    def work(block, part):  # type: ignore[no-untyped-def]
        g = get64
        x, book, norms, codes, sets, count = g(block), g(block + 8), g(block + 16), g(block + 24), g(block + 32), g(block + 40)
        dim, many, parts, far = g(block + 48), g(block + 56), g(block + 64), g(block + 72) + g(block + 80) * part
        found, total = octets(codes), sets * count
        for i in range(total * part // parts, total * (part + 1) // parts if sources else 0):
            own = i // count
            best = splat(np.float32(inf))
            for c in range(0, many, 8):
                acc = load(norms + 4 * (own * many + c), F)
                for d in range(dim):
                    twice = splat(np.float32(np.float32(-2) * one(x + 4 * (i * dim + d), F)))
                    acc = fma(twice, load(book + 4 * ((own * dim + d) * many + c), F), acc)
                store(far + 4 * c, acc, F)
                best = smaller(acc, best)
            least, c = lowest(best), 0
            while c < many - 1 and one(far + 4 * c, F) != least:
                c += 1
            found[i] = np.uint8(c)

    return callback(2, work)


def run(x: Tensor, book: Tensor) -> Tensor:
    (sets, count, dim), many = x.shape, book.shape[2]
    x, book, norms = dense(x), dense(book), book.square().sum(1)
    codes, parts = torch.empty(sets, count, dtype=torch.uint8), chunks() if sets * count * many > SMALL else 1
    at, held = room(4 * many * parts)
    addresses = (x.data_ptr(), book.data_ptr(), norms.data_ptr(), codes.data_ptr())
    block = array("q", (*addresses, sets, count, dim, many, parts, at, 4 * many))
    call(launch, (0, 0, 0, worker().address, 0, block.buffer_info()[0], parts, 0, 1), x, book, norms, codes, block, held)
    return codes
