"""The meaning of append_rows, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def run(kp: Tensor, vp: Tensor, table: Tensor, start: Tensor, k: Tensor, v: Tensor, offset: Tensor) -> None:
    page = kp.shape[2]
    bounds = offset.tolist()
    for row, first in enumerate(start.tolist()):
        a, b = bounds[row], bounds[row + 1]
        at = torch.arange(first, first + b - a, device=table.device)
        pages, slot = table[row, at // page].long(), at % page
        kp[pages, :, slot] = k[a:b].to(kp.dtype)
        vp[pages, slot] = v[a:b].to(vp.dtype)
