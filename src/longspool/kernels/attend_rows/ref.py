"""The meaning of attend_rows, in torch: a softmax per row over its gathered keys, a bounded number of queries at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..append_rows import ref as append_rows

SCORES = 1 << 23  # logits held at once


def owners(q: Tensor, table: Tensor, spans: tuple[int, ...]) -> Iterator[tuple[int, int, slice]]:
    """(row, request, query heads) of every row."""
    requests, rows = len(spans) - 1, table.shape[0]
    group, per = requests * q.shape[1] // max(rows, 1), rows // max(requests, 1)
    for row in range(rows):
        head = row % per * group
        yield row, row // per, slice(head, head + group)


def tokens(a: int, b: int, heads: int, keys: int) -> Iterator[slice]:
    """The tokens a to b in pieces whose logits are bounded."""
    step = max(SCORES // max(heads * keys, 1), 1)
    for first in range(a, b, step):
        yield slice(first, min(first + step, b))


def keys_of(kp: Tensor, table: Tensor, row: int, n: int) -> Tensor:
    """The row's first n keys, fp32 [n, D]."""
    pages = table[row, : -(-n // kp.shape[2])].long()
    return kp[pages].transpose(1, 2).reshape(-1, kp.shape[1])[:n].float()


def values_of(vp: Tensor, table: Tensor, row: int, n: int) -> Tensor:
    """The row's first n values, fp32 [n, D]."""
    pages = table[row, : -(-n // vp.shape[1])].long()
    return vp[pages].reshape(-1, vp.shape[2])[:n].float()


def visible(part: slice, n: int, lo: Tensor | None, hi: Tensor | None, device: torch.device) -> Tensor:
    """bool [tokens, n]: lo <= j < hi."""
    j = torch.arange(n, device=device)
    seen = torch.ones(part.stop - part.start, n, dtype=torch.bool, device=device)
    if lo is not None:
        seen &= j >= lo[part, None].to(device)
    if hi is not None:
        seen &= j < hi[part, None].to(device)
    return seen


def prune(seen: Tensor, tree: Tensor, part: slice, span: tuple[int, int], end: int) -> Tensor:
    """Leave of the request's own tokens, the last below `end`, only what the tree lets each query see."""
    first, n = end - (span[1] - span[0]), seen.shape[1]
    own = torch.arange(n, device=seen.device) - first
    column = own.clamp(0, tree.shape[1] - 1)
    return seen & ((own < 0) | tree[part].to(seen.device)[:, column])


def logits(q: Tensor, k: Tensor, scale: float, softcap: float, weight: Tensor | None) -> Tensor:
    """[heads, tokens, n] from q [tokens, heads, D] and k [n, D]."""
    s = torch.einsum("thd,nd->htn", q, k) * scale
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    return s if weight is None else s + weight


def attend(s: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """out [tokens, heads, D] and lse [tokens, heads] from logits [heads, tokens, n], v [n, D] and seen [(heads,) tokens, n]."""
    s = s.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("htn,nd->thd", p, v), lse.T


def run(
    q: Tensor,
    kp: Tensor,
    vp: Tensor,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    weight: Tensor | None = None,
    tree: Tensor | None = None,
    fresh: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    if fresh is not None:
        k, v, offset = fresh
        append_rows.run(kp, vp, table, length - offset.diff().to(length), k, v, offset)
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    for row, b, heads in owners(q, table, spans):
        n, span = int(length[row]), (spans[b], spans[b + 1])
        if n == 0 or span[0] == span[1]:
            continue
        k, v = keys_of(kp, table, row, n), values_of(vp, table, row, n)
        extra = None if weight is None else values_of(weight[..., None], table, row, n)[:, 0]
        for part in tokens(*span, heads.stop - heads.start, n):
            seen = visible(part, n, lo, hi, q.device)
            if tree is not None:
                seen = prune(seen, tree, part, span, n if hi is None else int(hi[span[0]]))
            out[part, heads], lse[part, heads] = attend(logits(q[part, heads], k, scale, softcap, extra), v, seen)
    return out, lse
