"""A chain on a GPU: move by move, each with its own Triton kernel."""

from __future__ import annotations

from torch import Tensor

from ...values.chain import Chain
from .walk import Angles, walk


def can(x: Tensor, chain: Chain, rest: list[Tensor], angles: Angles) -> str | None:
    return None


def run(x: Tensor, chain: Chain, rest: list[Tensor], angles: Angles) -> list[Tensor]:
    return walk(x, chain, rest, angles)
