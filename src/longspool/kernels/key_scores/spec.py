"""key_scores(q, kp, table, length, spans, dims=None) -> score fp32 [N, H, P * W]: the dot product of every query with every key.

q fp32 [N, H, D]; kp [Pages, D, W] (fp32 | fp16 | bf16); table int32 [R, P], length int32 [R]; spans and the heads of a row as in
attend_rows. score[n, h, j] = q[n, h] . k_j for the token j of the head's row, neither scaled nor bent; -inf past the row's tokens.
dims int32 [R, r], r > 0: only these components of queries and keys count.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..samples import noise, pool

TOLERANCE = (3e-5, 3e-5)


def case(seed: int, spans: tuple[int, ...], lengths: list[int], heads: int, dim: int, page: int, dtype: torch.dtype) -> tuple:
    p = pool(seed, lengths, dim, page, dtype)
    return noise(seed + 2, spans[-1], heads, dim), p.kp, p.table, p.length, spans


def some(seed: int, rows: int, dim: int, count: int) -> torch.Tensor:
    """Random components, int32 [R, count]."""
    return torch.rand(rows, dim, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :count].to(torch.int32)


def samples() -> Iterator[tuple[str, tuple, dict]]:
    yield "decode", case(1, (0, 1), [300, 300, 290], 9, 64, 16, torch.float16), {}
    yield "batch", case(2, (0, 1, 2, 3), [70, 70, 0, 5, 129, 129], 8, 128, 32, torch.bfloat16), {}
    yield "tokens", case(3, (0, 5, 5, 7), [64, 20, 9, 40, 1, 33], 12, 16, 16, torch.float32), {}
    yield "perhead", case(4, (0, 1), [300, 30, 0, 17], 4, 96, 64, torch.float16), {}
    yield "components", case(5, (0, 1, 2), [300, 30, 64, 17], 12, 64, 16, torch.float16), {"dims": some(5, 4, 64, 12)}
    yield "one component", case(6, (0, 2), [33, 70], 10, 16, 16, torch.float32), {"dims": some(6, 2, 16, 1)}
