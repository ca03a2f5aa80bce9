"""What the last queries of a text give to older tokens, in plain torch: evictors score by it, once a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from ..values import Shape


def window_attention(q: Tensor, k: Tensor, real: Tensor, keys: Sequence[Tensor], shape: Shape) -> Tensor:
    """The attention [R, G, n, T] of queries q [H, n, D], a text's last n, on k [R, T, D], some of the keys that they see; 0 where these are
    not real (bool [R, T]). `keys` are all that they see, [T', D] for each row, the queries' own tokens last."""
    q = q.reshape(shape.kv_heads, -1, shape.head_dim)
    total = torch.stack([_normaliser(q[r], mine, shape) for r, mine in enumerate(keys)])
    weights = torch.exp(_logits(q, k, shape) - total[..., None]) * real[:, None]
    return weights.unflatten(1, (shape.group, -1))


def over_rows(score: Tensor, pos: Tensor) -> Tensor:
    """Each token's score [R, T] summed over the rows that hold it at pos [R, T], so that all heads of a layer choose alike."""
    if bool((pos == pos[0]).all()):
        return score.sum(0).expand_as(score)
    held, at = pos.unique(return_inverse=True)
    return score.new_zeros(len(held)).index_add(0, at.flatten(), score.flatten())[at]


def smoothed(x: Tensor, real: Tensor, kernel: int) -> Tensor:
    """The mean over `kernel` neighbours of x [R, T], of those that are real (bool [R, T]); 0 elsewhere."""
    x, there = (avg_pool1d((y * real)[:, None], kernel, 1, kernel // 2)[:, 0] for y in (x, real.to(x.dtype)))
    return x / there.clamp_min(1 / kernel) * real


def _logits(q: Tensor, k: Tensor, shape: Shape) -> Tensor:
    logits = shape.scale * q @ k.transpose(-1, -2)
    return torch.tanh(logits / shape.softcap) * shape.softcap if shape.softcap else logits


def _normaliser(q: Tensor, keys: Tensor, shape: Shape) -> Tensor:
    """log sum exp of each query q [G * n, D] over all that it sees of one row's keys [T', D]; [G * n]."""
    n = len(q) // shape.group
    logits = _logits(q, keys, shape)
    ahead = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1).repeat(shape.group, 1)
    logits[:, -n:].masked_fill_(ahead, -torch.inf)
    return logits.logsumexp(-1)
