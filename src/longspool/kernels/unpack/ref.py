"""A packed matrix as floats."""

from __future__ import annotations

from torch import Tensor

from ...values import Packed


def run(w: Packed) -> Tensor:
    return w.unpack()
