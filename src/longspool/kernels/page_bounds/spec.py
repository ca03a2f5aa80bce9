"""page_bounds(kp, pages, fill) -> (kmin fp32 [S, D], kmax fp32 [S, D]).

kp [Pages, D, W] (fp32 | fp16 | bf16), pages int64 [S], fill int32 [S] in 1..W: the smallest and the largest key of each channel
over the first fill[s] tokens of page pages[s].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..samples import pool

TOLERANCE = (0.0, 0.0)


def case(seed: int, lengths: list[int], dim: int, page: int, dtype: torch.dtype) -> tuple:
    p = pool(seed, lengths, dim, page, dtype)
    pages, fill = [], []
    for row, n in enumerate(lengths):
        for ordinal in range(-(-n // page)):
            pages.append(int(p.table[row, ordinal]))
            fill.append(min(page, n - ordinal * page))
    return p.kp, torch.tensor(pages, dtype=torch.int64), torch.tensor(fill, dtype=torch.int32)


def samples() -> Iterator[tuple[str, tuple, dict]]:
    yield "half", case(1, [33, 200], 64, 16, torch.float16), {}
    yield "brain", case(2, [65, 1, 140], 96, 64, torch.bfloat16), {}
    yield "full", case(3, [9, 130], 8, 128, torch.float32), {}
    yield "nothing", case(4, [0], 16, 32, torch.float32), {}
