"""Ada-KV's allotment against a plain search, and its effect on rows of different lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from test_snapkv import BUDGET, HELD, IDS, KERNEL, OLD, WINDOW, N, scores

from longspool.method import Paper
from longspool.methods.evict.adakv import AdaKV
from longspool.methods.evict.base import ScoreEvict
from longspool.methods.evict.snapkv import SnapKV
from longspool.roles import View
from toolbox import Rig, causal, masked_logits


def allotted(score: np.ndarray, room: int, floor: float) -> list[int]:
    """Each row its `floor` share of the best, then the best of what is left, whatever its row."""
    rows, width = score.shape
    least = min(int(room * floor), width)
    counts = [least] * rows
    left = sorted(((s, r) for r in range(rows) for s in np.sort(score[r])[: width - least]), reverse=True)
    for s, r in left[: rows * (room - least)]:
        if s > -np.inf:
            counts[r] += 1
    return counts


@settings(max_examples=150, deadline=None)
@given(
    arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 30)), elements=st.floats(0, 1, width=32), unique=True),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.2, 0.5, 1.0]),
)
def test_the_whole_budget_goes_where_the_scores_are(score: np.ndarray, room: int, floor: float) -> None:
    counts = AdaKV(SnapKV(), floor).allot(torch.from_numpy(score), room).tolist()
    assert counts == allotted(score, room, floor)
    rows, width = score.shape
    assert sum(counts) == min(rows * room, rows * width) or min(room, width) == width
    assert min(counts) >= min(int(room * floor), width)


@dataclass(frozen=True)
class Newest(ScoreEvict):
    """Scores by position alone."""

    paper: ClassVar[Paper] = Paper("", "A toy", "none")
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}

    def score(self, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor, view: View) -> torch.Tensor:
        return pos.float()


def test_looks_at_the_question_where_what_it_wraps_does() -> None:
    assert AdaKV(SnapKV()).aware() and not AdaKV(Newest()).aware()


def test_keeps_snapkvs_best_in_different_numbers() -> None:
    rig = Rig()
    _, traces = masked_logits(rig.model, IDS[:N], lambda layer, trace: causal(N))
    memory = rig.read(rig.plan(f"adakv(snapkv(budget={BUDGET}, window={WINDOW}, kernel={KERNEL}), floor=0.1)"), IDS[:N])
    different = 0
    for layer, trace in enumerate(traces):
        score = scores(trace, rig.model.shape)
        counts = allotted(score.float().numpy(), BUDGET - HELD, 0.1)
        different += counts[0] != counts[1]
        for r, held in enumerate(memory.positions(layer)):
            assert held.tolist() == [*sorted(score[r].topk(counts[r]).indices.tolist()), *range(OLD, N)]
    assert different, "otherwise it does nothing"
    assert sum(len(p) for p in memory.positions(0)) == 2 * BUDGET
    memory.check()


def test_scores_rows_of_different_lengths_by_what_each_holds() -> None:
    """The second eviction sees rows that the first has cut to different lengths."""
    rig, first = Rig(), 128
    plan = rig.plan(f"adakv(snapkv(budget=70, window={WINDOW}, kernel=1, when='chunk'), floor=0.0)")
    memory = rig.engine.empty(plan)
    rig.feed(memory, IDS[:first], "prefill", 400)
    held = memory.positions(0)
    assert len(held[0]) != len(held[1])
    rig.feed(memory, IDS[first : first + 64], "prefill", 400)
    end, recent = first + 64, first + 64 - (first + 64 - WINDOW) // 64 * 64
    _, (trace, *_) = masked_logits(rig.model, IDS[:end], lambda layer, trace: causal(end))
    rows = []
    for r, row in enumerate(held):
        at = torch.cat([row, torch.arange(first, end)])
        window = torch.arange(end - WINDOW, end)
        logits = [trace.logits(rig.model.shape, slice(end - WINDOW, end), h)[:, at] for h in (2 * r, 2 * r + 1)]
        attention = [x.masked_fill(at > window[:, None], -torch.inf).softmax(-1) for x in logits]
        rows.append((at[at < end - recent], torch.stack(attention).mean((0, 1))[at < end - recent]))
    best = sorted(((float(s), r, int(p)) for r, (at, score) in enumerate(rows) for p, s in zip(at, score, strict=True)), reverse=True)
    kept = [sorted(p for _, row, p in best[: 2 * (70 - recent)] if row == r) for r in (0, 1)]
    assert [p.tolist() for p in memory.positions(0)] == [k + list(range(end - recent, end)) for k in kept]
