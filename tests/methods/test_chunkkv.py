"""ChunkKV's chunks and shared choices against plain loops."""

from __future__ import annotations

import pytest
import torch
from evicting import attention, best, check_keeps, recent, traces
from torch import Tensor

from longspool.values import Shape
from toolbox import Rig, Trace, words

N, BUDGET, WINDOW = 200, 110, 12
OLD = N - recent(N, WINDOW)
ROOM = BUDGET - (N - OLD)
IDS = words(N + 8, 9)


def mass(trace: Trace, shape: Shape) -> Tensor:
    """What the window gives to each old token, summed over queries and all heads."""
    return attention(trace, shape, range(N - WINDOW, N)).sum((0, 1))[:OLD]


def chunks(score: Tensor, size: int) -> list[int]:
    """The tokens of the best chunks by the mean of their members, the last of which may be short."""
    means = [float(score[a : a + size].mean()) for a in range(0, OLD, size)]
    chosen = sorted(range(len(means)), key=lambda c: -means[c])[: max(ROOM // size, 1)]
    return [p for p in range(OLD) if p // size in chosen]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize(("size", "reuse"), [(10, 2), (7, 1), (5, 3), (60, 2)])
def test_keeps_whole_chunks_for_groups_of_layers(kind: str, size: int, reuse: int) -> None:
    """Where a group's first layer is a sliding window, the first that is not chooses."""
    rig = Rig(kind)
    whole = [layer for layer, window in enumerate(rig.model.shape.windows) if window is None]

    def choose(layer: int, prompt: list[Trace]) -> list[list[int]]:
        first = next(other for other in whole if other // reuse == layer // reuse)
        return [chunks(mass(prompt[first], rig.model.shape), size)] * 2

    check_keeps(rig, f"chunkkv(budget={BUDGET}, window={WINDOW}, chunk={size}, reuse={reuse})", IDS, N, OLD, choose)


def test_chunks_of_one_are_the_tokens() -> None:
    rig = Rig()

    def choose(layer: int, prompt: list[Trace]) -> list[list[int]]:
        return [best(mass(prompt[layer], rig.model.shape), ROOM)] * 2

    check_keeps(rig, f"chunkkv(budget={BUDGET}, window={WINDOW}, chunk=1, reuse=1)", IDS, N, OLD, choose)


def test_layers_differ_where_they_choose_for_themselves() -> None:
    rig = Rig()
    prompt = traces(rig, IDS[:N])
    own = [chunks(mass(prompt[layer], rig.model.shape), 10) for layer in range(3)]
    assert own[0] != own[1] != own[2]


def test_needs_whole_numbers() -> None:
    rig = Rig()
    with pytest.raises(Exception, match="chunk=0 must be at least 1"):
        rig.plan("chunkkv(chunk=0)")
    assert torch.equal(torch.tensor(chunks(torch.ones(OLD), OLD)), torch.arange(OLD))
