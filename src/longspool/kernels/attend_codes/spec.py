"""attend_codes(q, kc, vc, kscale, kzero, vscale, vzero, bits, table, length, spans, lo, hi, scale, softcap=0) -> (out, lse).

As attend_rows over quantized pages (kernels/codes.py has the format). bits 8: kc int8 [Pages, D, W], vc int8 [Pages, W, D], no
zeros. bits 4: kc uint8 [Pages, D, W//2], vc uint8 [Pages, W, D//2], nibbles in chunks of 16 codes. kscale, kzero fp16 [Pages, D]
per channel of a page, vscale, vzero fp16 [Pages, W] per token; kzero and vzero are None for 8 bits.
value = code * scale (+ zero).
"""

from __future__ import annotations

from collections.abc import Iterator

from ..attend_rows.spec import causal, ranges
from ..codes import encode_k, encode_v
from ..samples import noise, pool

TOLERANCE = (3e-5, 3e-5)


def case(seed: int, spans: tuple[int, ...], lengths: list[int], heads: int, dim: int, page: int, bits: int) -> tuple:
    p = pool(seed, lengths, dim, page)
    fill = (~p.vp[:, :, 0].isnan()).sum(1)
    (kc, kscale, kzero), (vc, vscale, vzero) = encode_k(p.kp, bits, fill), encode_v(p.vp, bits, fill)
    return noise(seed + 99, spans[-1], heads, dim), kc, vc, kscale, kzero, vscale, vzero, bits, p.table, p.length, spans


def samples() -> Iterator[tuple[str, tuple, dict]]:
    for bits in (8, 4):
        yield f"decode{bits}", (*case(1, (0, 1), [300, 300, 300], 9, 64, 64, bits), None, None, 0.125), {}
        yield f"batch{bits}", (*case(2, (0, 1, 2), [70, 0, 5, 129], 8, 128, 32, bits), None, None, 0.09), {"softcap": 20.0}
        spans, lengths = (0, 37, 38, 120), [90, 90, 1, 1, 200, 200]
        yield f"prefill{bits}", (*case(4, spans, lengths, 6, 96, 16, bits), None, causal(lengths, spans, 6), 0.1), {}
        lo, hi = ranges(6, (0, 2), 60)
        yield f"windows{bits}", (*case(6, (0, 2), [50, 61], 10, 16, 16, bits), lo, hi, 0.25), {}
