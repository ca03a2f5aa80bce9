"""What a method may know of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The dimensions of a decoder.

    `windows[layer]` is the sliding window of that layer in tokens, or None where it sees everything. `scale` multiplies
    the logits before `softcap` (0 means none) bends them.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocab: int
    context: int
    scale: float
    windows: tuple[int | None, ...]
    softcap: float = 0.0

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads
