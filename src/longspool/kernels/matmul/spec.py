"""matmul(x, w) -> y: the product with a packed matrix.

x      fp32 [N, K], the activations (any strides)
w      Packed [M, K] of any kind
y      fp32 [N, M] = x @ w.unpack().T

Activations are never quantized: the result differs from the fp32 product of the unpacked matrix by rounding only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...values import Packed
from ...values.packed import FLOATS, FORMS

TOLERANCE = (2e-4, 2e-5)


def packed(kind: str, rows: int, cols: int, seed: int = 0) -> Packed:
    """A random matrix of a kind, with codes of every value."""
    g = torch.Generator().manual_seed(seed)
    if kind in FLOATS or kind.startswith("int"):
        return Packed.from_float(torch.randn(rows, cols, generator=g), kind)  # type: ignore[arg-type]
    raw = torch.randint(0, 256, (rows, cols // 32, FORMS[kind].block), generator=g).to(torch.uint8)
    head = 4 if FORMS[kind].low else 2
    raw[..., :head] = (torch.rand(rows, cols // 32, head // 2, generator=g) * 0.02 - 0.005).half().view(torch.uint8)
    return Packed.from_blocks(kind, raw.flatten(1), cols)  # type: ignore[arg-type]


def samples() -> Iterator[tuple[str, tuple[Tensor, Packed], dict[str, int]]]:
    g = torch.Generator().manual_seed(1)
    for kind in (*FORMS, *FLOATS):
        for tokens, rows, cols in ((1, 64, 64), (1, 70, 96), (3, 1, 32), (8, 33, 160), (13, 100, 64), (70, 130, 288), (0, 32, 32)):
            yield f"{kind} {tokens}x{rows}x{cols}", (torch.randn(tokens, cols, generator=g), packed(kind, rows, cols)), {}
    for kind in ("f16", "bf16", "f32"):
        yield f"{kind} odd width", (torch.randn(5, 37, generator=g), packed(kind, 45, 37)), {}
    yield "strided x", (torch.randn(64, 2, generator=g).T, packed("q4_1", 96, 64)), {}
    yield "part", (torch.randn(2, 64, generator=g), packed("q8_0", 200, 64).part(64, 200)), {}
