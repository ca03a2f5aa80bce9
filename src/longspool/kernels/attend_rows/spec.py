"""attend_rows(q, kp, vp, table, length, spans, lo, hi, scale, softcap=0, weight=None, tree=None, fresh=None) -> (out, lse).

q fp32 [N, H, D], already rotated; kp [Pages, D, W], vp [Pages, W, D] (fp32 | fp16 | bf16); table int32 [R, P], length int32 [R];
spans a tuple of B+1 token offsets. Row r = b*(R/B) + h serves request b and its query heads h*G to h*G + G-1, G = B*H/R.
out fp32 [N, H, D]; lse fp32 [N, H] is the natural log of the sum of exp(logit).

A query token n sees the in-row indices lo[n] <= j < hi[n] with j < length[r]; lo, hi int32 [N] or None (0 and length).
logit = q.k * scale, then softcap * tanh(logit / softcap) if softcap > 0, then + weight[page, slot] (fp32 [Pages, W]) if given.
tree bool [N, n]: the last n_b keys below the request's hi (the same for all its tokens; length where hi is None) are the
step's own tokens, n_b = spans[b+1] - spans[b]; token i sees own token j only if tree[i, j], and every older key.
A query that sees nothing gets out 0 and lse -inf.
fresh (k, v, offset): tokens to append to the rows first, in the form of append_rows; `length` counts them already.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from ..samples import noise, pool

TOLERANCE = (2e-5, 2e-5)


def causal(lengths: list[int], spans: tuple[int, ...], rows: int) -> Tensor:
    """hi int32 [N] for a step whose tokens are the newest of each request's rows."""
    per = rows // (len(spans) - 1)
    ends = [torch.arange(b - a) + lengths[i * per] - (b - a) + 1 for i, (a, b) in enumerate(pairwise(spans))]
    return torch.cat(ends).to(torch.int32)


def ranges(seed: int, spans: tuple[int, ...], longest: int) -> tuple[Tensor, Tensor]:
    """Random lo and hi int32 [N], some of them empty."""
    rng = torch.Generator().manual_seed(seed)
    lo = torch.randint(longest, (spans[-1],), generator=rng)
    return lo.to(torch.int32), (lo + torch.randint(longest, lo.shape, generator=rng) - longest // 8).to(torch.int32)


def ancestors(spans: tuple[int, ...]) -> Tensor:
    """A random tree per request as its ancestor mask, bool [N, n]."""
    n = max(b - a for a, b in pairwise(spans))
    mask = torch.zeros(spans[-1], n, dtype=torch.bool)
    for a, b in pairwise(spans):
        for i in range(b - a):
            if i:
                mask[a + i] = mask[a + (i * 7 + a) % i]
            mask[a + i, i] = True
    return mask


def case(seed: int, spans: tuple[int, ...], lengths: list[int], heads: int, dim: int, page: int, dtype: torch.dtype) -> tuple:
    p = pool(seed, lengths, dim, page, dtype)
    return noise(seed + 99, spans[-1], heads, dim), p.kp, p.vp, p.table, p.length, spans


def samples() -> Iterator[tuple[str, tuple, dict]]:
    half, brain, full = torch.float16, torch.bfloat16, torch.float32
    yield "decode", (*case(1, (0, 1), [300, 300, 300], 9, 64, 64, half), None, None, 0.125), {}
    yield "batch", (*case(2, (0, 1, 2, 3), [70, 70, 0, 5, 129, 129], 8, 128, 32, brain), None, None, 0.09), {}
    yield "perhead", (*case(3, (0, 1), [33, 1, 0, 90], 4, 64, 16, half), None, None, 0.125), {"softcap": 20.0}
    spans, lengths = (0, 37, 38, 120), [90, 90, 1, 1, 200, 200]
    yield "prefill", (*case(4, spans, lengths, 6, 64, 16, half), None, causal(lengths, spans, 6), 0.125), {}
    lo, hi = ranges(5, (0, 50, 90), 260)
    x = case(5, (0, 50, 90), [250, 30, 77, 256], 8, 96, 32, full)
    yield "windows", (*x, lo, hi, 0.1), {"softcap": 5.0}
    lo, hi = ranges(6, (0, 2), 60)
    x = case(6, (0, 2), [50, 61], 10, 16, 16, full)
    yield "weights", (*x, lo, hi, 0.25), {"weight": noise(7, x[1].shape[0], 16)}
    spans, lengths = (0, 7, 20), [40, 40, 19, 19]
    ends = torch.tensor([40] * 7 + [19] * 13, dtype=torch.int32)
    yield "tree", (*case(8, spans, lengths, 4, 64, 16, brain), None, ends, 0.125), {"tree": ancestors(spans)}
    for tokens, lengths in ((1, [80, 80, 17, 17]), (130, [200, 200, 130, 130])):
        spans = (0, tokens, 2 * tokens)
        x = case(10, spans, lengths, 6, 64, 16, half)
        fresh = (noise(11, 4 * tokens, 64), noise(12, 4 * tokens, 64), torch.arange(5) * tokens)
        yield f"{tokens} fresh", (*x, None, causal(lengths, spans, 4), 0.125), {"fresh": fresh}
    spans, lengths = (0, 5, 9), [70, 70, 21, 21]
    ends = torch.tensor([70] * 5 + [21] * 4, dtype=torch.int32)
    fresh = (noise(13, 18, 64), noise(14, 18, 64), torch.tensor([0, 5, 10, 14, 18]))
    yield "fresh tree", (*case(13, spans, lengths, 6, 64, 16, half), None, ends, 0.125), {"tree": ancestors(spans), "fresh": fresh}
    yield "wide", (*case(9, (0, 3), [130], 8, 256, 128, half), None, None, 0.06), {}
