"""Cosines and sines of a pass."""

from __future__ import annotations

import torch
from torch import Tensor

from ..model.rope import Rope


class Angles:
    """(cos, sin) [N, r] at the positions pos [N] of a pass, once for all layers with the same embedding; `total` is as in Rope.angles."""

    def __init__(self, pos: Tensor, total: Tensor | int, device: torch.device) -> None:
        self.pos, self.total, self.device = pos, total, device
        self._of: dict[int, tuple[Rope, Tensor, Tensor]] = {}

    def of(self, rope: Rope) -> tuple[Tensor, Tensor]:
        if id(rope) not in self._of:
            cos, sin = rope.angles(self.pos, self.total)
            self._of[id(rope)] = rope, cos.to(self.device), sin.to(self.device)
        return self._of[id(rope)][1:]

    def renew(self, pos: Tensor, total: Tensor | int) -> None:
        """The same tensors for other positions, as many as before."""
        for rope, cos, sin in self._of.values():
            for old, new in zip((cos, sin), rope.angles(pos, total), strict=True):
                old.copy_(new)
