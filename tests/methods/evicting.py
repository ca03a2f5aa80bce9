"""What the tests of evictors share: a run in which a reference says what is left after the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longspool.values import Shape
from toolbox import Job, Rig, Trace, causal, masked_logits

Choose = Callable[[int, list[Trace]], list[list[int]]]
"""From a layer and all layers' traces of the prompt to the old positions that each KV head keeps."""


def recent(n: int, window: int, page: int = 64) -> int:
    """Tokens of a prompt that stay recent: the window and what fills no whole page."""
    return n - (n - window) // page * page


def traces(rig: Rig, ids: Sequence[int]) -> list[Trace]:
    """A dense run over a prompt."""
    return masked_logits(rig.model, ids, lambda layer, trace: causal(len(ids), rig.model.shape.windows[layer]))[1]


def attention(trace: Trace, shape: Shape, queries: range, at: Tensor | None = None) -> Tensor:
    """What each query gives to each key that it sees, float64 [H, n, N]; `at` are the keys that are there."""
    total, rows = len(trace.k), torch.tensor(list(queries))
    there = torch.ones(total, dtype=torch.bool) if at is None else torch.isin(torch.arange(total), at)
    hidden = (torch.arange(total) > rows[:, None]) | ~there
    every = [trace.logits(shape, slice(None), h)[rows].masked_fill(hidden, -torch.inf).softmax(-1) for h in range(shape.heads)]
    return torch.stack(every)


def check_keeps(rig: Rig, recipe: str, ids: Sequence[int], n: int, old: int, choose: Choose, chunks: Sequence[int] = ()) -> None:
    """After a prompt of n tokens, of which the first `old` compete, each head holds what the reference chooses, and later tokens see just
    that."""
    shape, kept = rig.model.shape, {}
    prompt = traces(rig, ids[:n])
    for layer, window in enumerate(shape.windows):
        if window is None:
            kept[layer] = [sorted(row) for row in choose(layer, prompt)]
    assert any(len(row) < old for rows in kept.values() for row in rows), "otherwise it does nothing"

    def seen(layer: int, trace: Trace) -> Tensor:
        if layer not in kept:
            return causal(len(ids), shape.windows[layer])
        mask = causal(len(ids)).repeat(shape.heads, 1, 1)
        for h in range(shape.heads):
            mask[h, n:, sorted(set(range(old)) - set(kept[layer][h // shape.group]))] = False
        return mask

    expected, _ = masked_logits(rig.model, ids, seen)
    for chunk in chunks or (n, 64):
        logits, memory = rig.run(Job(rig.plan(recipe), list(ids), n, chunk))
        for layer, rows in kept.items():
            assert [p.tolist() for p in memory.positions(layer)] == [[*row, *range(old, len(ids))] for row in rows], (layer, chunk)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        memory.check()


def best(score: Tensor, count: int) -> list[int]:
    """The places of the highest scores."""
    return score.topk(count).indices.tolist()
