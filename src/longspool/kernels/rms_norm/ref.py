"""Root-mean-square norm of each row."""

from __future__ import annotations

import torch
from torch import Tensor


def run(x: Tensor, gain: Tensor, floor: float) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x / torch.hypot(length, length.new_tensor(floor))).mul_(gain)
