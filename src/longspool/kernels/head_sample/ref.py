"""Exact sampling by tiles of the vocabulary: each keeps its best noisy logit and its log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from ...values.packed import Packed
from .. import matmul

_WORD = 0xFFFFFFFF
_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def run(
    h: Tensor, head: Packed, temperature: Tensor, seed: Tensor, offset: Tensor, cap: float = 0.0, tile: int = 8192
) -> tuple[Tensor, Tensor]:
    batch, step = h.shape[0], max(tile // 32 * 32, 32)
    temperature, seed, offset = temperature.to(h.device), seed.to(h.device), offset.to(h.device)
    divide = torch.where(temperature > 0, temperature, 1.0)[:, None]
    best, token = h.new_full((batch,), -torch.inf), torch.zeros(batch, dtype=torch.int64, device=h.device)
    logit, lse = h.new_zeros(batch), h.new_full((batch,), -torch.inf)
    for lo in range(0, head.rows, step):
        z = matmul(h, head.part(lo, min(lo + step, head.rows)))
        z = (z if cap <= 0 else torch.tanh(z / cap) * cap) / divide
        ids = torch.arange(lo, lo + z.shape[1], device=h.device)
        noisy = torch.where(temperature[:, None] > 0, z + gumbel(seed[:, None], offset[:, None], ids[None]), z)
        top, at = noisy.max(1)
        won = top > best
        best, token = torch.where(won, top, best), torch.where(won, lo + at, token)
        logit = torch.where(won, z.gather(1, at[:, None])[:, 0], logit)
        lse = torch.logaddexp(lse, z.logsumexp(1))
    return token, logit - lse


def gumbel(seed: Tensor, offset: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, a function of (seed, offset, id) alone."""
    word = philox((offset & _WORD, offset >> 32 & _WORD, ids, torch.zeros_like(ids)), (seed & _WORD, seed >> 32 & _WORD))[0]
    uniform = (word.double() + 0.5) * 2.0**-32
    return -(-uniform.log()).log().float()


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four 32-bit words, held in int64, from four of counter and two of key."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        p, q = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # 64-bit products; the sign bit is only a bit
        a, b, c, d = (q >> 32 & _WORD) ^ b ^ k, q & _WORD, (p >> 32 & _WORD) ^ d ^ m, p & _WORD
        k, m = k + _WEYL[0] & _WORD, m + _WEYL[1] & _WORD
    return a, b, c, d
