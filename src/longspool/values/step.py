"""One forward pass, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Phase = Literal["prefill", "decode", "verify"]


@dataclass(frozen=True)
class Step:
    """The tokens of one pass over B requests.

    `ids` and `pos` are int64 [N]; request b owns tokens spans[b]:spans[b+1]. `total[b]` is the whole prompt's length, known
    from its first chunk; `final[b]` says that this is the prompt's last chunk. `tree` is a bool [N, n] ancestor mask among the
    step's own tokens of one request (n the longest span), or None where every token sees all older ones.
    """

    ids: Tensor
    pos: Tensor
    spans: tuple[int, ...]
    total: tuple[int, ...]
    phase: Phase
    final: tuple[bool, ...]
    tree: Tensor | None = None

    @property
    def requests(self) -> int:
        return len(self.spans) - 1

    @property
    def reach(self) -> int:
        """The longest length known of a single request's sequence."""
        return max(self.total[0], int(self.pos[-1]) + 1)

    def meets(self, every: int) -> bool:
        """Whether a single request's step has a token whose position is a multiple of `every`. No torch is asked, so that it may be while
        steps are written down."""
        pos = self.pos.numpy()
        return int(pos[-1]) // every != (int(pos[0]) - 1) // every

    def of(self, request: int) -> Step:
        """The part of one request."""
        a, b = self.spans[request], self.spans[request + 1]
        tree = None if self.tree is None else self.tree[a:b]
        return Step(self.ids[a:b], self.pos[a:b], (0, b - a), (self.total[request],), self.phase, (self.final[request],), tree)

    def narrow(self, keep: Tensor) -> Step:
        """Only these tokens (ascending indices); the others vanish from the later layers."""
        bounds = torch.searchsorted(keep, torch.tensor(self.spans, device=keep.device))
        tree = None if self.tree is None else self.tree[keep]
        return replace(self, ids=self.ids[keep], pos=self.pos[keep], spans=tuple(bounds.tolist()), tree=tree)
