"""RocketKV's two stages against plain loops."""

from __future__ import annotations

from math import log2, sqrt

import pytest
import torch
from evicting import attention, best, recent, traces
from torch import Tensor

from longspool.methods.evict.rocketkv import RocketKV
from toolbox import Job, Rig, Trace, causal, masked_logits, words

N, MORE, PAGE, WINDOW, KERNEL, BUDGET = 232, 6, 16, 12, 21, 96
OLD = N - recent(N, WINDOW, PAGE)
IDS = words(N + MORE, 16)


def stay(total: int, budget: int) -> int:
    c = total / budget
    return int(total / c ** min(0.2 + 0.06 * log2(c), 0.8))


def kept(rig: Rig, trace: Trace) -> list[list[int]]:
    """Stage 1: the largest of the window's sums over queries and group, smeared by a maximum."""
    shape = rig.model.shape
    total = attention(trace, shape, range(N - WINDOW, N)).sum(1).view(2, 2, N).sum(1)[:, :OLD]
    half = KERNEL // 2
    smear = [torch.stack([row[max(j - half, 0) : j + half + 1].max() for j in range(OLD)]) for row in total]
    # Of equal maxima the earlier token stays.
    room = stay(N, BUDGET) - (N - OLD)
    return [sorted(sorted(range(OLD), key=lambda j, row=row: (-float(row[j]), j))[:room]) for row in smear]


def pages_read(q: Tensor, pages: list[Tensor], channels: int) -> list[int]:
    """Stage 2: the pages of one row that the group's queries [G, D] read."""
    sign = torch.where(q.sum(0) > 0, 1.0, -1.0).double()
    edge = torch.stack([(sign * page).max(0).values for page in pages])  # [P, D], to be read with sign * q
    some = q.abs().mean(0).topk(channels).indices
    share = torch.zeros(len(pages), dtype=torch.float64)
    for one in q:
        scale = sqrt(len(one) * float(one[some].abs().sum() / one.abs().sum()))
        share += ((edge[:, some] @ (sign * one)[some]) / scale).softmax(0)
    return best(share, BUDGET // 2 // PAGE - 1)


@pytest.mark.parametrize("channels", [16, 5])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_both_stages_are_what_the_formulas_say(kind: str, channels: int) -> None:
    rig = Rig(kind)
    whole = [layer for layer, window in enumerate(rig.model.shape.windows) if window is None]
    held = {layer: kept(rig, trace) for layer, trace in enumerate(traces(rig, IDS[:N])) if layer in whole}
    assert all(len(row) == stay(N, BUDGET) - (N - OLD) < OLD for rows in held.values() for row in rows)

    def seen(layer: int, trace: Trace) -> Tensor:
        mask = causal(len(IDS)).repeat(4, 1, 1)
        for r in (0, 1):
            rows = held[layer][r]
            pages = [rows[i : i + PAGE] for i in range(0, len(rows), PAGE)]
            for i in range(N, N + MORE):
                read = pages_read(trace.q[i, 2 * r : 2 * r + 2], [trace.k[page, r] for page in pages], channels)
                stays = {p for j in read for p in pages[j]}
                mask[2 * r : 2 * r + 2, i, [p for p in range(OLD) if p not in stays]] = False
        return mask

    expected, _ = masked_logits(rig.model, IDS, seen)
    plan = rig.plan(f"rocketkv(budget={BUDGET}, window={WINDOW}, kernel={KERNEL}, channels={channels})")
    for chunk in (N, 90):
        logits, memory = rig.run(Job(plan, IDS, N, chunk))
        for layer, rows in held.items():
            assert [p.tolist() for p in memory.positions(layer)] == [[*row, *range(OLD, len(IDS))] for row in rows]
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)
        did = memory.actions["rocketkv"]
        assert 0 < did["tokens_read"] < did["tokens_stored"] and did["evicted"] > 0


def test_the_split_of_the_ratio() -> None:
    """The card: r = 0.2 + 0.06 log2 c up to 0.8; a prompt within the budget is dense."""
    rocket = RocketKV(budget=512)
    assert [rocket.stay(total) for total in (100, 512, 1024, 8192)] == [100, 512, int(1024 / 2**0.26), int(8192 / 16**0.44)]
    assert rocket.stay(512 << 12) == int((512 << 12) / 4096**0.8)
    lengths = [rocket.stay(total) for total in range(1, 20000, 37)]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize("recipe", ["rocketkv(budget=1000000)", "rocketkv(budget=232)"])
def test_what_fits_is_dense(recipe: str) -> None:
    """Stage 2 alone still chooses where the budget's half does not hold everything."""
    rig = Rig()
    logits, memory = rig.run(Job(rig.plan(recipe), IDS, N))
    expected, _ = masked_logits(rig.model, IDS, lambda layer, trace: causal(len(IDS)))
    torch.testing.assert_close(logits[:N], expected[:N], atol=1e-4, rtol=0)
    assert memory.actions["rocketkv"].get("evicted", 0) == 0
    if "1000000" in recipe:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_several_tokens_and_requests_at_once() -> None:
    """Requests of one step choose apart; the tokens of one that is verified choose together, as heads of a group do."""
    rig = Rig()
    plan = rig.plan(f"rocketkv(budget={BUDGET}, window={WINDOW})")
    jobs = [Job(plan, IDS, N), Job(plan, words(220, 2), 210), Job(plan, words(30, 3), 25)]
    for job, (logits, _) in zip(jobs, rig.together(jobs), strict=True):
        torch.testing.assert_close(logits, Rig().run(job)[0], atol=1e-4, rtol=0)
    memory = rig.read(plan, IDS[:N])
    assert bool(rig.feed(memory, IDS[N:], "verify").isfinite().all())


def test_refuses_what_can_not_be() -> None:
    for text, said in (("page=20", "page=20 must be"), ("budget=40", "at least four"), ("kernel=2", "odd"), ("channels=99", "channels=99")):
        with pytest.raises(Exception, match=said):
            Rig().plan(f"rocketkv({text})")
