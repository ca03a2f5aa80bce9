"""Teacher forcing: what the model would have said at each place of a given text, under a recipe."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..plan import Plan
from ..values import Step
from ..values.flow import Ask
from .engine import Engine
from .forward import forward


def teacher_forced(engine: Engine, ids: list[int], prefill: int, plan: Plan) -> Iterator[Tensor]:
    """Logits [n, V] piece by piece: the first `prefill` tokens in chunks as a prompt, each later token as a decode step."""
    memory = engine.empty(plan)
    try:
        chunk = engine.chunk_of(plan)
        for first in range(0, prefill, chunk):
            end = min(first + chunk, prefill)
            step = Step(torch.tensor(ids[first:end]), torch.arange(first, end), (0, end - first), (prefill,), "prefill", (end == prefill,))
            yield forward(engine.model, [Ask(step, memory, "all")])[0]
        for at in range(prefill, len(ids)):
            step = Step(torch.tensor(ids[at : at + 1]), torch.tensor([at]), (0, 1), (prefill,), "decode", (True,))
            yield forward(engine.model, [Ask(step, memory)])[0]
    finally:
        memory.free()
