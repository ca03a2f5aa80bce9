"""The k highest scores of each row."""

from __future__ import annotations

import torch
from torch import Tensor


def run(score: Tensor, count: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = score.shape
    count, k = count.to(score.device), k.to(score.device)
    n = torch.minimum(k, count).clamp_min(0).to(torch.int32)
    index = torch.full((rows, int(k.max()) if rows else 0), -1, dtype=torch.int32, device=score.device)
    column = torch.arange(width, device=score.device)
    valid = column < count[:, None]
    # Invalid columns rank behind valid ones, even those scored -inf; a stable sort leaves ties to the lower index.
    order = torch.argsort(score, dim=1, descending=True, stable=True)
    order = torch.gather(order, 1, torch.argsort(~torch.gather(valid, 1, order), dim=1, stable=True))
    for row, keep in enumerate(n.tolist()):
        index[row, :keep] = order[row, :keep].sort().values.to(torch.int32)
    return index, n
