"""rope(x, cos, sin) -> y: rotary positions, half-split.

x           fp32 [N, A, D], A heads of N tokens
cos, sin    fp32 [N, r], the first 2r <= D dimensions are rotated
y           fp32 [N, A, D]: y[:r] = x[:r] cos - x[r:2r] sin, y[r:2r] = x[r:2r] cos + x[:r] sin, the rest copied
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TOLERANCE = (1e-6, 1e-6)


def samples() -> Iterator[tuple[str, tuple[Tensor, Tensor, Tensor], dict[str, int]]]:
    g = torch.Generator().manual_seed(2)
    for n, heads, dim, r in (
        (1, 9, 64, 32),
        (1, 1, 6, 2),
        (5, 3, 80, 20),
        (40, 12, 128, 64),
        (700, 2, 64, 32),
        (0, 3, 64, 32),
        (3, 2, 10, 5),
    ):
        angle = torch.rand(n, r, generator=g) * 100
        yield f"{n}x{heads}x{dim}, {2 * r} rotated", (torch.randn(n, heads, dim, generator=g), angle.cos(), angle.sin()), {}
    angle = torch.rand(7, 32, generator=g)
    fused = torch.randn(7, 8, 64, generator=g)
    yield "heads of a fused product", (fused[:, 2:5], angle.cos(), angle.sin()), {}
