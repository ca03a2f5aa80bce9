"""H2O keeps what has drawn the most attention, of the prompt and of the answer, beside the newest."""

from __future__ import annotations

import pytest
import torch
from evicting import attention, best, check_keeps, recent

from longspool.methods.evict.h2o import H2O
from onelayer import Bench, recipe
from toolbox import Rig, Trace, words

N, BUDGET, WINDOW = 200, 100, 12
OLD = N - recent(N, WINDOW)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_keeps_the_largest_sums(kind: str) -> None:
    rig = Rig(kind)

    def choose(layer: int, prompt: list[Trace]) -> list[list[int]]:
        total = attention(prompt[layer], rig.model.shape, range(N)).sum(1).view(2, 2, N).sum(1)
        return [best(row[:OLD], BUDGET - (N - OLD)) for row in total]

    check_keeps(rig, f"h2o(budget={BUDGET}, window={WINDOW})", words(N + 8, 7), N, OLD, choose)


def test_adds_the_answers_queries() -> None:
    """Over 100 steps, each eviction by sums that an independent count makes; a page of 64 enters now and then."""
    bench = Bench(*recipe("h2o(budget=80, window=10, when=8)"))
    drawn: list[dict[int, float]] = [{}, {}]
    held: list[list[int]] = [[], []]
    start, evictions = 0, 0
    for n in (120, *[1] * 100):
        first, new = bench.seen, list(range(bench.seen, bench.seen + n))
        bench.feed(n, "prefill" if n > 1 else "decode")
        end = first + n
        ready = start + max(end - start - 10, 0) // 64 * 64
        for r in (0, 1):
            at = torch.tensor(held[r] + new)
            for h in range(3 * r, 3 * r + 3):
                logits = bench.logits(bench.q[first:end, h], bench.k[at, r]).masked_fill(at > torch.tensor(new)[:, None], -torch.inf)
                for p, m in zip(at.tolist(), logits.softmax(-1).sum(0).tolist(), strict=True):
                    drawn[r][p] = drawn[r].get(p, 0.0) + m
            held[r] += new
            if n > 1 or (end - 1) % 8 == 0:
                old = [p for p in held[r] if p < ready]
                stay = set(sorted(old, key=lambda p: -drawn[r][p])[: 80 - (end - ready)])
                evictions += len(stay) < len(old)
                held[r] = [p for p in held[r] if p >= ready or p in stay]
        start = ready
        assert [p.tolist() for p in bench.memory.positions()] == held, end
    assert evictions > 10


def test_half_of_the_budget_is_recent() -> None:
    assert H2O(budget=300).needs().recent == 150 and H2O(budget=300, window=20).needs().recent == 20
    rig = Rig()
    assert rig.plan("h2o(budget='30%', window=20)").layers[0].needs.recent == 20
    with pytest.raises(Exception, match="has no half in tokens"):
        rig.plan("h2o(budget='30%')")
