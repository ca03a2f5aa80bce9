"""The meaning of gather_rows, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def run(kp: Tensor, vp: Tensor, table: Tensor, index: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    page = kp.shape[2]
    counts = offset.long().diff()
    row = torch.repeat_interleave(torch.arange(len(counts), device=index.device), counts)
    pages, slot = table[row, index // page].long(), index % page
    return kp[pages, :, slot].float(), vp[pages, slot].float()
