"""Observed attention: how much of this step's attention each stored token drew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import row_mass
from ..values import Step
from .fetch import fetched, head_parts, materialise

if TYPE_CHECKING:
    from .layer import LayerMemory


def observe(group: list[LayerMemory], q: Tensor, lse: Tensor, step: Step) -> None:
    """Set `memory.mass` [R, T] of each request whose step is watched, settled tokens first, and add it to what they have drawn. lse [N, H]
    is the final one over all parts."""
    for i, memory in enumerate(group):
        a, b, own = step.spans[i], step.spans[i + 1], step if step.requests == 1 else step.of(i)
        if not memory.plan.watches(own):
            continue
        mass = _mass(memory, q[a:b].contiguous(), lse[a:b].contiguous(), own)
        if memory.plan.needs.mass:
            memory.mass = mass
        # What a flow verifies it may take back.
        if memory.drawn is not None and step.phase != "verify":
            memory.drawn.add(mass)


def _mass(memory: LayerMemory, q: Tensor, lse: Tensor, step: Step) -> Tensor:
    from .attend import visible

    s, rows, raw = memory.shape, memory.recent.rows(), memory.recent.pool
    lo, hi = visible([memory], step)
    recent = row_mass(q, raw["k"], rows.table, rows.length, step.spans, lo, hi, lse, s.scale, softcap=s.softcap)
    recent = recent[:, : len(memory.pos)]
    if memory.settled is None or not memory.settled.length.any():
        return recent
    old = []
    for first, last in head_parts(memory, step):
        heads = slice(first * s.group, last * s.group)
        with fetched([memory], memory.rows(), first, last) as (store, part):
            k, _, local, where = materialise(memory, store, part)
            weight = store["weight"][where] if memory.plan.weighted else None
        at = (local.table, local.length, step.spans, None, None, lse[:, heads].contiguous(), s.scale)
        old.append(row_mass(q[:, heads].contiguous(), k, *at, softcap=s.softcap, weight=weight))
    return torch.cat([torch.cat(old)[:, : int(memory.settled.length.max())], recent], 1)
