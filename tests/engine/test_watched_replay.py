"""Steps whose attention somebody wants to see are run, not played; those of merged entries are played like any other."""

from __future__ import annotations

import pytest
import torch
from test_replay import PROMPT, TOKENS, PackedNoise, told

from longspool.model.build import Model, assemble
from longspool.model.tiny import tiny


@pytest.fixture(scope="module")
def model() -> Model:
    config = tiny("llama").config
    return assemble(config, PackedNoise(3, 1.0 - config.norm_shift))


@pytest.mark.parametrize(
    ("recipe", "least"),
    [
        ("longflow(budget=128, window=16)", TOKENS * 2 // 3),
        ("h2o(budget=128, window=16)", TOKENS * 2 // 3),
        ("h2o(budget=128, window=16, when=1)", 0),
        ("laprox(budget=128, window=16)", TOKENS * 2 // 3),
        ("chelsea(chunk=32, window=16)", TOKENS * 2 // 3),
        ("keydiff(budget=128, when=16)", TOKENS * 2 // 3),
    ],
)
def test_played_steps_equal_run_ones(model: Model, recipe: str, least: int) -> None:
    want, counted, none = told(model, recipe, replays=False)
    got, counts, played = told(model, recipe, replays=True)
    assert none == 0 and (played >= least if least else played == 0), played
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert counts == counted and max(counted.values(), key=len)["evicted"] > 0
    assert PROMPT > 128
