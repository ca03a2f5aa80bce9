"""How far a run is from the dense one, and whether one recipe is really better than another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor

from .reading import Run
from .texts import Text


@dataclass(frozen=True)
class Quality:
    """Of one text: the mean Kullback-Leibler divergence from dense in nats, the share of places with dense's most likely token, the mean
    negative log-likelihood of the text in nats, and whether all of the answer's tokens were the most likely ones."""

    kl: float
    top1: float
    nll: float
    found: bool


def quality(text: Text, run: Run, dense: Run) -> Quality:
    """Compare a run with the dense one of the same text."""
    given = torch.tensor(text.ids[text.scored :])
    mine, theirs = run.logits.double().log_softmax(-1), dense.logits.double().log_softmax(-1)
    kl = (theirs.exp() * (theirs - mine)).sum(-1).mean()
    best = mine.argmax(-1)
    return Quality(float(kl), _share(best == theirs.argmax(-1)), float(-mine.gather(1, given[:, None]).mean()), bool((best == given).all()))


def _share(same: Tensor) -> float:
    return float(same.double().mean())


@dataclass(frozen=True)
class Mean:
    """A mean and its standard error over n texts."""

    mean: float
    error: float
    n: int

    @staticmethod
    def of(values: Sequence[float]) -> Mean:
        n = len(values)
        return Mean(fmean(values), stdev(values) / math.sqrt(n) if n > 1 else math.inf, n)

    @property
    def clear(self) -> bool:
        """Whether it is above zero by more than two standard errors."""
        return self.mean > 2 * self.error

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.error:.2g}"


def gain(control: Sequence[float], method: Sequence[float]) -> Mean:
    """By how much the method is lower, text by text."""
    return Mean.of([c - m for c, m in zip(control, method, strict=True)])
