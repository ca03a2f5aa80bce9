"""HeadInfer: the device never holds more than a few KV heads of one layer.

Settled keys and values live on the host; attention loops over groups of `heads` KV heads, each fetched to the device, attended exactly,
and dropped, so the device peak is a fraction 1/(layers * heads) of the cache. The paper overlaps the copies with compute on CUDA
streams; copies here are non-blocking where the device can do that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ...method import LOSSLESS, Cost, Method, Needs, Paper, Trial
from ...roles import Place, View
from ...values import Shape


@dataclass(frozen=True)
class HeadInfer(Method, Place):
    heads: int = 1
    window: int = 64

    paper: ClassVar[Paper] = Paper(
        "S085",
        "HeadInfer: Memory-Efficient LLM Inference by Head-wise Offloading",
        "arXiv:2502.12574",
        "Llama-3-8B at 1M tokens: 128 GB of KV to 1 GB on the GPU",
    )
    identity: ClassVar[str] = LOSSLESS
    trials: ClassVar[tuple[Trial, ...]] = (Trial("headinfer", on="exact", length=2048, claim="Where the memory lies changes no answer."),)
    home: ClassVar[str] = "host"

    def needs(self) -> Needs:
        return Needs(recent=self.window)

    def check(self, shape: Shape) -> list[str]:
        if not 1 <= self.heads <= shape.kv_heads:
            return [f"heads={self.heads} must be between 1 and the model's {shape.kv_heads} KV heads."]
        return [] if self.window >= 0 else [f"window={self.window} must not be negative."]

    def parts(self, heads: int, view: View) -> Iterator[tuple[int, int]]:
        for lo in range(0, heads, self.heads):
            yield lo, min(lo + self.heads, heads)

    def widest(self, heads: int) -> int:
        return self.heads

    def cost(self, shape: Shape) -> Cost:
        return Cost(host=4 * shape.head_dim, moved=4 * shape.head_dim)
