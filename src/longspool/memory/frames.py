"""Attention with bare keys: each frame of the Position seat rotates queries and keys its own way, and sees its own distances. Without a
Position there is one frame, the model's own.

All that a step reads turns by the step's total. Where angles depend on it (dynamic scaling, longrope at its switch) and an answer makes
it grow, older keys turn anew, while keys stored rotated stay as they entered: answers then differ between the two, prompts do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import attend_rows, merge
from ..roles import Frame, Position, Seen, Select
from ..values import Rows, Step
from .fetch import LANES, fetched, head_parts, materialise, packed, picked, spread
from .selection import merged, selected
from .view import LayerView

if TYPE_CHECKING:
    from .layer import LayerMemory


@dataclass(frozen=True)
class Bare:
    """Unrotated tokens of some rows: k [S, D, W], v [S, W, D], positions int64 [S, W], rows over the S pages, and the
    positions of the first row's tokens in order; None where every query sees all of them."""

    k: Tensor
    v: Tensor
    pos: Tensor
    rows: Rows
    order: Tensor | None
    weight: Tensor | None = None


EXACT = (Frame(0, None, lambda pos: pos, lambda pos: pos),)
"""Every distance as it is: how keys are seen that are bare for a codec's sake."""


def attend_frames(group: list[LayerMemory], q: Tensor, step: Step, position: Position | None) -> Tensor:
    """[N, H, D] over all requests."""
    return torch.cat(
        [_one(m, q[a:b], step.of(i), position) for i, (m, a, b) in enumerate(zip(group, step.spans, step.spans[1:], strict=False))]
    )


def _one(memory: LayerMemory, q: Tensor, step: Step, position: Position | None) -> Tensor:
    shape, heads = memory.shape, []
    frames = EXACT if position is None else position.frames()
    seen = _seen(memory, q, step)
    for first, last, zones in _uniform(memory, step, None if seen is None else seen.rows):
        part = q[:, first * shape.group : last * shape.group].contiguous()
        parts = [_frame(memory, part, step, position, frame, zone) for frame in frames for zone in zones]
        heads.append(merge([o for o, _ in parts], [s for _, s in parts]))
    together = torch.cat([o for o, _ in heads], 1), torch.cat([s for _, s in heads], 1)
    return merged([together], seen)[0]


def _frame(memory: LayerMemory, q: Tensor, step: Step, position: Position | None, frame: Frame, zone: Bare) -> tuple[Tensor, Tensor]:
    s = memory.shape
    hi = lo = None
    if zone.order is not None:
        hi = torch.searchsorted(zone.order, step.pos - frame.near, right=True).to(torch.int32)
        lo = None if frame.far is None else torch.searchsorted(zone.order, step.pos - frame.far, right=True).to(torch.int32)
    if frame.near and hi is not None:
        memory.count(position, far_keys=float((hi.long() - (0 if lo is None else lo)).sum()) * (zone.rows.count))
    # One total for queries and the keys of all zones and frames: some scalings turn faster or slower by it.
    k = rotated(memory, zone.k, frame.key(zone.pos), step.reach)
    turned = memory.rotate(q, frame.query(step.pos), step.reach) if memory.rotate else q
    return attend_rows(
        turned, k, zone.v, zone.rows.table, zone.rows.length, step.spans, lo, hi, s.scale, softcap=s.softcap, weight=zone.weight
    )


def rotated(memory: LayerMemory, k: Tensor, pos: Tensor, total: int) -> Tensor:
    """Pages k [S, D, W] rotated at pos [S, W] of a sequence of `total` tokens."""
    if memory.rotate is None or not k.shape[0]:
        return k
    flat = memory.rotate(k.transpose(1, 2).reshape(-1, 1, k.shape[1]), pos.reshape(-1), total)
    return flat.view(k.shape[0], k.shape[2], k.shape[1]).transpose(1, 2).contiguous()


def _seen(memory: LayerMemory, q: Tensor, step: Step) -> Seen | None:
    """What a Select takes of the settled zone for queries that are turned to where they are; None where everything is read."""
    rows = memory.rows()
    if memory.plan.one(Select) is None or step.phase == "prefill" or not rows.total:
        return None
    turned = memory.rotate(q, step.pos, step.reach) if memory.rotate else q
    return selected([memory], turned, rows, LayerView(memory.layer, memory.shape, step, rows, (memory,)))


def _uniform(memory: LayerMemory, step: Step, chosen: Rows | None) -> Iterator[tuple[int, int, list[Bare]]]:
    """Ranges of KV heads that hold the same positions, with their zones."""
    heads = memory.shape.kv_heads
    if chosen is not None:
        yield 0, heads, [_read(memory, chosen, 0, heads, None), _recent(memory, 0, heads)]
        return
    settled = memory.settled_field("pos") if memory.settled is not None else []
    same = all(torch.equal(settled[0], p) for p in settled[1:])
    for first, last in head_parts(memory, step, alike=same) if settled else [(0, heads)]:
        yield first, last, [*_settled(memory, first, last, settled), _recent(memory, first, last)]


def _recent(memory: LayerMemory, first: int, last: int) -> Bare:
    pool, rows = memory.recent.pool, memory.recent.rows().part(first, last)
    order = torch.from_numpy(memory.pos.array())
    used = rows.table[:, : int(rows.filled.max())].long()
    padded = torch.nn.functional.pad(order, (0, used.shape[1] * pool.page - len(order))).view(1, -1, pool.page)
    pos = padded.expand(last - first, -1, -1).reshape(-1, pool.page)
    local = torch.arange(used.numel(), dtype=torch.int32).view(used.shape)
    return Bare(pool["k"][used.reshape(-1)].float(), pool["v"][used.reshape(-1)].float(), pos, Rows(local, rows.length, pool.page), order)


def _settled(memory: LayerMemory, first: int, last: int, settled: list[Tensor]) -> list[Bare]:
    if memory.settled is None or not memory.rows().length[first:last].any():
        return []
    return [_read(memory, memory.rows(), first, last, settled[first].long())]


def _read(memory: LayerMemory, rows: Rows, first: int, last: int, order: Tensor | None) -> Bare:
    """Settled rows of some KV heads; those that were chosen have no order."""
    with fetched([memory], rows, first, last, keep=order is None) as (store, part):
        pos: Tensor | None
        if part.grain != store.page:
            k, v, local, weight = picked(memory, store, part)
            pos = spread(store["pos"], part.cut(1), local.grain, memory.sharers)
        else:
            k, v, local, where = materialise(memory, store, part)
            pos, weight = store["pos"][where], store["weight"][where] if memory.plan.weighted else None
            if local.grain < LANES:
                k, v, local, (pos, weight) = packed(k, v, local, pos, weight)
    assert pos is not None
    return Bare(k, v, pos.long(), local, order, weight)
