"""merge(outs, lses) -> (out, lse): attention over parts of the keys, merged exactly.

outs   fp32 [N, H, D] each, a part's attention output
lses   fp32 [N, H] each, the logarithm of the part's sum of exp(logit); -inf where the part saw nothing
out    fp32 [N, H, D] = sum of exp(lse_i - lse) out_i
lse    fp32 [N, H]; where no part saw anything out is 0 and lse is -inf, never NaN

What a part that saw nothing holds in `outs` is not read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TOLERANCE = (2e-6, 2e-6)


def samples() -> Iterator[tuple[str, tuple[list[Tensor], list[Tensor]], dict[str, int]]]:
    g = torch.Generator().manual_seed(3)
    for parts, n, heads, dim in ((1, 1, 9, 64), (2, 1, 9, 64), (2, 300, 4, 20), (5, 7, 3, 128), (3, 2, 1, 5), (2, 0, 9, 64)):
        outs = [torch.randn(n, heads, dim, generator=g) for _ in range(parts)]
        lses = [torch.randn(n, heads, generator=g) * 20 for _ in range(parts)]
        yield f"{parts} parts of {n}x{heads}x{dim}", (outs, lses), {}
    outs = [torch.randn(4, 3, 16, generator=g) for _ in range(3)]
    lses = [torch.randn(4, 3, generator=g) for _ in range(3)]
    lses[1][::2] = lses[2][1:] = -torch.inf
    for lse in lses:
        lse[:, 1] = -torch.inf
    for out, lse in zip(outs, lses, strict=True):
        out[lse.isinf()] = torch.nan
    yield "parts that saw nothing", (outs, lses), {}
    far = [torch.full((1, 2), 3e4), torch.full((1, 2), -3e4)]
    yield "far apart", ([torch.ones(1, 2, 8), torch.zeros(1, 2, 8)], far), {}
