"""ChunkKV: keep or drop whole chunks of neighbouring tokens, and let neighbouring layers share the choice.

A fact is some tokens long; token by token, parts of it are lost. The attention of the prompt's last `window` queries is summed over
queries and all heads of the layer, a chunk of `chunk` positions scores the mean of its tokens, and the best  floor(room / chunk)  chunks
stay, the same for all heads. Only every `reuse`-th layer chooses; the layers up to the next one keep the same positions. Chunks are counted
from position 0, also where a prompt is read and evicted in parts. The paper protects the window alone; we keep the rest of its page too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels.window import window_attention
from ...method import Needs, Paper, Trial
from ...roles import Kept, View
from ...values import Shape
from .base import ScoreEvict


@dataclass(frozen=True)
class ChunkKV(ScoreEvict):
    window: int = 32
    chunk: int = 10
    reuse: int = 2

    paper: ClassVar[Paper] = Paper(
        "S049",
        "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference",
        "arXiv:2502.00299",
        "up to 10 points better than SnapKV and PyramidKV with a tenth of the cache",
    )
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    question: ClassVar[bool] = True
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "chunkkv(budget=512)",
            "random_evict(budget=512)",
            ("snapkv(budget=512, window=32, kernel=1)",),
            "aware",
            2048,
            claim="Needles of several tokens are found more often than with single tokens kept.",
        ),
        Trial("chunkkv(budget=512)", "random_evict(budget=512)"),
    )

    def needs(self) -> Needs:
        return Needs(recent=self.window, queries=self.window, keys="rotated")

    def check(self, shape: Shape) -> list[str]:
        least = {"window": self.window, "chunk": self.chunk, "reuse": self.reuse}
        return super().check(shape) + [f"{name}={value} must be at least 1." for name, value in least.items() if value < 1]

    def keep(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Kept:
        real, room = pos >= 0, self.room(view)
        if int(real.sum(1).max()) <= room:
            return Kept(tuple(torch.nonzero(row)[:, 0] for row in real))
        note, leader, now = view.note(self), view.layer // self.reuse * self.reuse, int(view.step.pos[-1])
        if view.layer == leader or (note.get("leader"), note.get("at")) != (leader, now):
            note |= {"leader": leader, "at": now, "chunks": self.best(k, v, pos, view, room)}
        chunks = note["chunks"]
        assert isinstance(chunks, Tensor)
        stays = real & torch.isin(pos // self.chunk, chunks)
        return Kept(tuple(torch.nonzero(row)[:, 0] for row in stays))

    def best(self, k: Tensor, v: Tensor, pos: Tensor, view: View, room: int) -> Tensor:
        """The chunks that fit, by their mean score over the tokens that some row holds."""
        mass, real = self.mass(k, pos, view), pos >= 0
        length = int(pos.max()) + 1
        total = mass.new_zeros(length).index_add(0, pos[real], mass[real])
        held = mass.new_zeros(length).index_fill(0, pos[real], 1.0)
        at = torch.arange(length, device=pos.device) // self.chunk
        count = mass.new_zeros(int(at[-1]) + 1).index_add(0, at, held)
        mean = (torch.zeros_like(count).index_add(0, at, total) / count).masked_fill(count == 0, -torch.inf)
        return mean.topk(min(max(room // self.chunk, 1), int((count > 0).sum()))).indices

    def mass(self, k: Tensor, pos: Tensor, view: View) -> Tensor:
        """What the window gives to each candidate of a row, [R, T]."""
        return window_attention(view.queries, k, pos >= 0, view.keys(), view.shape).sum((1, 2))

    def score(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        """For those who share out the budget otherwise: each token by itself."""
        return self.mass(k, pos, view)
