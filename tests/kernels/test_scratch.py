"""Kernels must keep their scratch memory alive: freed early, it may be handed to someone else while it is still read."""

from __future__ import annotations

import torch

from longspool.kernels import matmul
from longspool.values.packed import Packed


def test_products_are_right_while_the_heap_is_busy_and_full_of_nan() -> None:
    torch.manual_seed(0)
    for i in range(600):
        kind, rows = ("bf16", "int8", "int4")[i % 3], (20, 117, 84)[i // 3 % 3]
        w = torch.randn(rows, 64)
        packed = Packed.from_float(w, kind)
        x = torch.randn(5, 64)
        junk = [torch.full((330,), float("nan")) for _ in range(4)]
        del junk
        assert torch.allclose(matmul(x, packed), x @ packed.unpack().T, atol=1e-3), (i, kind, rows)
