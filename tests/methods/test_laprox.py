"""LaProx's scores against the explicit norms, its one choice over all layers, and what makes that choice possible."""

from __future__ import annotations

import pytest
import torch
from evicting import attention, check_keeps, recent, traces
from torch import Tensor

from longspool.engine.estimate import need
from longspool.errors import PlanError
from longspool.model.build import Model
from toolbox import Job, Rig, Trace, words

N, BUDGET, WINDOW, KERNEL = 200, 100, 12, 7
OLD = N - recent(N, WINDOW)
IDS = words(N + 8, 10)
RECIPE = f"laprox(budget={BUDGET}, window={WINDOW})"


def scores(model: Model, layer: int, trace: Trace) -> Tensor:
    """[R, OLD] by the card: the window's column norms, smoothed, times the norms of v W over the whole stream; each layer sums to 1."""
    shape, weight = model.shape, model.matrix(layer, "o").double()
    columns = attention(trace, shape, range(N - WINDOW, N)).norm(dim=1)[:, :OLD]
    rows = []
    for r in range(shape.kv_heads):
        total = torch.zeros(OLD, dtype=torch.float64)
        for h in range(r * shape.group, (r + 1) * shape.group):
            smooth = torch.stack([columns[h, max(j - KERNEL // 2, 0) : j + KERNEL // 2 + 1].mean() for j in range(OLD)])
            out = trace.v[:OLD, r] @ weight[:, h * shape.head_dim : (h + 1) * shape.head_dim].T
            total += (smooth + 1e-12) * out.norm(dim=-1)
        rows.append(total)
    score = torch.stack(rows)
    return score / score.sum()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_keeps_the_best_of_all_layers(kind: str) -> None:
    rig = Rig(kind)
    served = [layer for layer, window in enumerate(rig.model.shape.windows) if window is None]
    counts: list[int] = []

    def choose(layer: int, prompt: list[Trace]) -> list[list[int]]:
        every = torch.stack([scores(rig.model, i, prompt[i]) for i in served])
        places = every.flatten().topk(len(served) * 2 * (BUDGET - (N - OLD))).indices
        kept = torch.zeros(every.numel(), dtype=torch.bool).index_fill(0, places, True).view(every.shape)
        counts[:] = kept.sum(-1).flatten().tolist()
        return [torch.nonzero(row)[:, 0].tolist() for row in kept[served.index(layer)]]

    check_keeps(rig, RECIPE, IDS, N, OLD, choose)
    assert sum(counts) == len(served) * 2 * (BUDGET - (N - OLD))
    assert len(set(counts)) > 1, "budgets follow the scores"


def test_gram_norms_are_the_norms_of_what_reaches_the_stream() -> None:
    from longspool.methods.evict.laprox import LaProx

    rig = Rig()
    v = torch.randn(2, 30, 16)

    class Sight:
        shape = rig.model.shape

        def weights(self, name: str) -> Tensor:
            return rig.model.matrix(1, name)

    got = LaProx().effect(v, Sight())  # type: ignore[arg-type]
    weight = rig.model.matrix(1, "o").double()
    for r in (0, 1):
        for g in (0, 1):
            h = 2 * r + g
            explicit = (v[r].double() @ weight[:, 16 * h : 16 * h + 16].T).norm(dim=-1)
            torch.testing.assert_close(got[r, g].double(), explicit, atol=1e-4, rtol=1e-4)


def test_scores_of_a_layer_sum_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspool.methods.evict.laprox import LaProx

    seen: list[Tensor] = []
    least = LaProx.least
    monkeypatch.setattr(LaProx, "least", lambda self, scores, room: seen.extend(scores) or least(self, scores, room))
    rig = Rig()
    rig.read(rig.plan(RECIPE), IDS[:N])
    assert len(seen) == 3
    for layer, (mine, trace) in enumerate(zip(seen, traces(rig, IDS[:N]), strict=True)):
        assert float(mine.sum()) == pytest.approx(1, abs=1e-5)
        torch.testing.assert_close(mine.double(), scores(rig.model, layer, trace), atol=1e-6, rtol=1e-3)


def test_nothing_is_left_in_the_notes_and_short_prompts_are_whole() -> None:
    rig = Rig()
    memory = rig.read(rig.plan(RECIPE), IDS[:N], 64)
    assert memory.notes["laprox"] == {}
    assert memory.actions["laprox"]["evicted"] == 3 * 2 * (N - BUDGET)
    whole = rig.read(rig.plan(RECIPE), IDS[:90])
    assert {len(p) for layer in range(3) for p in whole.positions(layer)} == {90}


def test_layers_that_it_does_not_serve_settle_by_themselves() -> None:
    rig = Rig()
    memory = rig.read(rig.plan(f"{RECIPE} @ 0-1 + snapkv(budget=90, window=12) @ 2"), IDS[:N], 64)
    entries = sum(len(p) for layer in (0, 1) for p in memory.positions(layer))
    assert entries == 2 * 2 * BUDGET and [len(p) for p in memory.positions(2)] == [90, 90]


def test_chooses_again_after_every_chunk() -> None:
    rig = Rig()
    memory = rig.engine.empty(rig.plan(f"laprox(budget=80, window={WINDOW}, when='chunk')"))
    for first in range(0, 640, 64):
        rig.feed(memory, words(64, first), "prefill", 640)
        entries = sum(len(p) for layer in range(3) for p in memory.positions(layer))
        assert entries == 3 * 2 * min(first + 64, 80)
    memory.check()


def test_a_wrapper_may_share_its_scores_out_within_a_layer() -> None:
    rig = Rig()
    memory = rig.read(rig.plan(f"adakv({RECIPE})"), IDS[:N])
    assert {sum(len(p) for p in memory.positions(layer)) for layer in range(3)} == {2 * BUDGET}


def test_is_the_only_evictor_of_its_layers() -> None:
    with pytest.raises(PlanError, match="laprox chooses among the tokens of all its layers together, and snapkv layer by layer"):
        Rig().plan("laprox + snapkv")


def test_drafts_under_it_and_foresees_what_they_take() -> None:
    rig = Rig(chunk=128)
    plan = rig.plan("vericache(laprox(budget=96, window=16), horizon=4)", torch.float16)
    rig.pools.ledger.mark()
    request = rig.answer(plan, words(400), max_tokens=9)
    assert request.error is None and request.actions["vericache"]["drafted"] > 0
    assert rig.pools.ledger.peak["device"] <= need(plan, 400, 128, 9)


def test_two_requests_choose_apart() -> None:
    rig = Rig()
    plan = rig.plan(RECIPE)
    jobs = [Job(plan, IDS, N, 64), Job(plan, words(160, 3), 150, 64)]
    for job, (logits, memory) in zip(jobs, rig.together(jobs), strict=True):
        alone, own = Rig().run(job)
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=0)
        assert all(all(map(torch.equal, memory.positions(i), own.positions(i))) for i in range(3))
