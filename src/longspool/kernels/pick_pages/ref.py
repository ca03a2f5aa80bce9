"""The pages with the highest scores, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from ..topk_rows import ref as topk_rows


def run(score: Tensor, table: Tensor, length: Tensor, page: int, k: Tensor) -> tuple[Tensor, Tensor]:
    index, n = topk_rows.run(score, (length + page - 1) // page, k)
    index, n = index.to(table.device), n.to(table.device)
    picked = torch.full(index.shape, -1, dtype=torch.int32, device=table.device)
    tokens = torch.zeros_like(length)
    for row, count in enumerate(n.tolist()):
        pages = index[row, :count].long()
        picked[row, :count] = table[row, pages]
        tokens[row] = (length[row] - pages * page).clamp(max=page).sum()
    return picked, tokens
