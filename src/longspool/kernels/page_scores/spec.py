"""page_scores(q, kmin, kmax, table, length, page, spans, reduce="max") -> score fp32 [R, P].

q fp32 [N, H, D]; kmin, kmax [Pages, D] (fp32 | fp16), the bounds of each page of the pool; table int32 [R, P], length int32 [R];
page: tokens a page holds; spans and the heads of a row as in attend_rows. score[r, p] is the upper bound of q.k over page table[r, p],
sum_i max(q_i * kmin_i, q_i * kmax_i): the maximum over the request's tokens of this step and the maximum (or with reduce="sum"
the sum) over the row's query heads. -inf past the row's pages, and for a request without tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..samples import noise, place

TOLERANCE = (2e-5, 2e-5)


def case(seed: int, spans: tuple[int, ...], lengths: list[int], heads: int, dim: int, page: int, dtype: torch.dtype) -> tuple:
    table, length, total = place(seed, lengths, page)
    a, b = noise(seed, total, dim).to(dtype), noise(seed + 1, total, dim).to(dtype)
    return noise(seed + 2, spans[-1], heads, dim), torch.minimum(a, b), torch.maximum(a, b), table, length, page, spans


def samples() -> Iterator[tuple[str, tuple, dict]]:
    yield "decode", case(1, (0, 1), [300, 300, 290], 9, 64, 16, torch.float16), {}
    yield "sum", case(2, (0, 1), [300, 300, 290], 9, 64, 16, torch.float32), {"reduce": "sum"}
    yield "batch", case(3, (0, 1, 2, 3), [70, 70, 0, 5, 129, 129], 8, 128, 32, torch.float32), {}
    yield "tokens", case(4, (0, 5, 5, 7), [64, 20, 9, 40, 1, 33], 10, 16, 16, torch.float16), {"reduce": "sum"}
    yield "perhead", case(5, (0, 1), [300, 30, 0, 17], 4, 96, 16, torch.float16), {}
