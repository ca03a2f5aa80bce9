"""Small methods that show what a seat is given and does; none of them is shipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from longspool.method import Method, Needs, Paper
from longspool.roles import Admit, Evict, Kept, Prune, View
from longspool.values import Step

PAPER = Paper("", "A toy", "none")


@dataclass(frozen=True)
class Every(Method, Evict):
    """Keeps every `stride`-th candidate of row r, counted from r: rows differ in length."""

    stride: int = 3
    recent: int = 8
    when: str = "prompt"
    slug: ClassVar[str] = "every"
    paper: ClassVar[Paper] = PAPER
    identity: ClassVar[dict[str, object]] = {"stride": 1}

    def needs(self) -> Needs:
        return Needs(recent=self.recent, ragged=True)

    def due(self, step: Step) -> bool:
        return step.phase == "prefill" and (step.final[0] or self.when == "chunk")

    def keep(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Kept:
        return Kept(tuple(torch.nonzero(row >= 0)[r :: self.stride, 0] for r, row in enumerate(pos)))


@dataclass(frozen=True)
class Pairs(Method, Evict):
    """Merges neighbours into their mean, which counts twice."""

    slug: ClassVar[str] = "pairs"
    merges: ClassVar[bool] = True
    paper: ClassVar[Paper] = PAPER
    identity: ClassVar[float] = 1.0

    def needs(self) -> Needs:
        return Needs(recent=8)

    def keep(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Kept:
        index = tuple(torch.arange(0, len(row) - 1, 2) for row in pos)
        k, v = ([(x[r, i] + x[r, i + 1]) / 2 for r, i in enumerate(index)] for x in (k, v))
        return Kept(index, tuple(k), tuple(v), tuple(torch.full((len(i),), 2.0).log() for i in index))


@dataclass(frozen=True)
class Odd(Method, Admit):
    """Head r admits positions that leave the rest r % 2."""

    slug: ClassVar[str] = "odd"
    paper: ClassVar[Paper] = PAPER
    identity: ClassVar[float] = 1.0

    def needs(self) -> Needs:
        return Needs(recent=8, ragged=True)

    def admit(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        return pos % 2 == torch.arange(len(pos))[:, None] % 2


@dataclass(frozen=True)
class Heavy(Method, Evict):
    """Keeps what drew the most attention mass in this step."""

    budget: int = 20
    slug: ClassVar[str] = "heavy"
    paper: ClassVar[Paper] = PAPER
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}

    def needs(self) -> Needs:
        return Needs(recent=8, mass=True)

    def keep(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Kept:
        mass = view.mass[:, : pos.shape[1]].masked_fill(pos < 0, -1)
        count = min(self.budget, pos.shape[1])
        return Kept(tuple(row.topk(count).indices.sort().values for row in mass))


@dataclass(frozen=True)
class Halve(Method, Prune):
    """Every second token of a chunk goes on; the engine adds the chunk's last one."""

    slug: ClassVar[str] = "halve"
    paper: ClassVar[Paper] = PAPER
    identity: ClassVar[float] = 1.0

    def survivors(self, x: Tensor, view: View) -> Tensor:
        return torch.arange(0, len(x), 2)
