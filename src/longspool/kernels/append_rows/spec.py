"""append_rows(kp, vp, table, start, k, v, offset) -> None, in place.

kp [Pages, D, W], vp [Pages, W, D] (fp32 | fp16 | bf16), table int32 [R, P], start int32 [R], k and v fp32 [S, D],
offset int32 | int64 [R+1]. The tokens offset[r]:offset[r+1] go to row r's in-row indices start[r], start[r]+1, ... The row's
table already names the pages. Values are rounded to the pool's dtype (nearest, ties to even).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..samples import noise, place

TOLERANCE = (0.0, 0.0)


def case(seed: int, start: list[int], counts: list[int], dim: int, page: int, dtype: torch.dtype) -> tuple:
    table, _, total = place(seed, [a + n for a, n in zip(start, counts, strict=True)], page)
    offset = torch.tensor([0, *counts]).cumsum(0)
    size = int(offset[-1])
    kp, vp = noise(seed, total, dim, page).to(dtype), noise(seed + 1, total, page, dim).to(dtype)
    return kp, vp, table, torch.tensor(start, dtype=torch.int32), noise(seed + 2, size, dim), noise(seed + 3, size, dim), offset


def samples() -> Iterator[tuple[str, tuple, dict]]:
    yield "decode", case(1, [0, 15, 16], [1, 1, 1], 64, 16, torch.float16), {}
    yield "ragged", case(2, [3, 0, 70, 5], [40, 0, 130, 1], 80, 32, torch.bfloat16), {}
    yield "prefill", case(3, [100, 7], [300, 300], 128, 64, torch.float16), {}
    yield "tiny", case(4, [1, 9, 40], [5, 90, 3], 8, 16, torch.float32), {}
    yield "nothing", case(5, [4, 4], [0, 0], 16, 16, torch.float32), {}
