"""pick_pages on the GPU: the choice by topk_rows' kernel, the look-up by torch where the tables are."""

from __future__ import annotations

import torch
from torch import Tensor

from ..topk_rows import gpu as topk_rows


def can(score: Tensor, *rest: object) -> str | None:
    return topk_rows.unreachable(score)


def run(score: Tensor, table: Tensor, length: Tensor, page: int, k: Tensor) -> tuple[Tensor, Tensor]:
    index, n = topk_rows.run(score, (length + page - 1) // page, k)
    index, n = index.to(table.device).long(), n.to(table.device)
    if not index.shape[1] or not table.shape[1]:
        return index.to(torch.int32), torch.zeros_like(length)
    taken = torch.arange(index.shape[1], device=table.device) < n[:, None]
    at = index.clamp_min(0)
    tokens = torch.where(taken, (length[:, None] - at * page).clamp(max=page), 0).sum(1, dtype=torch.int32)
    return torch.where(taken, table.gather(1, at), -1), tokens
