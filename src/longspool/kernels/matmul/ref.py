"""The product with a packed matrix, unpacked whole."""

from __future__ import annotations

from torch import Tensor

from ...values import Packed


def run(x: Tensor, w: Packed) -> Tensor:
    return x @ w.unpack().T
