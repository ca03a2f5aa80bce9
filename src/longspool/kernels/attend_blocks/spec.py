"""attend_blocks(q, kp, vp, table, length, spans, lo, hi, blocks, base, first, scale, softcap=0) -> (out, lse).

As attend_rows, but a key is seen only if its block is listed for the query's head and block. Token n of request b has the
logical ordinal first[b] + n - spans[b] and lies in the request's query block (n - spans[b]) // size of this step; the key at in-row
index j has the logical ordinal base[b] + j and lies in key block (base[b] + j) // size. blocks.index int32 [H, Q, K'] and
blocks.count int32 [H, Q]: Q runs over the query blocks of all requests, one request after another. base and first are
tuples of one int per request. With hi None a query sees the keys up to its own ordinal. Skipped blocks cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from ...values import Blocks
from ..attend_rows.spec import case, causal, ranges

TOLERANCE = (2e-5, 2e-5)


def pattern(seed: int, heads: int, spans: tuple[int, ...], keys: int, size: int, density: float) -> Blocks:
    """Random blocks over the ordinals below `keys`; some queries see nothing."""
    queries = sum(-(-(b - a) // size) for a, b in pairwise(spans))
    rng = torch.Generator().manual_seed(seed)
    return Blocks.of(torch.rand(heads, queries, -(-keys // size), generator=rng) < density, size)


def samples() -> Iterator[tuple[str, tuple, dict]]:
    spans, lengths = (0, 100), [180, 180, 180]
    x = case(1, spans, lengths, 9, 64, 16, torch.float16)
    yield "causal", (*x, None, causal(lengths, spans, 3), pattern(1, 9, spans, 180, 32, 0.4), (0,), (80,), 0.125), {}
    yield "ordinals", (*x, None, None, pattern(2, 9, spans, 180, 64, 0.5), (0,), (80,), 0.125), {}
    spans, lengths = (0, 33, 34, 90), [70, 50, 200, 10, 57, 120]
    x, (lo, hi) = case(3, spans, lengths, 8, 96, 32, torch.float32), ranges(3, spans, 150)
    yield "ragged", (*x, lo, hi, pattern(3, 8, spans, 260, 16, 0.3), (5, 40, 0), (60, 90, 64), 0.1), {"softcap": 8.0}
    x = case(4, (0, 1), [257, 257], 4, 64, 64, torch.bfloat16)
    yield "decode", (*x, None, None, pattern(4, 4, (0, 1), 300, 128, 0.5), (30,), (286,), 0.125), {}
