"""TriangleMix's blocks against the paper's token pattern, and the logits under them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from toolbox import Job, Rig, Trace, causal, masked_logits, words

SINKS, WINDOW, LAST, BLOCK, N = 5, 37, 20, 16, 230
IDS = words(N + 5, 2)


def pattern(n: int, total: int) -> Tensor:
    """The paper's: sinks, a window, and everything for the prompt's last queries; bool [n, n]."""
    i, j = torch.arange(n)[:, None], torch.arange(n)
    return causal(n) & ((j < SINKS) | (i - j < WINDOW) | (i >= total - LAST))


def spread(mask: Tensor, starts: list[int]) -> Tensor:
    """Whole blocks are read: every causal pair whose query block (counted from its chunk) and key block hold a pair of the pattern."""
    out = torch.zeros_like(mask)
    for first, end in zip(starts, [*starts[1:], len(mask)], strict=True):
        for a in range(first, end, BLOCK):
            rows = slice(a, min(a + BLOCK, end))
            for b in range(0, len(mask), BLOCK):
                out[rows, b : b + BLOCK] = bool(mask[rows, b : b + BLOCK].any())
    return out & causal(len(mask))


@pytest.mark.parametrize("starts", [[0], [0, 100, 200], [0, 64, 128, 192]])
@pytest.mark.parametrize("more", ["", " + int8(window=1000000)", " + streaming(sinks=1000000, window=30)"])
def test_reads_the_papers_pattern_in_whole_blocks(starts: list[int], more: str) -> None:
    rig = Rig()
    visited = 0

    def seen(layer: int, trace: Trace) -> Tensor:
        nonlocal visited
        mask = causal(N + 5)
        if layer >= 1:
            mask[:N, :N] = spread(pattern(N, N), starts)
            for first, end in zip(starts, [*starts[1:], N], strict=True):
                if end > WINDOW:
                    for a in range(first, end, BLOCK):
                        rows = mask[a : min(a + BLOCK, end), :N]
                        visited += 4 * sum(bool(rows[:, b : b + BLOCK].any()) for b in range(0, N, BLOCK))
        return mask

    expected, _ = masked_logits(rig.model, IDS, seen)
    plan = rig.plan(f"trianglemix(dense=1, sinks={SINKS}, window={WINDOW}, last={LAST}, block={BLOCK}){more}")
    memory = rig.engine.empty(plan)
    out = [rig.feed(memory, IDS[a:b], "prefill", N) for a, b in zip(starts, [*starts[1:], N], strict=True)]
    torch.testing.assert_close(torch.cat([*out, rig.drip(memory, IDS[N:])]), expected, atol=1e-4, rtol=0)
    counted = memory.actions["trianglemix"]
    assert counted["blocks_visited"] == visited < 0.75 * counted["blocks_causal"]


def test_the_shallow_half_is_dense() -> None:
    rig = Rig()
    memory = rig.read(rig.plan(f"trianglemix(sinks={SINKS}, window={WINDOW}, last={LAST}, block={BLOCK})"), IDS[:N])
    n = -(-N // BLOCK)
    assert memory.actions["trianglemix"]["blocks_causal"] == 2 * 4 * n * (n + 1) / 2, "two of three layers"


def test_decoding_is_dense() -> None:
    rig = Rig()
    plan = rig.plan(f"trianglemix(dense=0, sinks={SINKS}, window={WINDOW}, last={LAST}, block={BLOCK})")
    expected, _ = masked_logits(rig.model, IDS, lambda layer, trace: causal(N + 5))
    logits, _ = rig.run(Job(plan, IDS, 1))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
