"""A plain runner with dense attention: what every engine must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from longspool.model.build import Model


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of the first 2r dimensions of x [N, A, D] by cos and sin [N, r]."""
    cos, sin, r = cos[:, None], sin[:, None], cos.shape[-1]
    a, b, rest = x[..., :r], x[..., r : 2 * r], x[..., 2 * r :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def attend(model: Model, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one layer, with its window and soft-cap: [N, H, D]."""
    shape, n = model.shape, q.shape[0]
    k, v = (t.repeat_interleave(shape.group, 1) for t in (k, v))
    score = torch.einsum("nhd,mhd->hnm", q, k) * shape.scale
    if shape.softcap:
        score = torch.tanh(score / shape.softcap) * shape.softcap
    back = torch.arange(n)[:, None] - torch.arange(n)
    hidden = (back < 0) | (back >= (shape.windows[layer] or n))
    return torch.einsum("hnm,mhd->nhd", score.masked_fill(hidden, float("-inf")).softmax(-1), v)


@torch.no_grad()
def dense_logits(model: Model, ids: Tensor) -> Tensor:
    """Logits [N, V] of one sequence, prefilled in one piece."""
    pos = torch.arange(len(ids))
    x = model.embed(ids)
    for layer, block in enumerate(model.blocks):
        q, k, v = block.qkv(x)
        if block.rope is not None:
            angles = block.rope.angles(pos, len(ids))
            q, k = rotate(q, *angles), rotate(k, *angles)
        x = block.finish(x, attend(model, layer, q, k, v))
    return model.logits(model.final(x))
