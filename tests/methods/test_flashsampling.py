"""FlashSampling: the best token at temperature 0, the model's distribution above it, and noise that is the request's own."""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import chisquare

from longspool.methods.head.flashsampling import FlashSampling
from longspool.values.packed import Packed
from reference import dense_logits
from toolbox import Rig, tokens, words


def test_is_greedy_at_temperature_zero() -> None:
    rig = Rig()
    ids = words(60)
    request = rig.answer(rig.plan("flashsampling"), ids, max_tokens=15)
    logits = dense_logits(rig.model, torch.tensor(ids + tokens(request)[:-1]))[59:]
    assert tokens(request) == logits.argmax(-1).tolist()
    assert request.actions["flashsampling"] == {"draws": 15}


def test_draws_are_reproducible_and_independent_of_the_batch() -> None:
    def answers(seeds: list[int], together: bool) -> list[list[int]]:
        rig = Rig()
        made = [rig.request(rig.plan("flashsampling"), words(40 + s, s), max_tokens=12, temperature=1.2, seed=s) for s in seeds]
        for group in [made] if together else [[r] for r in made]:
            rig.engine.run(group)
        return [tokens(r) for r in made]

    assert answers([1, 2, 3], True) == answers([1, 2, 3], False)
    assert answers([1], False) != [answers([1, 2], False)[1]]
    rig = Rig()
    different = {tuple(tokens(rig.answer(rig.plan("flashsampling"), words(40), max_tokens=6, temperature=1.5, seed=s))) for s in range(6)}
    assert len(different) == 6


def test_draws_follow_the_softmax() -> None:
    """4,000 draws over 12 tokens at two temperatures, with a soft-cap: chi-squared at one in a thousand, by a fixed seed."""
    rng = torch.Generator().manual_seed(0)
    w, h = torch.randn(12, 32, generator=rng) * 0.4, torch.randn(1, 32, generator=rng)
    head = Packed.from_float(w, "f32")
    for temperature, cap in ((1.0, 0.0), (0.6, 2.0)):
        logits = (h @ w.T)[0].double()
        logits = cap * torch.tanh(logits / cap) if cap else logits
        count = 4000
        token, logprob = FlashSampling().sample(
            h.expand(count, -1).contiguous(), head, torch.full((count,), temperature), torch.full((count,), 5), torch.arange(count), cap
        )
        share = (logits / temperature).softmax(-1)
        seen = np.bincount(token.numpy(), minlength=12)
        assert chisquare(seen, share.numpy() * count).pvalue > 1e-3
        torch.testing.assert_close(logprob.double(), share.log()[token], atol=1e-4, rtol=0)


def test_filters_and_penalties_take_the_ordinary_sampler() -> None:
    rig = Rig()
    ids = words(50)
    for wishes in ({"top_k": 3}, {"repetition_penalty": 1.5}, {"logprobs": 2}, {"logit_bias": ((5, 2.0),)}):
        wish: dict[str, object] = {"max_tokens": 8, "temperature": 1.0, "seed": 4, **wishes}
        flash, plain = (rig.answer(rig.plan(recipe), ids, **wish) for recipe in ("flashsampling", ""))
        assert tokens(flash) == tokens(plain) and "flashsampling" not in flash.actions
