"""TOVA: the newest query's attention says which tokens may go.

The attention of the last token, averaged over all heads of a layer, ranks the layer's tokens, and all heads drop the same ones:
s_j = mean_h a_h(last, j). The paper drops one token per decoding step; `when=1` does that, `when="prompt"` drops once after the prompt.
The tokens of a page that is not yet full are too new to be dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...kernels.window import over_rows, window_attention
from ...method import Needs, Paper, Trial
from ...roles import View
from .base import ScoreEvict


@dataclass(frozen=True)
class Tova(ScoreEvict):
    paper: ClassVar[Paper] = Paper(
        "", "Transformers are Multi-State RNNs", "arXiv:2401.06104", "an eighth of the cache at nearly the full model's quality"
    )
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    question: ClassVar[bool] = True
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "tova(budget=512)",
            "random_evict(budget=512)",
            ("streaming(sinks=4, window=508)",),
            "repeat",
            claim="It keeps what comes again.",
        ),
        Trial("tova(budget=512, when=16)", "random_evict(budget=512, when=16)"),
    )

    def needs(self) -> Needs:
        return Needs(queries=1, keys="rotated")

    def score(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        return over_rows(window_attention(view.queries, k, pos >= 0, view.keys(), view.shape).mean((1, 2)), pos)
