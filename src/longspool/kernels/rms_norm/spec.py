"""rms_norm(x, gain, floor) -> y: root-mean-square norm of each row.

x      fp32 [N, W]
gain   fp32 [W], the weight times sqrt(W)
floor  float, sqrt(W * eps)
y      fp32 [N, W] = x * gain / sqrt(sum(x^2) + floor^2), which is weight * x / sqrt(mean(x^2) + eps)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

TOLERANCE = (2e-6, 2e-6)


def samples() -> Iterator[tuple[str, tuple, dict]]:
    g = torch.Generator().manual_seed(8)
    for n, width, size in ((1, 576, 1.0), (3, 2048, 30.0), (300, 64, 1e-3), (0, 64, 1.0), (1, 5, 1.0), (2, 5000, 1.0)):
        x, gain = torch.randn(n, width, generator=g) * size, torch.randn(width, generator=g) * width**0.5
        yield f"{n}x{width} of size {size}", (x, gain, (width * 1e-5) ** 0.5), {}
    yield "zeros", (torch.zeros(2, 64), torch.ones(64), 0.1), {}
