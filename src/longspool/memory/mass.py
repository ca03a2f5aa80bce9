"""Observed attention: how much of this step's attention each stored token drew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import row_mass
from ..values import Step

if TYPE_CHECKING:
    from .layer import LayerMemory


def observe(group: list[LayerMemory], q: Tensor, lse: Tensor, step: Step) -> None:
    """Set `memory.mass` [R, T] of each request: settled tokens first. lse [N, H] is the final one over all parts."""
    for i, memory in enumerate(group):
        a, b = step.spans[i], step.spans[i + 1]
        memory.mass = _mass(memory, q[a:b].contiguous(), lse[a:b].contiguous(), step.of(i))


def _mass(memory: LayerMemory, q: Tensor, lse: Tensor, step: Step) -> Tensor:
    from .attend import materialise, visible

    s, rows, raw = memory.shape, memory.recent.rows(), memory.recent.pool
    lo, hi = visible([memory], step)
    recent = row_mass(q, raw["k"], rows.table, rows.length, step.spans, lo, hi, lse, s.scale, softcap=s.softcap)
    recent = recent[:, : len(memory.pos)]
    if memory.settled is None or not memory.settled.length.any():
        return recent
    k, _, local, where = materialise(memory, memory.store, memory.rows())
    weight = memory.store["weight"][where] if memory.plan.weighted else None
    old = row_mass(q, k, local.table, local.length, step.spans, None, None, lse, s.scale, softcap=s.softcap, weight=weight)
    return torch.cat([old[:, : int(memory.settled.length.max())], recent], 1)
