"""SnapKV: the last tokens of a prompt show which older ones the answer will need.

The queries of an observation window at the prompt's end attend to everything before it; their mean attention, smoothed along the
tokens so that neighbours survive together, ranks the prompt's tokens per head:  s_j = pool_k( mean_{i in window, h in group} a_ij ).
The paper selects per query head; with grouped queries we average over the group, so that a KV head stores one list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from ...method import Needs, Paper
from ...roles import View
from ...values import Shape
from .base import ScoreEvict


@dataclass(frozen=True)
class SnapKV(ScoreEvict):
    window: int = 64
    kernel: int = 5

    paper: ClassVar[Paper] = Paper(
        "",
        "SnapKV: LLM Knows What You are Looking for Before Generation",
        "arXiv:2404.14469",
        "3.6x faster decoding and 8.2x less memory at 16K tokens",
    )
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    question: ClassVar[bool] = True

    def needs(self) -> Needs:
        return Needs(recent=self.window, queries=self.window)

    def check(self, shape: Shape) -> list[str]:
        reasons = super().check(shape)
        if self.window < 1:
            reasons.append(f"window={self.window} must be at least 1.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            reasons.append(f"kernel={self.kernel} must be an odd number of tokens.")
        return reasons

    def score(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        s, q = view.shape, view.queries
        q = q.reshape(s.kv_heads, s.group * q.shape[1], s.head_dim)  # [R, G*n, D]
        attention = torch.exp(s.scale * q @ k.transpose(1, 2) - _normaliser(q, view)[..., None])  # [R, G*n, T]
        mean = attention.masked_fill((pos < 0)[:, None], 0).mean(1)
        return avg_pool1d(mean[:, None], self.kernel, 1, self.kernel // 2, count_include_pad=False)[:, 0]


def _normaliser(q: Tensor, view: View) -> Tensor:
    """log sum exp of each window query over everything it sees, [R, G*n]."""
    n = q.shape[1] // view.shape.group
    logits = view.shape.scale * q @ view.keys().transpose(1, 2)  # [R, G*n, T]
    ahead = torch.ones(n, n, dtype=torch.bool).triu(1).repeat(view.shape.group, 1)
    logits[..., -n:].masked_fill_(ahead, -torch.inf)
    return logits.logsumexp(-1)
