"""pick_pages(score, table, length, page, k) -> (picked, tokens): each row's pages with the highest scores, in the row's order.

score    fp32 [R, P], without NaN
table    int32 [R, P], the pages of each row; length int32 [R], its tokens, `page` a page, of which only the last may be partly filled
k        int32 [R], how many pages to take; more than a row has takes them all
picked   int32 [R, max k], -1 past the end; of equal scores the earlier page is taken
tokens   int32 [R], the tokens in the picked pages
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..samples import place

TOLERANCE = (0.0, 0.0)


def samples() -> Iterator[tuple[str, tuple[Tensor, Tensor, Tensor, int, Tensor], dict[str, int]]]:
    g = torch.Generator().manual_seed(4)
    cases = (([160, 160, 160], 16, 3), ([1, 170, 333, 0], 16, 9), ([4096] * 6, 64, 20), ([70, 7000], 32, 64), ([], 16, 2))
    for lengths, page, most in cases:
        table, length, _ = place(len(lengths), lengths, page)
        score = torch.randn(table.shape, generator=g)
        k = torch.randint(0, most + 1, (len(lengths),), generator=g, dtype=torch.int32)
        yield f"rows of {lengths} by {page}, up to {most}", (score, table, length, page, k), {}
        tied = torch.randint(0, 3, table.shape, generator=g).float()
        yield f"ties in {lengths} by {page}", (tied, table, length, page, torch.full_like(k, most)), {}
