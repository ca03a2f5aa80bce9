"""The meaning of take_tokens, in torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def run(kp: Tensor, vp: Tensor, slots: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    (rows, most), (_, dim, page) = slots.shape, kp.shape
    wide = -(-most // page)
    at = pad(slots, (0, wide * page - most)).clamp_min(0).long()
    past = (torch.arange(wide * page, device=length.device) >= length[:, None]).to(kp.device)[..., None]
    k, v = kp[at // page, :, at % page].masked_fill(past, 0), vp[at // page, at % page].masked_fill(past, 0)
    return k.view(rows * wide, page, dim).transpose(1, 2).contiguous(), v.view(rows * wide, page, dim)
