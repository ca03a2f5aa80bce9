"""The meaning of page_bounds, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def run(kp: Tensor, pages: Tensor, fill: Tensor) -> tuple[Tensor, Tensor]:
    k = kp[pages].float()
    valid = (torch.arange(kp.shape[2], device=kp.device) < fill.to(kp.device)[:, None])[:, None]
    return k.masked_fill(~valid, torch.inf).amin(-1), k.masked_fill(~valid, -torch.inf).amax(-1)
