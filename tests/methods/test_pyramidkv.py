"""PyramidKV's budgets against the paper's arithmetic, and what its layers hold."""

from __future__ import annotations

import itertools

import pytest
from evicting import best, check_keeps
from hypothesis import given
from hypothesis import strategies as st
from test_snapkv import BUDGET, HELD, IDS, KERNEL, OLD, WINDOW, N, scores

from longspool.methods.evict.pyramidkv import PyramidKV
from longspool.methods.evict.snapkv import SnapKV
from toolbox import Rig, Trace


@given(st.integers(2, 60), st.integers(20, 5000), st.integers(20, 50000), st.floats(1, 50))
def test_budgets_fall_evenly_and_average_to_the_given_one(layers: int, average: int, there: int, beta: float) -> None:
    average = min(average, there)
    rooms = [PyramidKV(SnapKV(), beta).room(average, there, layer, layers) for layer in range(layers)]
    assert rooms == sorted(rooms, reverse=True) and max(rooms) <= there
    assert abs(sum(rooms) - average * layers) <= layers
    steps = [a - b for a, b in itertools.pairwise(rooms)]
    assert max(steps) - min(steps) <= 1 or min(rooms) == 1


def test_the_papers_numbers() -> None:
    """beta 20 and 120 candidates on average over 32 layers: 234 in the first, 6 in the last; where only 200 are there, 200 and 40."""
    pyramid = PyramidKV(SnapKV())
    assert (pyramid.room(120, 1000, 0, 32), pyramid.room(120, 1000, 31, 32)) == (234, 6)
    assert (pyramid.room(120, 200, 0, 32), pyramid.room(120, 200, 31, 32)) == (200, 40)
    assert [pyramid.room(50, 50, layer, 4) for layer in range(4)] == [50] * 4


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_keeps_snapkvs_best_in_numbers_that_fall(kind: str) -> None:
    rig = Rig(kind)
    average = BUDGET - HELD
    most = 2 * average - average / 20
    rooms = [int(most), average, int(2 * average - most)]

    def choose(layer: int, prompt: list[Trace]) -> list[list[int]]:
        return [best(row, rooms[layer]) for row in scores(prompt[layer], rig.model.shape)]

    assert rooms[0] > rooms[1] > rooms[2] > 0
    check_keeps(rig, f"pyramidkv(snapkv(budget={BUDGET}, window={WINDOW}, kernel={KERNEL}))", IDS, N, OLD, choose)
