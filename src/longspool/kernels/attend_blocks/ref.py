"""The meaning of attend_blocks, in torch: attend_rows under a mask spread out from blocks."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ...values import Blocks
from ..attend_rows.ref import attend, keys_of, logits, owners, tokens, values_of, visible


def query_blocks(spans: tuple[int, ...], size: int) -> list[int]:
    """The first query block of each request in the concatenated list."""
    first = [0]
    for a, b in pairwise(spans):
        first.append(first[-1] + -(-(b - a) // size))
    return first


def run(
    q: Tensor,
    kp: Tensor,
    vp: Tensor,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    blocks: Blocks,
    base: tuple[int, ...],
    first: tuple[int, ...],
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    size, start = blocks.size, query_blocks(spans, blocks.size)
    for row, b, heads in owners(q, table, spans):
        n, span = int(length[row]), (spans[b], spans[b + 1])
        if n == 0 or span[0] == span[1]:
            continue
        k, v = keys_of(kp, table, row, n), values_of(vp, table, row, n)
        ordinal = torch.arange(n, device=q.device) + base[b]
        listed = blocks.mask(max((base[b] + n - 1) // size, int(blocks.index.max())) + 1)[heads].to(q.device)
        for part in tokens(*span, heads.stop - heads.start, n):
            own = torch.arange(part.start - span[0], part.stop - span[0], device=q.device)
            seen = visible(part, n, lo, hi, q.device)
            if hi is None:
                seen &= ordinal <= (own + first[b])[:, None]
            allowed = seen & listed[:, start[b] + own // size][:, :, ordinal // size]
            out[part, heads], lse[part, heads] = attend(logits(q[part, heads], k, scale, softcap, None), v, allowed)
    return out, lse
