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

from ...method import Needs, Paper, Trial
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
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "snapkv(budget=512)",
            "random_evict(budget=512)",
            ("streaming(window=508)",),
            claim="An eighth of the prompt's tokens, chosen by its last queries, keeps the continuation close to dense.",
        ),
        Trial(
            "snapkv(budget=512)",
            "random_evict(budget=512)",
            ("streaming(window=508)",),
            "aware",
            2048,
            claim="A quarter of the tokens is enough for a needle that the question names.",
        ),
    )
    question: ClassVar[bool] = True

    def needs(self) -> Needs:
        return Needs(recent=self.window, queries=self.window, keys="rotated")

    def check(self, shape: Shape) -> list[str]:
        reasons = super().check(shape)
        if self.window < 1:
            reasons.append(f"window={self.window} must be at least 1.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            reasons.append(f"kernel={self.kernel} must be an odd number of tokens.")
        return reasons

    def score(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        s, q, real = view.shape, view.queries, (pos >= 0).float()
        q = q.reshape(s.kv_heads, s.group * q.shape[1], s.head_dim)  # [R, G*n, D]
        total = torch.stack([_normaliser(q[r], keys, s) for r, keys in enumerate(view.keys())])
        mean = torch.exp(_logits(q, k, s) - total[..., None]).mean(1) * real  # [R, T]
        return _pooled(mean, self.kernel) / _pooled(real, self.kernel).clamp_min(1 / self.kernel)


def _logits(q: Tensor, k: Tensor, shape: Shape) -> Tensor:
    logits = shape.scale * q @ k.transpose(-1, -2)
    return torch.tanh(logits / shape.softcap) * shape.softcap if shape.softcap else logits


def _normaliser(q: Tensor, keys: Tensor, shape: Shape) -> Tensor:
    """log sum exp of each window query q [G*n, D] over all that it sees of one row's keys [T, D]; [G*n]."""
    n = len(q) // shape.group
    logits = _logits(q, keys, shape)
    ahead = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1).repeat(shape.group, 1)
    logits[:, -n:].masked_fill_(ahead, -torch.inf)
    return logits.logsumexp(-1)


def _pooled(x: Tensor, kernel: int) -> Tensor:
    """The mean over `kernel` neighbours of x [R, T], zeros beyond its ends."""
    return avg_pool1d(x[:, None], kernel, 1, kernel // 2)[:, 0]
