"""The exact merge of attention over parts."""

from __future__ import annotations

import torch
from torch import Tensor


def run(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    lse = torch.stack(lses)  # [parts, N, H]
    top = lse.amax(0)
    seen = torch.where(top.isinf(), 0.0, top)  # nothing visible anywhere: weights are exp(-inf) = 0, never exp(nan)
    weight = torch.exp(lse - seen)
    total = weight.sum(0)
    share = weight / torch.where(total == 0, 1.0, total)
    out = torch.zeros_like(outs[0])
    for part, w in zip(outs, share, strict=True):
        # A part that saw nothing may hold anything, NaN included.
        out += torch.where(w[..., None] > 0, w[..., None] * part, 0.0)
    return out, total.log() + seen
