"""The tokens with the highest scores, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from ..topk_rows import ref as topk_rows


def run(score: Tensor, table: Tensor, length: Tensor, page: int, k: Tensor) -> tuple[Tensor, Tensor]:
    many = score.shape[0] // max(table.shape[0], 1)
    index, n = topk_rows.run(score, length.repeat_interleave(many), k)
    return slots_of(index.to(table.device), table.repeat_interleave(many, 0), page), n.to(table.device)


def slots_of(index: Tensor, table: Tensor, page: int) -> Tensor:
    """In-row indices int32 [S, K] as pool slots, -1 staying -1."""
    if not table.shape[1]:
        return torch.full_like(index, -1)
    at = index.clamp_min(0).long()
    return torch.where(index >= 0, table.gather(1, at // page) * page + at % page, -1).to(torch.int32)
