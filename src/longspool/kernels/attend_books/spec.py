"""attend_books(q, kc, vc, kbook, vbook, table, length, spans, lo, hi, scale, softcap=0) -> (out, lse).

As attend_rows over product codes. A head's D dims are cut into M pieces of D/M neighbours, and a piece is stored as the number of one of
C vectors: kc, vc uint8 [Pages, M, W]; kbook, vbook fp32 [M, D/M, C], C a multiple of 8 and at most 256. Nothing is decoded:

    lut[m, c] = q_m . kbook[m, :, c],  logit_t = sum_m lut[m, kc[m, t]]
    out_m = sum_c vbook[m, :, c] * (sum of the weights of all t with vc[m, t] = c)

Meant for few queries a request; the work for each is not shared with others.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..attend_rows.spec import causal, ranges
from ..samples import noise, place

TOLERANCE = (3e-5, 3e-5)


def case(seed: int, spans: tuple[int, ...], lengths: list[int], heads: int, dim: int, page: int, part: int, many: int) -> tuple:
    table, length, pages = place(seed, lengths, page)
    rng = torch.Generator().manual_seed(seed)
    kc, vc = (torch.randint(many, (pages, dim // part, page), generator=rng).to(torch.uint8) for _ in range(2))
    books = (noise(seed + i, dim // part, part, many) for i in (1, 2))
    return noise(seed + 99, spans[-1], heads, dim), kc, vc, *books, table, length, spans


def samples() -> Iterator[tuple[str, tuple[Tensor, ...], dict[str, float]]]:
    yield "decode", (*case(1, (0, 1), [300, 300, 300], 9, 64, 64, 2, 256), None, None, 0.125), {}
    yield "batch", (*case(2, (0, 1, 2), [70, 0, 5, 129], 8, 128, 32, 4, 64), None, None, 0.09), {"softcap": 20.0}
    yield "perhead", (*case(3, (0, 1), [33, 1, 0, 90], 4, 64, 16, 8, 16), None, None, 0.125), {}
    spans, lengths = (0, 5, 6, 13), [90, 90, 1, 1, 200, 200]
    yield "verify", (*case(4, spans, lengths, 6, 96, 16, 1, 256), None, causal(lengths, spans, 6), 0.1), {}
    lo, hi = ranges(6, (0, 2), 60)
    yield "windows", (*case(6, (0, 2), [50, 61], 10, 16, 16, 2, 8), lo, hi, 0.25), {}
