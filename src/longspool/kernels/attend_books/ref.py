"""The meaning of attend_books, in torch: look every code up, then attend."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attend_rows.ref import attend, logits, owners, tokens, visible
from ..codes import looked_up


def run(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    kbook: Tensor,
    vbook: Tensor,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    page, dim = kc.shape[2], q.shape[2]
    for row, b, heads in owners(q, table, spans):
        n = int(length[row])
        if n == 0:
            continue
        at = table[row, : -(-n // page)].long()
        k, v = (looked_up(codes[at], book).reshape(-1, dim)[:n] for codes, book in ((kc, kbook), (vc, vbook)))
        for part in tokens(spans[b], spans[b + 1], heads.stop - heads.start, n):
            seen = visible(part, n, lo, hi, q.device)
            out[part, heads], lse[part, heads] = attend(logits(q[part, heads], k, scale, softcap, None), v, seen)
    return out, lse
