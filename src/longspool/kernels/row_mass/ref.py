"""The meaning of row_mass, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attend_rows.ref import keys_of, logits, owners, tokens, values_of, visible


def run(
    q: Tensor,
    kp: Tensor,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    lse: Tensor,
    scale: float,
    softcap: float = 0.0,
    weight: Tensor | None = None,
) -> Tensor:
    mass = q.new_zeros(table.shape[0], table.shape[1] * kp.shape[2])
    for row, b, heads in owners(q, table, spans):
        n = int(length[row])
        if n == 0:
            continue
        k = keys_of(kp, table, row, n)
        extra = None if weight is None else values_of(weight[..., None], table, row, n)[:, 0]
        for part in tokens(spans[b], spans[b + 1], heads.stop - heads.start, n):
            norm = lse[part, heads].T[..., None]
            seen = visible(part, n, lo, hi, q.device) & (norm > -torch.inf)
            s = logits(q[part, heads], k, scale, softcap, extra) - norm
            mass[row, :n] += torch.exp(s.masked_fill(~seen, -torch.inf)).sum((0, 1))
    return mass
