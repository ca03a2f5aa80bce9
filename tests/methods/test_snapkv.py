"""SnapKV's scores and choices against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspool.values import Shape
from toolbox import Job, Rig, Trace, causal, masked_logits, words

N, WINDOW, KERNEL, BUDGET = 200, 12, 5, 100
HELD = N - (N - WINDOW) // 64 * 64  # tokens that stay recent after the prompt: 72
OLD = N - HELD
RECIPE = f"snapkv(budget={BUDGET}, window={WINDOW}, kernel={KERNEL})"
IDS = words(N + 12, 8)


def scores(trace: Trace, shape: Shape, kernel: int = KERNEL) -> Tensor:
    """Per KV head [R, OLD]: the window's mean attention, over queries and the group's heads, smoothed along the tokens."""
    window = slice(N - WINDOW, N)
    rows = []
    for r in range(shape.kv_heads):
        heads = range(r * shape.group, (r + 1) * shape.group)
        attention = [trace.logits(shape, window, h)[:, :N].masked_fill(~causal(N)[window], -torch.inf).softmax(-1) for h in heads]
        mean = torch.stack(attention).mean((0, 1))[:OLD]
        rows.append(torch.stack([mean[max(j - kernel // 2, 0) : j + kernel // 2 + 1].mean() for j in range(OLD)]))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_keeps_the_best_by_the_formula_and_sees_them(kind: str) -> None:
    """QK-norm and the soft-cap are part of the attention that is observed."""
    rig = Rig(kind)
    kept: dict[int, list[list[int]]] = {}

    def seen(layer: int, trace: Trace) -> Tensor:
        window = rig.model.shape.windows[layer]
        if window is not None:
            return causal(len(IDS), window)
        best = scores(trace, rig.model.shape).topk(BUDGET - HELD, dim=1).indices
        kept[layer] = [sorted(row.tolist()) for row in best]
        mask = causal(len(IDS)).repeat(rig.model.shape.heads, 1, 1)
        for h in range(rig.model.shape.heads):
            gone = [p for p in range(OLD) if p not in kept[layer][h // rig.model.shape.group]]
            mask[h, N:, gone] = False
        return mask

    expected, _ = masked_logits(rig.model, IDS, seen)
    for chunk in (N, 64):
        logits, memory = rig.run(Job(rig.plan(RECIPE), IDS, N, chunk))
        assert kept and all(
            memory.positions(i)[r].tolist() == [*rows[r], *range(OLD, len(IDS))] for i, rows in kept.items() for r in (0, 1)
        )
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_the_kernel_matters() -> None:
    rig = Rig()
    _, (trace, *_) = masked_logits(rig.model, IDS[:N], lambda layer, trace: causal(N))
    for kernel in (1, 5, 11):
        memory = rig.read(rig.plan(f"snapkv(budget={BUDGET}, window={WINDOW}, kernel={kernel})"), IDS[:N])
        best = scores(trace, rig.model.shape, kernel).topk(BUDGET - HELD, dim=1).indices
        assert [p[:-HELD].tolist() for p in memory.positions(0)] == [sorted(row.tolist()) for row in best]


@pytest.mark.parametrize(
    ("budget", "tokens"), [("'45%'", 90), ("'100%'", N), (f"'{3 * 2 * 80 * 16 * 2 * 4}B'", 80), ("'60kB'", 78), (300, N)]
)
def test_budgets_are_tokens_ratios_or_bytes(budget: str, tokens: int) -> None:
    rig = Rig()
    memory = rig.read(rig.plan(f"snapkv(budget={budget}, window={WINDOW})"), IDS[:N])
    assert {len(p) for layer in range(3) for p in memory.positions(layer)} == {tokens}


def test_evicting_after_every_chunk_bounds_the_peak() -> None:
    rig, longest = Rig(), 0
    memory = rig.engine.empty(rig.plan(f"snapkv(budget=80, window={WINDOW}, when='chunk')"))
    for first in range(0, 960, 32):
        rig.feed(memory, words(32, first), "prefill", 960)
        longest = max(longest, *(len(p) for p in memory.positions(1)))
    assert longest <= 80 + 64, "the budget, and less than a page that waits to settle"
    assert memory.actions["snapkv"]["evicted"] == sum(960 - len(p) for layer in range(3) for p in memory.positions(layer))
