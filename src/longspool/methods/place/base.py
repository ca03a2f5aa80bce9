"""What places that select share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from ...method import Method
from ...roles import Place, View


class HeadByHead(Place):
    """A prompt's chunk reads everything, so head by head; a decoding step reads little, at once."""

    def parts(self, heads: int, view: View) -> Iterator[tuple[int, int]]:
        yield from [(h, h + 1) for h in range(heads)] if view.step.phase == "prefill" else [(0, heads)]


def row_queries(q: Tensor, view: View) -> Tensor:
    """The queries of each row [R, g, D]: of its request's tokens and its group's heads; a request with fewer tokens repeats its last."""
    spans, s = view.step.spans, view.shape
    longest = max(b - a for a, b in pairwise(spans))
    at = torch.tensor([[min(a + i, b - 1) for i in range(longest)] for a, b in pairwise(spans)])
    return q[at].view(-1, longest, s.kv_heads, s.group, s.head_dim).transpose(1, 2).reshape(-1, longest * s.group, s.head_dim)


def ascending(index: Tensor, score: Tensor, past: int) -> Tensor:
    """Indices [R, K] below `past` as Rows.pages takes them: in order, on the CPU, and -1 at the end for those of score -inf."""
    at = index.masked_fill(score == -torch.inf, past).sort(dim=1).values.cpu()
    return at.masked_fill(at == past, -1).to(torch.int32)


def tell(view: View, method: Method, busy: Tensor, **amounts: Tensor) -> None:
    """Count amounts [R] for the request of each row, where any of its rows is busy."""
    requests = view.step.requests
    for b in torch.nonzero(busy.view(requests, -1).any(1))[:, 0].tolist():
        view.count(method, b, **{name: int(n.view(requests, -1)[b].sum()) for name, n in amounts.items()})
