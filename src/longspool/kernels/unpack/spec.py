"""unpack(w) -> y: a packed matrix as floats.

w      Packed [M, K] of any kind
y      fp32 [M, K], contiguous, equal to w.unpack() to the last bit
"""

from __future__ import annotations

from collections.abc import Iterator

from ...values import Packed
from ...values.packed import FLOATS, FORMS
from ..matmul.spec import packed

TOLERANCE = (0.0, 0.0)


def samples() -> Iterator[tuple[str, tuple[Packed], dict[str, int]]]:
    for kind in (*FORMS, *FLOATS):
        for rows, cols in ((64, 64), (70, 96), (1, 32), (33, 160)):
            yield f"{kind} {rows}x{cols}", (packed(kind, rows, cols),), {}
    for kind in ("f16", "bf16"):
        yield f"{kind} odd width", (packed(kind, 45, 37),), {}
    yield "part", (packed("q4_0", 200, 64).part(64, 200),), {}
