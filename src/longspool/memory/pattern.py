"""Block-sparse prefill: one request's chunk under the layer's Pattern."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import attend_blocks, merge
from ..roles import Pattern
from ..values import Blocks, Rows, Step
from .fetch import fetched, head_parts, materialise
from .view import LayerView

if TYPE_CHECKING:
    from .layer import LayerMemory

Zone = tuple[Tensor, Tensor, Rows, int]
"""k pages, v pages, rows over them, and the logical index of the rows' first token."""


def blocks_of(memory: LayerMemory, q: Tensor, step: Step, view: LayerView) -> Blocks | None:
    """The pattern of one request's chunk, counted; None where it is dense."""
    pattern = memory.plan.one(Pattern)
    assert pattern is not None
    own = replace(view, step=step, rows=memory.rows(), memories=(memory,), fresh=None)
    blocks = pattern.blocks(q, own)
    if blocks is not None:
        keys = len(memory.pos) + int(memory.rows().length.max() if memory.settled is not None else 0)
        own.count(pattern, 0, **density(blocks, keys, len(q)))
    return blocks


def density(blocks: Blocks, keys: int, queries: int) -> dict[str, float]:
    """Blocks visited and blocks that a causal pass would visit, over all heads."""
    first = keys - queries
    ends = torch.arange(0, queries, blocks.size).add(blocks.size - 1).clamp_max(queries - 1) + first
    causal = ends.div(blocks.size, rounding_mode="floor") + 1
    return {"blocks_visited": int(blocks.count.sum()), "blocks_causal": int(causal.sum()) * blocks.count.shape[0]}


def attend_pattern(memory: LayerMemory, q: Tensor, step: Step, blocks: Blocks) -> Tensor:
    """[N, H, D] of one request, each zone apart and merged."""
    s, heads = memory.shape, []
    for first, last, zones in _uniform(memory, step):
        mine = Blocks(
            blocks.index[first * s.group : last * s.group].contiguous(),
            blocks.count[first * s.group : last * s.group].contiguous(),
            blocks.size,
        )
        part = q[:, first * s.group : last * s.group].contiguous()
        begin = sum(int(rows.length.max()) for _, _, rows, _ in zones) - len(q)
        parts = [_zone(memory, part, step, mine, zone, begin) for zone in zones]
        heads.append(merge([o for o, _ in parts], [x for _, x in parts])[0] if len(parts) > 1 else parts[0][0])
    return heads[0] if len(heads) == 1 else torch.cat(heads, 1)


def _zone(memory: LayerMemory, q: Tensor, step: Step, blocks: Blocks, zone: Zone, begin: int) -> tuple[Tensor, Tensor]:
    """`begin` is the logical index of the chunk's first token; the last zone holds the chunk itself."""
    k, v, rows, base = zone
    hi = torch.arange(1, len(q) + 1, dtype=torch.int32) + (begin - base)
    return attend_blocks(
        q, k, v, rows.table, rows.length, step.spans, None, hi, blocks, (base,), (begin,), memory.shape.scale, softcap=memory.shape.softcap
    )


def _uniform(memory: LayerMemory, step: Step) -> Iterator[tuple[int, int, list[Zone]]]:
    """Ranges of KV heads whose settled rows are of one length, with their zones."""
    heads, pool, recent = memory.shape.kv_heads, memory.recent.pool, memory.recent.rows()
    old = memory.rows()
    if memory.settled is None or not old.length.any():
        yield 0, heads, [(pool["k"], pool["v"], recent, 0)]
        return
    for first, last in head_parts(memory, step, alike=bool((old.length == old.length[0]).all())):
        with fetched([memory], old, first, last) as (store, part):
            k, v, rows, _ = materialise(memory, store, part)
        yield first, last, [(k, v, rows, 0), (pool["k"], pool["v"], recent.part(first, last), int(old.length[first]))]
