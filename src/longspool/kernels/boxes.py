"""Boxes of keys: channel-wise bounds of a page as fp16, and of its pieces as a byte a channel between these, all rounded outwards."""

from __future__ import annotations

import torch
from torch import Tensor


def half_up(x: Tensor) -> Tensor:
    """fp16, rounded up, so that a bound stays a bound."""
    half = x.to(torch.float16)
    low, bits = half.float() < x, half.view(torch.int16)
    raised = torch.where(half > 0, bits + 1, torch.where(half < 0, bits - 1, torch.ones_like(bits)))
    return torch.where(low, raised, bits).view(torch.float16)


def boxes(k: Tensor, fill: Tensor, piece: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of pages [S, D, W], of which the first fill[s] tokens count: kmin and kmax fp16 [S, D], and how far inside of these the bounds of
    each piece of `piece` tokens lie, low and high uint8 [S, W / piece, D]. What a piece without tokens gets means nothing."""
    past = (torch.arange(k.shape[-1], device=k.device) >= fill[:, None, None]).unflatten(2, (-1, piece))
    pieces = k.unflatten(2, (-1, piece))
    low, high = pieces.masked_fill(past, torch.inf).amin(-1), pieces.masked_fill(past, -torch.inf).amax(-1)
    kmin, kmax = -half_up(-low.amin(-1)), half_up(high.amax(-1))
    step = _step(kmin, kmax)[..., None]
    inside = (low - kmin.float()[..., None], kmax.float()[..., None] - high)
    return kmin, kmax, *(_codes(x, step).transpose(1, 2) for x in inside)


def bounds(q: Tensor, kmin: Tensor, kmax: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The most that a query of q [R, g, D] can give to a key of each piece, [R, m * n], for m pages a row: kmin, kmax [R, m, D] and low,
    high [R, m, n, D]."""
    step = _step(kmin, kmax)[:, :, None]
    floor, top = kmin.float()[:, :, None] + low * step, kmax.float()[:, :, None] - high * step
    return (q.clamp_min(0) @ top.flatten(1, 2).mT + q.clamp_max(0) @ floor.flatten(1, 2).mT).amax(1)


def _step(low: Tensor, high: Tensor) -> Tensor:
    """What one code is worth."""
    return (high.float() - low.float()) / 255


def _codes(inside: Tensor, step: Tensor) -> Tensor:
    """The largest codes that are worth no more than these distances."""
    code = (inside / step.clamp_min(1e-30)).floor().clamp(0, 255)
    code = torch.where(code * step > inside, code - 1, code)
    return code.clamp(0, 255).to(torch.uint8)
