"""Selections of settled pages that live elsewhere: what is read does not depend on where it lies, nor on which copies are near."""

from __future__ import annotations

import pytest
import torch

from longspool.recipe import parse
from toolbox import Job, Rig, words
from toys import Ram, Tiers

IDS = words(300, seed=1)
RECIPES = [
    "topk(budget=24)",
    "topk(budget=24) + int8",
    "sparq(budget=24, window=64)",
    "clusterkv(budget=24)",
    "retroinfer(segment=64, block=32, cluster=8, retrieve=0.1)",
    "self_index_kv(budget=24)",
    "quest(dense=0, budget=96) + int4",
]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("place", [Ram(window=64), Tiers(window=64), Tiers(0, 192, 64), Tiers(128, 192, 64)], ids=str)
def test_a_place_changes_no_selection(recipe: str, place: Ram | Tiers) -> None:
    rig = Rig()
    methods = [item.method for item in parse(recipe)]
    near, _ = rig.run(Job(rig.plan(methods), IDS, 240, 100))
    away, memory = Rig().run(Job(rig.plan([*methods, place]), IDS, 240, 100))
    assert memory.tiers()[place.home] > 0 and memory.actions[place.slug]["bytes_fetched"] > 0
    torch.testing.assert_close(away, near, atol=1e-5, rtol=0)
