"""row_mass(q, kp, table, length, spans, lo, hi, lse, scale, softcap=0, weight=None) -> mass fp32 [R, P*W].

The attention that each key received: mass[r, j] is the sum of exp(logit - lse) over the request's tokens of this step that see j and
the row's query heads. lse fp32 [N, H] is the final one, over all zones; where it is -inf the query gives nothing. 0 where a key
is not visible and past the row's length. Everything else as in attend_rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..attend_rows.ref import run as attend
from ..attend_rows.spec import case, causal, ranges
from ..samples import noise

TOLERANCE = (2e-5, 2e-5)


def _sample(x: tuple, lo: torch.Tensor | None, hi: torch.Tensor | None, scale: float, **kw: object) -> tuple:
    q, kp, _, table, length, spans = x
    lse = attend(*x, lo, hi, scale, **kw)[1]  # type: ignore[arg-type]
    return (q, kp, table, length, spans, lo, hi, lse + 0.5, scale), kw


def samples() -> Iterator[tuple[str, tuple, dict]]:
    yield "decode", *_sample(case(1, (0, 1), [300, 300, 300], 9, 64, 64, torch.float16), None, None, 0.125)
    spans, lengths = (0, 37, 38, 120), [90, 90, 1, 1, 200, 200]
    yield "prefill", *_sample(case(4, spans, lengths, 6, 64, 16, torch.bfloat16), None, causal(lengths, spans, 6), 0.125)
    lo, hi = ranges(5, (0, 50, 90), 260)
    x = case(5, (0, 50, 90), [250, 30, 77, 256], 8, 96, 32, torch.float32)
    yield "windows", *_sample(x, lo, hi, 0.1, softcap=5.0, weight=noise(7, x[1].shape[0], 32))
