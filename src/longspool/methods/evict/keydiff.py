"""KeyDiff: keep the keys that differ most from the average key.

With k^ = k / ||k|| and the anchor a = mean_j k^_j over the tokens that compete, the score is  s_j = -cos(k_j, a).  A low cosine to the mean
is a low mean cosine to all other keys, so the kept set is diverse; sinks and other distinctive keys stay. No attention is looked at. With
`when="chunk"` the prompt is read in blocks of `block` tokens against what was kept, so that a prompt of any length fits a strict
budget and one block more; a number does the same, and evicts every so many tokens while decoding (the paper: every token).
Tokens compete in whole pages: those of a page that is not yet full are kept and left out of the anchor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from ...method import Needs, Paper, Trial
from ...roles import View
from ...values import Shape
from .base import ScoreEvict


@dataclass(frozen=True)
class KeyDiff(ScoreEvict):
    block: int = 128

    paper: ClassVar[Paper] = Paper(
        "S062",
        "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained Environments",
        "arXiv:2504.15364",
        "within 0.04% of the full cache on LongBench with 8K tokens kept, in a prefill of bounded memory",
    )
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "keydiff(budget=1024, when=128)",
            "random_evict(budget=1024, when=128)",
            ("knorm(budget=1024, when=128)", "streaming(sinks=4, window=1020)"),
            claim="Better than key norms, chance and streaming under the same strict limit.",
        ),
        Trial(
            "keydiff(budget=1024)",
            "random_evict(budget=1024)",
            ("knorm(budget=1024)", "streaming(sinks=4, window=1020)"),
            "agnostic",
            2048,
            claim="Half the tokens, kept without a question, hold more needles than the newest half does.",
        ),
    )

    def needs(self) -> Needs:
        return Needs(keys="rotated", chunk=None if self.when == "prompt" else self.block)

    def check(self, shape: Shape) -> list[str]:
        return super().check(shape) + ([] if self.block >= 1 else [f"block={self.block} must be at least 1."])

    def score(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        unit = normalize(k, dim=-1) * (pos >= 0)[..., None]
        anchor = normalize(unit.sum(1), dim=-1)  # [R, D]; neither a mean's size nor an anchor's length changes the order
        return -(unit @ anchor[..., None])[..., 0]
