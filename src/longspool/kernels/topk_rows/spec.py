"""topk_rows(score, count, k) -> (index, n): the highest scores of each row.

score   fp32 [R, P], without NaN
count   int32 [R], the valid columns: the first count[r]
k       int32 [R], how many to take; more than count[r] takes them all
index   int32 [R, max k], ascending, -1 past the end; of equal scores the lower index is taken
n       int32 [R] = min(k, count)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TOLERANCE = (0.0, 0.0)


def samples() -> Iterator[tuple[str, tuple[Tensor, Tensor, Tensor], dict[str, int]]]:
    g = torch.Generator().manual_seed(4)
    for rows, width, most in ((1, 8, 3), (3, 100, 20), (9, 513, 64), (4, 5, 9), (2, 4096, 600), (24, 1500, 200), (3, 0, 2), (0, 7, 2)):
        score = torch.randn(rows, width, generator=g)
        count = torch.randint(0, width + 1, (rows,), generator=g, dtype=torch.int32)
        k = torch.randint(0, most + 1, (rows,), generator=g, dtype=torch.int32)
        yield f"{rows}x{width}, up to {most}", (score, count, k), {}
    tied = torch.randint(0, 4, (5, 200), generator=g).float()
    tied[2] = 0.0
    tied[2, ::2] = -0.0
    tied[3, 10:] = -torch.inf
    tied[4, ::3] = torch.inf
    yield "ties", (tied, torch.full((5,), 190, dtype=torch.int32), torch.full((5,), 50, dtype=torch.int32)), {}
