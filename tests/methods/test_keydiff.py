"""KeyDiff's ranking, its strict limit, and its blocks against a plain simulation."""

from __future__ import annotations

import pytest
import torch
from evicting import best, check_keeps, recent
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspool.methods.evict.keydiff import KeyDiff
from toolbox import Job, Rig, Trace, causal, masked_logits, words

N, BUDGET = 200, 100
OLD = N - recent(N, 0)


def pairwise(k: Tensor) -> Tensor:
    """The mean cosine of each key [T, D] to all keys, by all pairs, float64 [T]."""
    unit = k.double() / k.double().norm(dim=-1, keepdim=True)
    return (unit @ unit.T).mean(1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 60))
def test_the_anchor_ranks_as_all_pairs_do(seed: int, count: int) -> None:
    k = torch.randn(3, count, 8, generator=torch.Generator().manual_seed(seed)) + 0.3
    score = KeyDiff().score(k, k, torch.arange(count).expand(3, count), None)  # type: ignore[arg-type]
    for mine, keys in zip(score, k, strict=True):
        exact = -pairwise(keys)
        order = mine.argsort(descending=True)
        assert bool((exact[order].diff() < 1e-6).all())


def test_padding_is_no_key() -> None:
    k = torch.randn(2, 9, 8)
    pos = torch.stack([torch.arange(9), torch.tensor([0, 1, 2, 3, 4, 5, -1, -1, -1])])
    score = KeyDiff().score(k, k, pos, None)  # type: ignore[arg-type]
    alone = KeyDiff().score(k[1:, :6], k[1:, :6], pos[1:, :6], None)  # type: ignore[arg-type]
    torch.testing.assert_close(score[1:, :6], alone)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_keeps_the_most_different_keys_of_a_prompt(kind: str) -> None:
    def choose(layer: int, prompt: list[Trace]) -> list[list[int]]:
        return [best(-pairwise(prompt[layer].k[:OLD, r]), BUDGET - (N - OLD)) for r in (0, 1)]

    check_keeps(Rig(kind), f"keydiff(budget={BUDGET})", words(N + 8, 8), N, OLD, choose)


def test_each_block_is_read_against_what_was_kept() -> None:
    """Blocks of 64 against a cache of 80: all layers' logits equal attention under masks that a simulation makes block by block."""
    rig, total, limit, block = Rig(), 320, 80, 64
    ids = words(total, 4)
    sizes = []

    def seen(layer: int, trace: Trace) -> Tensor:
        mask = torch.zeros(4, total, total, dtype=torch.bool)
        held: list[list[int]] = [[], []]
        for first in range(0, total, block):
            new = list(range(first, first + block))
            for r in (0, 1):
                for h in (2 * r, 2 * r + 1):
                    mask[h, first : first + block, held[r] + new] = True
                now = torch.tensor(held[r] + new)
                sizes.append(len(now))
                held[r] = sorted(now[best(-pairwise(trace.k[now, r]), min(limit, len(now)))].tolist())
        return mask & causal(total)

    expected, _ = masked_logits(rig.model, ids, seen)
    logits, memory = rig.run(Job(rig.plan(f"keydiff(budget={limit}, when='chunk')"), ids, total, block))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert max(sizes) == limit + block and {len(p) for p in memory.positions(2)} == {limit}


def test_a_prompt_of_any_length_fits_the_limit_and_an_answer_does() -> None:
    """Read by the engine, whose own chunks are larger; rows never hold more than the limit, one block, and in an answer one page."""
    rig, limit = Rig(chunk=1024), 128
    plan = rig.plan(f"keydiff(budget={limit}, block=64, when=32)", torch.float16)
    peaks = []
    for length in (600, 2400):
        request = rig.request(plan, words(length), max_tokens=150)
        rig.engine.submit(request)
        rig.pools.ledger.mark()
        longest = 0
        while not request.done:
            rig.engine.step()
            if request.memory.layers[0].pos and not request.done:
                longest = max(longest, *(int(n.max()) for n in request.memory.tokens()))
        assert request.error is None and longest <= limit + 64
        peaks.append(rig.pools.ledger.peak["device"])
    assert peaks[1] <= peaks[0] * 1.05, "memory does not grow with the prompt"
