"""The meaning of page_scores, in torch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..attend_rows.ref import owners


def run(
    q: Tensor,
    kmin: Tensor,
    kmax: Tensor,
    table: Tensor,
    length: Tensor,
    page: int,
    spans: tuple[int, ...],
    reduce: Literal["max", "sum"] = "max",
) -> Tensor:
    score = q.new_full(table.shape, -torch.inf)
    for row, b, heads in owners(q, table, spans):
        n = -(-int(length[row]) // page)
        if n == 0 or spans[b] == spans[b + 1]:
            continue
        at = table[row, :n].long()
        x = q[spans[b] : spans[b + 1], heads]
        bound = x.clamp_min(0) @ kmax[at].float().T + x.clamp_max(0) @ kmin[at].float().T  # [tokens, G, n]
        score[row, :n] = (bound.sum(1) if reduce == "sum" else bound.amax(1)).amax(0)
    return score
