"""gather_rows(kp, vp, table, index, offset) -> (k fp32 [S, D], v fp32 [S, D]).

kp [Pages, D, W], vp [Pages, W, D] (fp32 | fp16 | bf16), table int32 [R, P], index int64 [S], offset int32 | int64 [R+1].
Row r reads its in-row indices index[offset[r]:offset[r+1]], in any order and with repeats.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..samples import pool

TOLERANCE = (0.0, 0.0)


def case(seed: int, lengths: list[int], counts: list[int], dim: int, page: int, dtype: torch.dtype) -> tuple:
    p = pool(seed, lengths, dim, page, dtype)
    rng = torch.Generator().manual_seed(seed)
    index = [torch.randint(max(n, 1), (c,), generator=rng) for n, c in zip(lengths, counts, strict=True)]
    return p.kp, p.vp, p.table, torch.cat(index), torch.tensor([0, *counts]).cumsum(0)


def samples() -> Iterator[tuple[str, tuple, dict]]:
    yield "ragged", case(1, [1, 40, 33, 7], [2, 25, 0, 7], 64, 16, torch.float16), {}
    yield "long", case(2, [500, 300], [400, 700], 128, 64, torch.bfloat16), {}
    yield "tiny", case(3, [5, 9], [5, 9], 8, 32, torch.float32), {}
    yield "nothing", case(4, [5], [0], 16, 16, torch.float32), {}
