"""Quantized pages: keys per channel of a page, values per token, in 8 bits (symmetric) or 4 (with a zero point).

8 bits: value = code * scale, codes int8 in the page's own layout. 4 bits: value = code * scale + zero, two codes a byte. A row of
codes (a channel's W tokens in a key page, a token's D dims in a value page) is cut into chunks of 16, each stored in eight bytes:
the low nibble of byte i is code i, the high one code 8 + i. So eight bytes unpack to two vectors of eight neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor


def encode_k(k: Tensor, bits: int, fill: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pages of keys fp32 [n, D, W] -> codes, scale fp16 [n, D], zero fp16 [n, D] (4 bits) or None.

    Only the first fill[n] tokens count for the range; the others get code 0.
    """
    valid = None if fill is None else (torch.arange(k.shape[2], device=k.device) < fill[:, None])[:, None, :]
    return _encode(k, bits, valid)


def encode_v(v: Tensor, bits: int, fill: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pages of values fp32 [n, W, D] -> codes, scale fp16 [n, W], zero fp16 [n, W] (4 bits) or None."""
    valid = None if fill is None else (torch.arange(v.shape[1], device=v.device) < fill[:, None])[:, :, None]
    return _encode(v, bits, valid)


def decode_k(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """Keys fp32 [n, D, W]."""
    return _decode(codes, scale, zero, bits)


def decode_v(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """Values fp32 [n, W, D]."""
    return _decode(codes, scale, zero, bits)


def encode_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors fp32 [.., D] in 4 bits, each `group` of neighbours with a scale and a zero of its own: codes uint8 [.., D/2], scale and zero
    fp16 [.., D/group]."""
    codes, scale, zero = _encode(x.unflatten(-1, (-1, group)), 4, None)
    assert zero is not None
    return codes.flatten(-2), scale, zero


def decode_groups(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Vectors fp32 [.., D]."""
    return _decode(codes.unflatten(-1, (scale.shape[-1], -1)), scale, zero, 4).flatten(-2)


def looked_up(codes: Tensor, book: Tensor) -> Tensor:
    """Vectors fp32 [S, W, D] of codes uint8 [S, M, W] in a book [M, D/M, C]."""
    count, pieces, page = codes.shape
    at = codes.permute(1, 0, 2).reshape(pieces, 1, -1).long().expand(-1, book.shape[1], -1)
    return book.gather(2, at).reshape(-1, count, page).permute(1, 2, 0)


def _encode(x: Tensor, bits: int, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    # The range runs over the last axis; codes are taken against the rounded fp16 scale, so that rounding it costs nothing.
    seen = torch.ones_like(x, dtype=torch.bool) if valid is None else valid.expand_as(x)
    if bits == 8:
        scale = _positive(torch.where(seen, x, 0.0).abs().amax(-1) / 127)
        codes = torch.round(x / scale.float()[..., None]).clamp(-127, 127)
        return torch.where(seen, codes, 0.0).to(torch.int8), scale, None
    low, high = torch.where(seen, x, torch.inf).amin(-1), torch.where(seen, x, -torch.inf).amax(-1)
    any_seen = seen.any(-1)
    low, high = torch.where(any_seen, low, 0.0), torch.where(any_seen, high, 0.0)
    zero = low.to(torch.float16)
    scale = _positive((high - zero.float()) / 15)
    codes = torch.round((x - zero.float()[..., None]) / scale.float()[..., None]).clamp(0, 15)
    codes = torch.where(seen, codes, 0.0).to(torch.uint8)
    return pack(codes), scale, zero


def _decode(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    if bits == 4:
        codes = unpack(codes)
    x = codes.float() * scale.float()[..., None]
    return x if zero is None else x + zero.float()[..., None]


def pack(codes: Tensor) -> Tensor:
    """uint8 [.., n] with values below 16 -> uint8 [.., n/2]."""
    low, high = codes.unflatten(-1, (-1, 2, 8)).unbind(-2)
    return (low | high << 4).flatten(-2)


def unpack(codes: Tensor) -> Tensor:
    both = codes.unflatten(-1, (-1, 8))
    return torch.stack([both & 15, both >> 4], -2).flatten(-3)


def _positive(scale: Tensor) -> Tensor:
    """fp16, and never 0: a constant channel divides by its scale too."""
    return scale.to(torch.float16).clamp_min(torch.finfo(torch.float16).tiny)
