"""pick_tokens(score, table, length, page, k) -> (slots, n): the tokens with the highest scores, as pool slots.

score    fp32 [S, T], without NaN; S is R or a multiple of it: rows s*S/R to (s+1)*S/R - 1 choose among the tokens of row s of the table
table    int32 [R, P], the pages of each row; length int32 [R], its tokens, `page` a page, of which only the last may be partly filled
k        int32 [S], how many to take; more than a row has takes them all
slots    int32 [S, max k], table[page] * page + offset in the row's order, -1 past the end; of equal scores the earlier token is taken
n        int32 [S] = min(k, length)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..samples import place

TOLERANCE = (0.0, 0.0)


def samples() -> Iterator[tuple[str, tuple[Tensor, Tensor, Tensor, int, Tensor], dict[str, int]]]:
    g = torch.Generator().manual_seed(6)
    cases = (
        ([160, 160, 160], 16, 3, 30),
        ([1, 170, 333, 0], 16, 1, 90),
        ([4096] * 2, 64, 3, 200),
        ([70, 7000], 32, 1, 64),
        ([5], 16, 2, 0),
    )
    for lengths, page, many, most in cases:
        table, length, _ = place(len(lengths), lengths, page)
        score = torch.randn(len(lengths) * many, table.shape[1] * page, generator=g)
        k = torch.randint(0, most + 1, (len(score),), generator=g, dtype=torch.int32)
        yield f"rows of {lengths} by {page}, {many} each, up to {most}", (score, table, length, page, k), {}
        tied = torch.randint(0, 3, score.shape, generator=g).float()
        yield f"ties in {lengths} by {page}", (tied, table, length, page, torch.full_like(k, most)), {}
