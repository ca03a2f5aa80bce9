"""Quest: bounds that hold, pages that win, and what is read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from longspool.kernels import page_scores
from longspool.memory import Ledger, Pool
from longspool.methods.select.quest import Quest, _half_up
from longspool.values import Shape
from toolbox import Job, Rig, Trace, causal, masked_logits, words

SHAPE = Shape(1, 4, 2, 8, 32, 10, 4096, 1.0, (None,))
PAGE = 16
N, MORE = 200, 10
IDS = words(N + MORE, 12)


@settings(max_examples=200, deadline=None)
@given(arrays(np.float32, 20, elements=st.floats(-60000, 60000, width=32)))
def test_bounds_are_rounded_up_and_no_farther_than_to_the_next_half(x: np.ndarray) -> None:
    half = _half_up(torch.from_numpy(x)).numpy()
    assert half.dtype == np.float16 and (half.astype(np.float64) >= x).all()
    below = np.nextafter(half, np.float16(-np.inf)).astype(np.float64)
    assert (below < x).all() or (x == 0).any()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 16), st.sampled_from([1e-6, 1.0, 300.0]))
def test_no_key_of_a_page_exceeds_its_bound(seed: int, fill: int, size: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    method = Quest()
    store = Pool(method.fields(SHAPE, PAGE), PAGE, "device", Ledger(), 1 << 16)
    pages = torch.from_numpy(store.take(5)).long()
    k = torch.randn(5, 8, PAGE, generator=rng) * size
    method.summarise(store, pages, torch.tensor([PAGE] * 4 + [fill], dtype=torch.int32), k)
    k[4, :, fill:] = 0
    q = torch.randn(1, 4, 8, generator=rng)
    table, length = pages.to(torch.int32)[None].repeat(2, 1), torch.tensor([4 * PAGE + fill] * 2, dtype=torch.int32)
    bound = page_scores(q, store["kmin"], store["kmax"], table, length, PAGE, (0, 1))
    for r in (0, 1):
        logits = torch.einsum("hd,pdw->hpw", q[0, 2 * r : 2 * r + 2].double(), k.double())
        logits[:, 4, fill:] = -torch.inf
        top = logits.amax((0, 2))
        assert bool((bound[r].double() >= top - 1e-6 * size).all())


def test_pages_of_equal_keys_have_exact_bounds() -> None:
    """Then the bound is the logit itself, and the selection that of a search over tokens."""
    method = Quest()
    store = Pool(method.fields(SHAPE, PAGE), PAGE, "device", Ledger(), 1 << 16)
    pages = torch.from_numpy(store.take(6)).long()
    k = torch.randint(-8, 9, (6, 8, 1)).float().expand(-1, -1, PAGE)
    method.summarise(store, pages, torch.full((6,), PAGE, dtype=torch.int32), k)
    q = torch.randn(1, 4, 8)
    table = pages.to(torch.int32)[None].repeat(4, 1)
    bound = page_scores(q, store["kmin"], store["kmax"], table, torch.full((4,), 6 * PAGE, dtype=torch.int32), PAGE, (0, 1))
    torch.testing.assert_close(bound, torch.einsum("hd,pd->hp", q[0], k[..., 0]))


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("budget", "chunk", "pages"), [(80, N, 12), (112, 90, 11)])
def test_reads_the_pages_with_the_highest_bounds(budget: int, chunk: int, pages: int, per_head: bool) -> None:
    """The `pages` that have settled after the prompt are chosen among: numpy picks the pages from an independent run's keys; logits equal
    attention over these pages, and counters tell them."""
    rig, read, stored = Rig(), 0, 0

    def seen(layer: int, trace: Trace) -> Tensor:
        nonlocal read, stored
        mask = causal(N + MORE).repeat(4, 1, 1)
        if layer < 1:
            return mask
        for i in range(N, N + MORE):
            keys = trace.k[: pages * PAGE].float().numpy().reshape(pages, PAGE, 2, 16)
            low, high = keys.min(1), keys.max(1)
            q = trace.q[i].numpy()
            bound = np.stack([np.maximum(q[h] * low[:, h // 2], q[h] * high[:, h // 2]).sum(-1) for h in range(4)])
            groups = [[h] for h in range(4)] if per_head else [[0, 1], [2, 3]]
            for heads in groups:
                best = set(np.argsort(-bound[heads].max(0), kind="stable")[: budget // PAGE - 1].tolist())
                gone = [j for j in range(pages * PAGE) if j // PAGE not in best]
                for h in heads:
                    mask[h, i, gone] = False
                read, stored = read + len(best) * PAGE, stored + pages * PAGE
        return mask

    expected, _ = masked_logits(rig.model, IDS, seen)
    plan = rig.plan(f"quest(budget={budget}, dense=1, per_head={per_head})")
    logits, memory = rig.run(Job(plan, IDS, N, chunk))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    first = MORE * pages * PAGE * 2  # layer 0 reads everything
    assert memory.actions["quest"] == {"tokens_read": read + first, "tokens_stored": stored + first}
    assert max(len(p) for p in memory.positions(2)) == N + MORE, "nothing is dropped"


def test_summaries_cost_two_halves_a_page_and_channel() -> None:
    rig = Rig()
    plain, quest = (rig.read(rig.plan(r, torch.float16), IDS[:192]) for r in ("headinfer(window=0)", "quest"))
    pages = 12 * 2 * 3
    assert quest.tiers()["device"] - quest[0].recent.side * 3 * 2 == pages * PAGE * 16 * 2 * 2 + pages * 16 * 2 * 2
    assert plain.tiers()["host"] == pages * PAGE * 16 * 2 * 2
