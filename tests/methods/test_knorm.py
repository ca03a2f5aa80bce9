"""Knorm keeps the shortest keys."""

from __future__ import annotations

import pytest
from evicting import best, check_keeps, recent

from toolbox import Rig, Trace, words

N, BUDGET = 200, 100
OLD = N - recent(N, 0)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_keeps_the_shortest_keys(kind: str) -> None:
    def choose(layer: int, prompt: list[Trace]) -> list[list[int]]:
        return [best(-prompt[layer].k[:OLD, r].norm(dim=-1), BUDGET - (N - OLD)) for r in (0, 1)]

    check_keeps(Rig(kind), f"knorm(budget={BUDGET})", words(N + 8, 5), N, OLD, choose)
