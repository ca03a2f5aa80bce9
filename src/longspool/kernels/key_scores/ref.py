"""The meaning of key_scores, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attend_rows.ref import keys_of, owners


def run(q: Tensor, kp: Tensor, table: Tensor, length: Tensor, spans: tuple[int, ...], dims: Tensor | None = None) -> Tensor:
    score = q.new_full((*q.shape[:2], table.shape[1] * kp.shape[2]), -torch.inf)
    for row, b, heads in owners(q, table, spans):
        n, tokens = int(length[row]), slice(spans[b], spans[b + 1])
        if n == 0:
            continue
        x, k = q[tokens, heads], keys_of(kp, table, row, n)
        if dims is not None:
            x, k = x[..., dims[row].long()], k[:, dims[row].long()]
        score[tokens, heads, :n] = torch.einsum("thd,nd->thn", x, k)
    return score
