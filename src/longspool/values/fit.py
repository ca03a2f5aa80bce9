"""What a method was fitted to a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Fit:
    """Tensors by name; those of one layer are called "layer.name". The `digest` tells one fit from another."""

    tensors: Mapping[str, Tensor]
    digest: str = ""

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def of(self, layer: int, name: str) -> Tensor:
        """A layer's own tensor."""
        return self.tensors[f"{layer}.{name}"]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())
