"""Codes of 1, 2 or 4 bits a value, packed into bytes along the last dimension: the first code lies in a byte's lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 6e-8  # the smallest step in fp16


def packed(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., n] codes as bytes [..., n * bits / 8]."""
    return (codes.reshape(*codes.shape[:-1], -1, 8 // bits) << _shifts(codes, bits)).sum(-1, dtype=torch.uint8)


def unpacked(data: Tensor, bits: int) -> Tensor:
    """The codes uint8 [..., n] of bytes [..., n * bits / 8]."""
    return ((data[..., None] >> _shifts(data, bits)) & ((1 << bits) - 1)).flatten(-2)


def quantised(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., n] in codes: bytes [..., n * bits / 8], and for every `block` values the lowest and the step fp16 [..., n / block]. Codes are
    taken against the rounded scales."""
    parts, most = x.reshape(*x.shape[:-1], -1, block), (1 << bits) - 1
    low = parts.amin(-1).to(torch.float16)
    step = ((parts.amax(-1) - low.float()) / most).clamp_min(TINY).to(torch.float16)
    codes = ((parts - low[..., None].float()) / step[..., None].float()).round().clamp(0, most)
    return packed(codes.flatten(-2).to(torch.uint8), bits), low, step


def restored(data: Tensor, low: Tensor, step: Tensor, bits: int) -> Tensor:
    """The values [..., n] of what `quantised` gave, fp32."""
    codes = unpacked(data, bits).reshape(*low.shape, -1).float()
    return (codes * step[..., None].float() + low[..., None].float()).flatten(-2)


def _shifts(like: Tensor, bits: int) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=like.device)
