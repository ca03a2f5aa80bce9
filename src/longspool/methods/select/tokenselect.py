"""TokenSelect: the heads of a layer vote on single tokens, and consecutive queries that point the same way share a selection.

Every head's scores become a distribution before they are added, so that heads of large logits do not decide alone:
S_j = sum_h softmax_j(q_h . k_j) over the settled tokens behind the first `sinks`. All heads read the sinks, the best up to `budget`, and
the recent tokens. While the cosine between a token's queries and those that made the last selection is `reuse` or more, that selection
is used again. Where heads hold different tokens, the heads of a group vote among themselves. The paper also selects while it reads the
prompt, and packs positions by storing bare keys, which reaches past the trained context; here positions are the true ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, max_pool1d, pad

from ...kernels import topk_rows
from ...method import Cost, Paper, Trial
from ...roles import Seen, View
from ...values import Rows, Shape
from .base import Picks, as_many, low, per_request


@dataclass(frozen=True)
class TokenSelect(Picks):
    budget: int = 2176
    window: int = 512
    sinks: int = 128
    reuse: float = 0.9
    kernel: int = 1

    paper: ClassVar[Paper] = Paper(
        "S121",
        "TokenSelect: Efficient Long-Context Inference via Dynamic Token-Level KV Cache Selection",
        "arXiv:2411.02886",
        "attention up to 23.84x faster",
    )
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "tokenselect(budget=192, window=128, sinks=64)",
            control="random_select(budget=192, window=128, sinks=64)",
            beats=("streaming(sinks=64, window=256)",),
            claim="Better than a window with sinks of as many tokens, with more than 30% of the selections used again.",
        ),
    )

    def check(self, shape: Shape) -> list[str]:
        reasons = super().check(shape) + low(self, sinks=0, budget=self.sinks + 1, reuse=-1, kernel=1)
        return reasons if self.kernel % 2 else [*reasons, f"kernel={self.kernel} must be an odd number of tokens."]

    def index_bytes(self, shape: Shape, tokens: int) -> int:
        """The queries of the last selection, and the selection."""
        return 4 * (shape.heads * shape.head_dim + shape.kv_heads * self.budget) if tokens > self.budget else 0

    def select(self, q: Tensor, rows: Rows, view: View) -> Seen:
        heads, group, dim = view.shape.kv_heads, view.shape.group, view.shape.head_dim
        asked = per_request(q, view).reshape(-1, heads, group, dim)
        longest = rows.length.view(len(asked), -1).amax(1)
        long = [b for b, n in enumerate(longest.tolist()) if n > self.budget]
        if not long:
            return Seen(rows)
        # What verifies a draft may be taken back, and must leave no trace.
        drawn = view.step.phase == "decode"
        old = {b: view.index[b] for b in long if drawn and view.index[b]}
        again = {b for b, last in old.items() if float(cosine_similarity(last["query"].flatten(), asked[b].flatten(), 0)) >= self.reuse}
        index = torch.full((rows.count, self.budget), -1, dtype=torch.int32)
        if len(again) < len(longest):
            vote = self._vote(per_request(view.scores(q), view), rows, view)
            index = topk_rows(vote, rows.length.to(vote.device), as_many(rows.count, self.budget).to(vote.device))[0].cpu()
        for b in long:
            mine = slice(b * heads, (b + 1) * heads)
            view.count(self, b, reused=float(b in again), computed=float(b not in again))
            if b in again:
                index[mine] = old[b]["picked"].cpu()
            elif drawn:
                view.remember(b, {"query": asked[b].clone(), "picked": index[mine].to(q.device, copy=True)})
        return Seen(rows.at(index))

    def _vote(self, score: Tensor, rows: Rows, view: View) -> Tensor:
        """[R, T] from scores [B, H, T]; the sinks come first of all."""
        score[..., : self.sinks] = -torch.inf
        share = score.softmax(2).nan_to_num(0.0)  # a row without candidates has none to give
        if view.alike:
            vote = share.sum(1).repeat_interleave(view.shape.kv_heads, 0)
        else:
            vote = share.reshape(-1, view.shape.group, share.shape[2]).sum(1)
        if self.kernel > 1:
            vote = max_pool1d(pad(vote, (self.kernel // 2,) * 2)[:, None], self.kernel, 1)[:, 0]
        vote[:, : self.sinks] = torch.inf
        return vote

    def cost(self, shape: Shape) -> Cost:
        return Cost(moved=2 * shape.head_dim)
