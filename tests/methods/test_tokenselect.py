"""TokenSelect's vote and its selection cache against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from toolbox import Job, Rig, Trace, causal, masked_logits, words

N, MORE, WINDOW, SINKS, BUDGET = 200, 10, 16, 5, 40
OLD = (N - WINDOW) // 16 * 16
IDS = words(N + MORE, 34)


def chosen(q: Tensor, k: Tensor, heads: list[int], kernel: int) -> list[int]:
    """The settled tokens that these heads vote for: queries [H, D], keys [OLD, Hkv, D]."""
    vote = torch.stack([(k[SINKS:OLD, h // 2] @ q[h]).softmax(0) for h in heads]).sum(0)
    pooled = torch.stack([vote[max(j - kernel // 2, 0) : j + kernel // 2 + 1].max() for j in range(len(vote))])
    return [*range(SINKS), *(pooled.argsort(descending=True, stable=True)[: BUDGET - SINKS] + SINKS).tolist()]


@pytest.mark.parametrize("reuse", [2.0, 0.3, -1.0])
@pytest.mark.parametrize("kernel", [1, 5])
def test_heads_vote_and_similar_queries_share(reuse: float, kernel: int) -> None:
    rig = Rig()
    counts = {"computed": 0.0, "reused": 0.0}

    def seen(layer: int, trace: Trace) -> Tensor:
        mask, last, best = causal(N + MORE), None, []
        for i in range(N, N + MORE):
            q = trace.q[i]
            if last is not None and float(torch.cosine_similarity(last.flatten(), q.flatten(), 0)) >= reuse:
                counts["reused"] += 1
            else:
                counts["computed"] += 1
                last, best = q, chosen(q, trace.k, [0, 1, 2, 3], kernel)
            mask[i, [j for j in range(OLD) if j not in best]] = False
        return mask

    expected, _ = masked_logits(rig.model, IDS, seen)
    recipe = f"tokenselect(budget={BUDGET}, window={WINDOW}, sinks={SINKS}, reuse={reuse}, kernel={kernel})"
    logits, memory = rig.run(Job(rig.plan(recipe), IDS, N))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert {name: memory.actions["tokenselect"][name] for name in counts} == counts
    if reuse == 0.3:
        assert all(counts.values()), "both happen, or the test tells nothing"
    assert memory.actions["tokenselect"]["tokens_read"] == 3 * MORE * 2 * BUDGET


def test_a_head_of_large_logits_does_not_decide_alone() -> None:
    """Softmax per head before the sum: with raw sums another set is read."""
    rig = Rig()
    _, (trace, *_) = masked_logits(rig.model, IDS, lambda layer, trace: causal(N + MORE))
    soft = [set(chosen(trace.q[i], trace.k, [0, 1, 2, 3], 1)) for i in range(N, N + MORE)]
    raw = [
        set(sum(trace.k[:OLD, h // 2] @ trace.q[i, h] for h in range(4)).topk(BUDGET).indices.tolist())  # type: ignore[union-attr]
        for i in range(N, N + MORE)
    ]
    assert any(a != b | set(range(SINKS)) for a, b in zip(soft, raw, strict=True))


def test_heads_that_hold_different_tokens_vote_apart() -> None:
    """Beside an evictor an in-row index means another token in every row."""
    rig = Rig()
    plan = rig.plan("snapkv(budget=150, window=16) + tokenselect(budget=40, window=16, sinks=5, reuse=2)")
    memory = rig.read(plan, IDS[:N])
    positions = memory.positions(0)
    assert positions[0].tolist() != positions[1].tolist()
    heard = []
    select = type(plan.layers[0].methods[1]).select
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(plan.layers[0].methods[1]),
            "select",
            lambda self, q, rows, view: heard.append((view.layer, q, rows, out := select(self, q, rows, view))) or out,
        )
        rig.feed(memory, IDS[N : N + 1])
    layer, q, rows, out = heard[0]
    assert layer == 0
    for r in (0, 1):
        k = memory[0].read_settled()[r][0].double()
        vote = torch.stack([(k[SINKS:] @ q[0, h].double()).softmax(0) for h in (2 * r, 2 * r + 1)]).sum(0)
        want = {*range(SINKS), *(vote.topk(BUDGET - SINKS).indices + SINKS).tolist()}
        assert set(out.rows.slots(r).tolist()) == set(rows.slots(r)[sorted(want)].tolist())


def test_what_fits_is_read_whole_and_remembered_nowhere() -> None:
    rig = Rig()
    expected, _ = masked_logits(rig.model, IDS, lambda layer, trace: causal(N + MORE))
    logits, memory = rig.run(Job(rig.plan(f"tokenselect(budget={OLD}, window={WINDOW}, sinks=5)"), IDS, N))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert not any(layer.index for layer in memory.layers) and "computed" not in memory.actions["tokenselect"]


def test_a_selection_that_is_remembered_counts_its_bytes() -> None:
    rig = Rig()
    recipe = f"tokenselect(budget={BUDGET}, window={WINDOW}, sinks=5)"
    memory = rig.read(rig.plan(recipe), IDS[:N])
    before = memory.bytes
    rig.feed(memory, IDS[N : N + 1])
    held = 3 * 4 * (4 * 16 + 2 * BUDGET)
    assert memory.bytes - before == held == sum(x.nbytes for layer in memory.layers for x in layer.index.values())
