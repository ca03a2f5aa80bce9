"""What a decoder computes between two attentions, as data: a straight line of moves over the registers of each token.

A kernel can then run it in one call, where one call per move would cost more than the arithmetic of a single token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from .packed import Packed


@dataclass(frozen=True, eq=False)
class Product:
    """to[first : first + M] = source W^T + bias, for W [M, K]."""

    source: int
    to: int
    weight: Tensor | Packed
    bias: Tensor | None = None
    first: int = 0


@dataclass(frozen=True, eq=False)
class Norm:
    """RMS norm of the first P segments of S numbers each, with gain [P, S] and floor as the op rms_norm takes them."""

    source: int
    to: int
    gain: Tensor
    floor: float


@dataclass(frozen=True)
class Add:
    """to += source."""

    source: int
    to: int


@dataclass(frozen=True)
class Gate:
    """to = act(first half of source) * second half."""

    source: int
    to: int
    act: str


@dataclass(frozen=True)
class Turn:
    """Rotates the first `heads` heads of `dim` numbers, as the op rope does; left out where no angles are given."""

    to: int
    heads: int
    dim: int


Move = Product | Norm | Add | Gate | Turn


@dataclass(frozen=True, eq=False)
class Chain:
    """`moves` over registers of `widths` numbers a token; the caller gives the registers `given` and gets those `wanted`.

    `compiled` is for the implementations to keep what they made of it.
    """

    widths: tuple[int, ...]
    given: tuple[int, ...]
    wanted: tuple[int, ...]
    moves: tuple[Move, ...]
    compiled: dict[str, object] = field(default_factory=dict, init=False, repr=False)

    def then(self, other: Chain) -> Chain:
        """This chain and then another over the same registers, as one; it gives what the other one does."""
        assert self.widths == other.widths, f"registers of {self.widths} and {other.widths} don't fit together"
        return Chain(self.widths, self.given, other.wanted, self.moves + other.moves)

    def dying(self) -> Iterator[tuple[int, ...]]:
        """After each move, the registers that nothing needs any more."""
        needed = set(self.wanted)
        after: list[tuple[int, ...]] = []
        for move in reversed(self.moves):
            touched = {move.to} if isinstance(move, Turn) else {move.source, move.to}
            after.append(tuple(touched - needed))
            needed |= touched
        yield from reversed(after)
