"""Knorm: keep the keys of smallest norm.

A key of small norm tends to draw much attention, so that the norm alone, without any query, ranks the tokens of a head:  s_j = -||k_j||.
The paper leaves the first two layers whole (`knorm @ 2-` does it). Where a model norms its keys they all have nearly the same length, and
the method has little to go by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...method import Paper, Trial
from ...roles import View
from .base import ScoreEvict


@dataclass(frozen=True)
class KNorm(ScoreEvict):
    paper: ClassVar[Paper] = Paper(
        "",
        "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
        "arXiv:2406.11430",
        "half the cache on language modelling without loss, 90% on passkeys",
    )
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial("knorm(budget='25%') @ 2-", "random_evict(budget='25%') @ 2-", claim="Better than chance where the longest keys go first."),
    )

    def score(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        return -k.square().sum(-1)  # in the order of norms
