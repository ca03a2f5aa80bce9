"""attend_groups(q, kc, vc, kscale, kzero, vscale, vzero, table, length, spans, lo, hi, scale, softcap=0) -> (out, lse).

As attend_rows over 4-bit codes by groups of g neighbouring dims of a token (`encode_groups` in kernels/codes.py): kc, vc uint8
[Pages, W, D/2]; kscale, kzero, vscale, vzero fp16 [Pages, W, D/g], g a multiple of 16; value = code * scale + zero. A group's part of a
logit is scale * (q . codes) + zero * (sum of q), whose last sum is made once a query. Meant for few queries a request.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..attend_rows.spec import causal, ranges
from ..codes import encode_groups
from ..samples import noise, place

TOLERANCE = (3e-5, 3e-5)


def case(seed: int, spans: tuple[int, ...], lengths: list[int], heads: int, dim: int, page: int, group: int) -> tuple:
    table, length, pages = place(seed, lengths, page)
    (kc, kscale, kzero), (vc, vscale, vzero) = (encode_groups(noise(seed + i, pages, page, dim), group) for i in (1, 2))
    return noise(seed + 99, spans[-1], heads, dim), kc, vc, kscale, kzero, vscale, vzero, table, length, spans


def samples() -> Iterator[tuple[str, tuple[Tensor, ...], dict[str, float]]]:
    yield "decode", (*case(1, (0, 1), [300, 300, 300], 9, 64, 64, 32), None, None, 0.125), {}
    yield "batch", (*case(2, (0, 1, 2), [70, 0, 5, 129], 8, 128, 32, 64), None, None, 0.09), {"softcap": 20.0}
    yield "perhead", (*case(3, (0, 1), [33, 1, 0, 90], 4, 64, 16, 16), None, None, 0.125), {}
    spans, lengths = (0, 5, 6, 13), [90, 90, 1, 1, 200, 200]
    yield "verify", (*case(4, spans, lengths, 6, 96, 16, 32), None, causal(lengths, spans, 6), 0.1), {}
    lo, hi = ranges(6, (0, 2), 60)
    yield "windows", (*case(6, (0, 2), [50, 61], 10, 16, 16, 16), lo, hi, 0.25), {}
