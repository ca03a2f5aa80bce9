"""LongFlow's two scores against their formulas, and memory that stays flat over a long answer."""

from __future__ import annotations

import pytest
import torch
from evicting import attention, best, check_keeps, recent
from torch import Tensor

from onelayer import Bench, recipe
from toolbox import Rig, Trace, words

N, BUDGET, WINDOW = 200, 100, 12
OLD = N - recent(N, WINDOW)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_a_prompt_is_cut_once_for_all_heads(kind: str) -> None:
    rig = Rig(kind)

    def choose(layer: int, prompt: list[Trace]) -> list[list[int]]:
        total = attention(prompt[layer], rig.model.shape, range(N - WINDOW, N)).sum((0, 1))[:OLD]
        return [best(torch.stack([total[max(j - 2, 0) : j + 3].mean() for j in range(OLD)]), BUDGET - (N - OLD))] * 2

    check_keeps(rig, f"longflow(budget={BUDGET}, window={WINDOW}, when=256)", words(N + 8, 14), N, OLD, choose)


def contribution(bench: Bench, at: Tensor) -> Tensor:
    """The size of what each held token adds to the newest query's output, over all heads: the direct formula, with the vectors."""
    total = torch.zeros(len(at), dtype=torch.float64)
    for h in range(6):
        p = bench.logits(bench.q[-1:, h], bench.k[at, h // 3]).softmax(-1)[0]
        total += (p[:, None] * bench.v[at, h // 3].double()).abs().sum(-1)
    return total


@pytest.mark.parametrize("codec", ["", " + headinfer(window=8)"])
def test_the_least_contributions_go(codec: str) -> None:
    bench = Bench(*recipe(f"longflow(budget=80, window=10, when=16){codec}"))
    bench.feed(60)
    held, start, evictions = list(range(60)), 0, 0
    for _ in range(200):
        bench.feed(1, "decode")
        end = bench.seen
        held.append(end - 1)
        start += max(end - start - 10, 0) // 64 * 64
        if (end - 1) % 16 == 0:
            at = torch.tensor(held)
            score = dict(zip(held, contribution(bench, at).tolist(), strict=True))
            old = [p for p in held if p < start]
            stay = set(sorted(old, key=lambda p: -score[p])[: max(80 - (end - start), 1)])
            evictions += len(old) - len(stay)
            held = [p for p in held if p >= start or p in stay]
            assert len(held) <= 80
        assert [p.tolist() for p in bench.memory.positions()] == [held] * 2, end
        assert len(held) < 80 + 16
    assert evictions > 100


def test_memory_and_work_stay_flat_over_4096_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a long answer's second half are those of its first; attention is observed once every 16 steps."""
    from longspool.memory import mass

    observed: list[int] = []
    real = mass._mass
    monkeypatch.setattr(mass, "_mass", lambda memory, q, lse, step: observed.append(int(step.pos[-1])) or real(memory, q, lse, step))
    bench = Bench(*recipe("longflow(budget=96, window=16)"))
    monkeypatch.setattr(bench, "dense", lambda *args: torch.zeros(1))
    monkeypatch.setattr(bench.memory, "check", lambda: None)
    bench.feed(64)
    sizes, longest = [], 0
    for _ in range(4032):
        bench.feed(1, "decode")
        sizes.append(bench.memory.bytes)
        longest = max(longest, int(bench.memory.rows().length.max()) + len(bench.memory.pos))
    assert bench.seen == 4096 and longest <= 96 + 16
    assert max(sizes[2000:]) <= max(sizes[200:2000])
    assert observed == list(range(64, 4096, 16))


def test_an_answer_of_any_length_is_admitted_by_what_it_will_hold() -> None:
    from longspool.engine.estimate import need

    plan = Rig().plan("longflow(budget=128, window=16)", torch.float16)
    assert need(plan, 100, 128, 3500) <= 1.1 * need(plan, 100, 128, 500)
    grows = Rig().plan("snapkv(budget=128, window=16)", torch.float16)
    assert need(grows, 100, 128, 3500) > 2 * need(grows, 100, 128, 500)
