"""The layers whose tokens lie in the same pages."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Span:
    """The adjacent layers that a codec stores together, in order, and the one of them that is meant: `layers[index]`."""

    layers: tuple[int, ...]
    index: int = 0

    @property
    def layer(self) -> int:
        return self.layers[self.index]

    @property
    def last(self) -> bool:
        """Whether the layer is the last one of its group, after which the group's tokens settle."""
        return self.index == len(self.layers) - 1

    def own(self, x: Tensor, dim: int) -> Tensor:
        """The layer's part of a dimension in which the layers follow one another."""
        width = x.shape[dim] // len(self.layers)
        return x.narrow(dim, self.index * width, width)
