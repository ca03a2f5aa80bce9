"""The attention that each held token has drawn in all steps so far, beside the tokens of one layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .pool import Ledger


class Drawn:
    """Mass [R, T]: for each row its settled tokens, up to the longest row's, then the recent ones. Tensors are replaced, never written to,
    so forks share them."""

    def __init__(self, rows: int, ledger: Ledger, device: torch.device) -> None:
        self._mass, self._ledger = torch.zeros(rows, 0, device=device), ledger

    @property
    def nbytes(self) -> int:
        return self._mass.nbytes

    def whole(self, tokens: int) -> Tensor:
        """The mass of so many tokens a row; what came since the last observed step has drawn none."""
        return pad(self._mass, (0, tokens - self._mass.shape[1]))

    def add(self, mass: Tensor) -> None:
        """What one more step has shown, [R, T]."""
        self.put(self.whole(mass.shape[1]) + mass)

    def put(self, mass: Tensor) -> None:
        self._ledger.add("device", mass.nbytes - self._mass.nbytes)
        self._mass = mass.to(self._mass.device).contiguous()
