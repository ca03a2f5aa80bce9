"""TOVA keeps what the newest query looks at, the same for all heads."""

from __future__ import annotations

import pytest
import torch
from evicting import attention, best, check_keeps, recent

from longspool.kernels.window import over_rows
from onelayer import Bench, recipe
from toolbox import Rig, Trace, words

N, BUDGET = 200, 100
OLD = N - recent(N, 0)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_keeps_what_the_last_query_sees(kind: str) -> None:
    rig = Rig(kind)

    def choose(layer: int, prompt: list[Trace]) -> list[list[int]]:
        mean = attention(prompt[layer], rig.model.shape, range(N - 1, N)).mean((0, 1))
        return [best(mean[:OLD], BUDGET - (N - OLD))] * 2

    check_keeps(rig, f"tova(budget={BUDGET})", words(N + 8, 6), N, OLD, choose)


def test_sums_by_position_where_rows_hold_different_tokens() -> None:
    pos = torch.tensor([[0, 2, 3, -1], [0, 1, 2, 3]])
    score = torch.tensor([[1.0, 2.0, 4.0, 0.0], [8.0, 16.0, 32.0, 64.0]])
    assert over_rows(score, pos).tolist() == [[9.0, 34.0, 68.0, 0.0], [9.0, 16.0, 34.0, 68.0]]
    assert over_rows(score, pos[:1].expand(2, 4)).tolist() == [[9.0, 18.0, 36.0, 64.0]] * 2


def test_evicts_at_every_step() -> None:
    """`when=1` is the paper's: what is left is what each newest query in turn looked at."""
    bench = Bench(*recipe("tova(budget=90, when=1)"))
    bench.feed(64)
    held = set(range(64))
    for at in range(64, 150):
        bench.feed(1, "decode")
        old = sorted(held)
        held |= {at}
        ready = at + 1 - (at + 1) % 64  # whole pages may go
        there = torch.tensor(sorted(held))
        mean = torch.stack([bench.logits(bench.q[-1:, h], bench.k[there, h // 3]).softmax(-1)[0] for h in range(6)]).mean(0)
        candidates = [(float(m), p) for m, p in zip(mean, there.tolist(), strict=True) if p < ready]
        room = max(90 - (at + 1 - ready), 1)
        gone = {p for _, p in sorted(candidates)[: max(len(candidates) - room, 0)]}
        held -= gone
        assert [p.tolist() for p in bench.memory.positions()] == [sorted(held)] * 2, (at, old)
    assert len(held) == 90
