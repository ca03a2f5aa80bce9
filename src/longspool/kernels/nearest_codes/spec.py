"""nearest_codes(x, book) -> codes.

x      fp32 [M, n, d], sets of vectors
book   fp32 [M, d, C], as many vectors for each set; C a multiple of 8 and at most 256
codes  uint8 [M, n], the number of the nearest one, the first of equals: the least |c|^2 - 2 x.c
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..samples import noise

TOLERANCE = (0.0, 0.0)


def samples() -> Iterator[tuple[str, tuple[Tensor, Tensor], dict[str, int]]]:
    yield "pairs", (noise(1, 5, 300, 2), noise(2, 5, 2, 256)), {}
    yield "ones", (noise(3, 3, 100, 1), noise(4, 3, 1, 64)), {}
    yield "wide", (noise(5, 2, 77, 8), noise(6, 2, 8, 16)), {}
    yield "equals", (noise(7, 2, 50, 4), noise(8, 2, 4, 8).repeat(1, 1, 3)), {}
    yield "none", (noise(9, 2, 0, 2), noise(10, 2, 2, 8)), {}
