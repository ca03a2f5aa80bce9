"""SparQ against the paper's five steps in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspool.engine.forward import forward
from longspool.values import Shape
from toolbox import Job, Rig, Trace, attended_logits, causal, masked_logits, words

N, MORE, WINDOW = 200, 10, 16
OLD = (N - WINDOW) // 16 * 16
IDS = words(N + MORE, 33)


def bend(x: Tensor, shape: Shape) -> Tensor:
    return torch.tanh(x / shape.softcap) * shape.softcap if shape.softcap else x


def sparq(q: Tensor, k: Tensor, v: Tensor, shape: Shape, components: int, budget: int, mean: bool) -> Tensor:
    """One token's queries q [G, D] of a group over the keys and values [S, D] that it sees, of which the first OLD have settled; [G, D]."""
    dims = q.abs().sum(0).argsort(descending=True)[:components]
    cover = q[:, dims].abs().sum(1) / q.abs().sum(1)
    near = bend(q[:, dims] @ k[:, dims].T * shape.scale / cover.sqrt()[:, None], shape).softmax(1)
    best = near.sum(0)[:OLD].argsort(descending=True)[:budget]
    read = torch.cat([best, torch.arange(OLD, len(k))])
    out = bend(q @ k[read].T * shape.scale, shape).softmax(1) @ v[read]
    share = near[:, read].sum(1, keepdim=True)
    return share * out + (1 - share) * v[:OLD].mean(0) if mean else out


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize(("components", "budget", "mean"), [(6, 40, True), (6, 40, False), (1, 5, True), (16, 40, True)])
def test_reads_and_fills_up_as_the_paper_does(kind: str, components: int, budget: int, mean: bool) -> None:
    rig = Rig(kind)
    shape = rig.model.shape

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = bend(torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(2, 1)) * shape.scale, shape)
        mask = causal(len(q), shape.windows[layer])
        out = torch.einsum("hnm,mhd->nhd", logits.masked_fill(~mask, -torch.inf).softmax(-1), v.repeat_interleave(2, 1))
        if shape.windows[layer] is None:
            for i in range(N, N + MORE):
                for r in (0, 1):
                    heads = slice(2 * r, 2 * r + 2)
                    out[i, heads] = sparq(q[i, heads], k[: i + 1, r], v[: i + 1, r], shape, components, budget, mean)
        return out

    expected = attended_logits(rig.model, IDS, attention)
    recipe = f"sparq(budget={budget}, window={WINDOW}, components={components}, mean={mean})"
    logits, memory = rig.run(Job(rig.plan(recipe), IDS, N))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    layers = sum(w is None for w in shape.windows)
    assert memory.actions["sparq"] == {"tokens_read": layers * MORE * 2 * budget, "tokens_stored": layers * MORE * 2 * OLD}


def test_all_components_and_no_mean_are_top_k_by_the_group_s_attention() -> None:
    """The score is then the attention itself, so the heaviest tokens are read."""
    rig, budget = Rig(), 40

    def seen(layer: int, trace: Trace) -> Tensor:
        mask = causal(N + MORE).repeat(4, 1, 1)
        for r in (0, 1):
            logits = [trace.logits(rig.model.shape, slice(N, N + MORE), h) for h in (2 * r, 2 * r + 1)]
            a = torch.stack([x.masked_fill(~causal(N + MORE)[N:], -torch.inf).softmax(-1) for x in logits]).sum(0)
            gone = a[:, :OLD].argsort(1, descending=True)[:, budget:]
            mask[2 * r : 2 * r + 2, N:, :OLD] = torch.ones(MORE, OLD, dtype=torch.bool).scatter(1, gone, False)
        return mask

    expected, _ = masked_logits(rig.model, IDS, seen)
    logits, _ = rig.run(Job(rig.plan(f"sparq(budget={budget}, window={WINDOW}, components=16, mean=False)"), IDS, N))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_budget_of_all_tokens_is_dense_attention() -> None:
    rig = Rig()
    expected, _ = masked_logits(rig.model, IDS, lambda layer, trace: causal(N + MORE))
    logits, _ = rig.run(Job(rig.plan(f"sparq(budget={OLD}, window={WINDOW}, components=4)"), IDS, N))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_several_tokens_share_a_selection_and_have_their_own_mean_value() -> None:
    """Two drafts of different lengths in one step are each what they are alone."""
    rig = Rig()
    plan = rig.plan(f"sparq(budget=40, window={WINDOW}, components=6)")
    both = [rig.read(plan, IDS[:N]), rig.read(plan, words(N, 4))]
    alone = [rig.read(plan, IDS[:N]), rig.read(plan, words(N, 4))]
    parts = forward(rig.model, [rig.ask(m, IDS[:n], "verify") for m, n in zip(both, (2, 4), strict=True)])
    for got, memory, n in zip(parts, alone, (2, 4), strict=True):
        torch.testing.assert_close(got, rig.feed(memory, IDS[:n], "verify"), atol=1e-4, rtol=0)
