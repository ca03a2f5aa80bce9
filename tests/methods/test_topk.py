"""Top-k decoding against a float64 search over all keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from toolbox import Job, Rig, Trace, causal, masked_logits, words

N, MORE, WINDOW = 200, 10, 16
OLD = (N - WINDOW) // 16 * 16
IDS = words(N + MORE, 31)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("budget", [1, 40])
def test_every_query_head_reads_its_largest_inner_products(kind: str, budget: int) -> None:
    """A soft-cap bends logits and leaves their order."""
    rig = Rig(kind)
    full = [i for i, w in enumerate(rig.model.shape.windows) if w is None]

    def seen(layer: int, trace: Trace) -> Tensor:
        if rig.model.shape.windows[layer] is not None:
            return causal(N + MORE, rig.model.shape.windows[layer])
        mask = causal(N + MORE).repeat(4, 1, 1)
        for h in range(4):
            best = (trace.q[N:, h] @ trace.k[:OLD, h // 2].T).argsort(1, descending=True)[:, budget:]
            mask[h, N:, :OLD] = torch.ones(MORE, OLD, dtype=torch.bool).scatter(1, best, False)
        return mask

    expected, _ = masked_logits(rig.model, IDS, seen)
    logits, memory = rig.run(Job(rig.plan(f"topk(budget={budget}, window={WINDOW})"), IDS, N))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert memory.actions["topk"] == {"tokens_read": len(full) * MORE * 4 * budget, "tokens_stored": len(full) * MORE * 4 * OLD}


def test_all_tokens_are_dense_attention() -> None:
    rig = Rig()
    expected, _ = masked_logits(rig.model, IDS, lambda layer, trace: causal(N + MORE))
    for budget in (OLD - 1, OLD, OLD + 1):
        logits, _ = rig.run(Job(rig.plan(f"topk(budget={budget}, window={WINDOW})"), IDS, N))
        error = float((logits - expected)[N:].abs().max())
        assert (error > 1e-4) == (budget < OLD), f"budget {budget}: {error}"


def test_several_tokens_of_a_step_share_what_any_of_them_scores_highest() -> None:
    rig, budget = Rig(), 40

    def seen(layer: int, trace: Trace) -> Tensor:
        mask = causal(N + 4).repeat(4, 1, 1)
        for h in range(4):
            score = (trace.q[N : N + 4, h] @ trace.k[:OLD, h // 2].T).amax(0)
            mask[h, N : N + 4, score.argsort(descending=True)[budget:]] = False
        return mask

    expected, _ = masked_logits(rig.model, IDS[: N + 4], seen)
    memory = rig.read(rig.plan(f"topk(budget={budget}, window={WINDOW})"), IDS[:N])
    torch.testing.assert_close(rig.feed(memory, IDS[N : N + 4], "verify"), expected[N:], atol=1e-4, rtol=0)
