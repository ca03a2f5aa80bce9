"""The meaning of attend_codes, in torch: decode a row's pages, then attend."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attend_rows.ref import attend, logits, owners, tokens, visible
from ..codes import decode_k, decode_v


def run(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    kscale: Tensor,
    kzero: Tensor | None,
    vscale: Tensor,
    vzero: Tensor | None,
    bits: int,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    page = vscale.shape[1]
    for row, b, heads in owners(q, table, spans):
        n = int(length[row])
        if n == 0:
            continue
        at = table[row, : -(-n // page)].long()
        k = decode_k(kc[at], kscale[at], None if kzero is None else kzero[at], bits).transpose(1, 2).reshape(-1, q.shape[2])[:n]
        v = decode_v(vc[at], vscale[at], None if vzero is None else vzero[at], bits).reshape(-1, q.shape[2])[:n]
        for part in tokens(spans[b], spans[b + 1], heads.stop - heads.start, n):
            seen = visible(part, n, lo, hi, q.device)
            out[part, heads], lse[part, heads] = attend(logits(q[part, heads], k, scale, softcap, None), v, seen)
    return out, lse
