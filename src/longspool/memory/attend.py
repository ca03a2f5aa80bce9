"""Attention of one layer over a group of requests with the same plan: every part apart, merged exactly."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..kernels import append_rows, attend_rows
from ..roles import Pattern, Place, Position, Reach, Store
from ..values import Rows, Step
from .fetch import LANES, fetched, materialise, packed, picked
from .frames import attend_frames
from .layer import LayerMemory
from .mass import observe
from .near import at_home
from .pattern import attend_pattern, blocks_of
from .selection import Part, merged, selected
from .view import LayerView

Fresh = tuple[Tensor, Tensor, Tensor]
"""k and v [R * n, D] of new tokens in the order of rows, and where each row's begin among these; see attend_rows."""


def advance(group: list[LayerMemory], q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
    """`write` and `attend`, as one where the kernels can do so."""
    plan = group[0].plan
    if plan.bare or (step.phase == "prefill" and plan.seats[Pattern]):
        write(group, q, k, v, step)
        return attend(group, q, k, v, step)
    return _attend(group, q, k, v, step, _enter(group, q, k, v, step))


def write(group: list[LayerMemory], q: Tensor, k: Tensor, v: Tensor, step: Step) -> None:
    """Everything enters the recent zone: q [N, H, D], k and v [N, Hkv, D]."""
    k, v, offset = _enter(group, q, k, v, step)
    pool, rows = group[0].recent.pool, recent_rows(group)
    append_rows(pool["k"], pool["v"], rows.table, rows.length - offset.diff().to(torch.int32), k, v, offset)


def _enter(group: list[LayerMemory], q: Tensor, k: Tensor, v: Tensor, step: Step) -> Fresh:
    """Make room for the new tokens, which are yet to be appended."""
    if len(group) == 1:
        group[0].enter(q, step.pos, step.phase)
    else:
        for memory, a, b in zip(group, step.spans, step.spans[1:], strict=False):
            memory.enter(q[a:b], step.pos[a:b], step.phase)
    return _by_row(k, step), _by_row(v, step), _offsets(step.spans, k.shape[1])


@functools.lru_cache(maxsize=64)
def _offsets(spans: tuple[int, ...], heads: int) -> Tensor:
    """Where each row's tokens begin among those of the step in row order, int64 [R + 1]."""
    counts = [b - a for a, b in itertools.pairwise(spans) for _ in range(heads)]
    return torch.tensor([0, *itertools.accumulate(counts)])


def _by_row(x: Tensor, step: Step) -> Tensor:
    """[N, Hkv, D] in the order of rows: request, head, token."""
    if x.shape[0] == step.requests:
        return x.flatten(0, 1)
    parts = [x[a:b].transpose(0, 1).reshape(-1, x.shape[-1]) for a, b in zip(step.spans, step.spans[1:], strict=False)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def recent_rows(group: list[LayerMemory]) -> Rows:
    return Rows.stack([m.recent.rows() for m in group])


def attend(group: list[LayerMemory], q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
    """What the queries see, [N, H, D]: the merge of the recent zone and of every part of the settled one."""
    return _attend(group, q, k, v, step, None)


def _attend(group: list[LayerMemory], q: Tensor, k: Tensor, v: Tensor, step: Step, fresh: Fresh | None) -> Tensor:
    first = group[0]
    plan = first.plan
    if plan.plain:
        return _recent(group, q, step, fresh)[0]
    rows = Rows.stack([m.rows() for m in group]) if first.settled is not None else None
    view = LayerView(first.layer, first.shape, step, rows or first.rows(), tuple(group), (q, k, v))
    if plan.bare:
        return attend_frames(group, q, step, plan.one(Position))
    if step.phase == "prefill" and plan.one(Pattern) is not None:
        return torch.cat([_patterned(m, q, k, v, step, i, view) for i, m in enumerate(group)])
    return _dense(group, q, step, rows, view, fresh)


def _patterned(memory: LayerMemory, q: Tensor, k: Tensor, v: Tensor, step: Step, request: int, view: LayerView) -> Tensor:
    """One request's chunk under its block pattern, or dense where the pattern says so."""
    a, b, own = step.spans[request], step.spans[request + 1], step.of(request)
    q, rows = q[a:b].contiguous(), memory.rows()
    blocks = blocks_of(memory, q, own, view)
    if blocks is not None:
        return attend_pattern(memory, q, own, blocks)
    return _dense([memory], q, own, rows, replace(view, step=own, rows=rows, memories=(memory,)))


def _dense(group: list[LayerMemory], q: Tensor, step: Step, rows: Rows | None, view: LayerView, fresh: Fresh | None = None) -> Tensor:
    plan = group[0].plan
    parts, seen = [_recent(group, q, step, fresh)], None
    if rows is not None and rows.total:
        seen = selected(group, q, rows, view)
        parts += _settled(group, q, seen.rows, view)
    out, lse = merged(parts, seen)
    if plan.observers:
        observe(group, q, lse, step)
    return out


def _recent(group: list[LayerMemory], q: Tensor, step: Step, fresh: Fresh | None) -> Part:
    pool, rows, shape = group[0].recent.pool, recent_rows(group), group[0].shape
    lo, hi = visible(group, step)
    keys = (pool["k"], pool["v"], rows.table, rows.length)
    return attend_rows(q, *keys, step.spans, lo, hi, shape.scale, softcap=shape.softcap, tree=step.tree, fresh=fresh)


def visible(group: list[LayerMemory], step: Step) -> tuple[Tensor | None, Tensor | None]:
    """In-row bounds int32 [N] of the recent tokens that each query may see: the causal test, and the layer's window."""
    window = group[0].plan.window
    single = step.ids.shape[0] == step.requests
    if window is None and (single or step.tree is not None):
        return None, None
    pos = step.pos.numpy()
    spans = list(zip(group, step.spans, step.spans[1:], strict=False))
    hi = None if single or step.tree is not None else _int32([m.pos.below(pos[a:b] + 1) for m, a, b in spans])
    lo = None if window is None else _int32([m.pos.below(pos[a:b] - window + 1) for m, a, b in spans])
    return lo, hi


def _int32(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int32))


def _settled(group: list[LayerMemory], q: Tensor, rows: Rows, view: LayerView) -> list[Part]:
    """The settled zone, one part after another."""
    plan, shape = group[0].plan, group[0].shape
    place = plan.one(Place)
    if place is None:
        return [attend_store(group[0], q, group[0].store, rows, Reach(view.step.spans))]
    if place.attends and group[0].store.tier != "device":
        store, part = at_home(group, rows)
        out, lse = attend_store(group[0], q.cpu(), store, part, Reach(view.step.spans))
        return [(out.to(q.device), lse.to(q.device))]
    outs = []
    for lo, hi in place.parts(shape.kv_heads, view):
        heads = q[:, lo * shape.group : hi * shape.group].contiguous()
        with fetched(group, rows, lo, hi, keep=view.step.phase != "prefill") as (store, part):
            outs.append(attend_store(group[0], heads, store, part, Reach(view.step.spans)))
    return outs if len(outs) == 1 else [(torch.cat([o for o, _ in outs], 1), torch.cat([s for _, s in outs], 1))]


def attend_store(memory: LayerMemory, q: Tensor, store: Store, rows: Rows, reach: Reach) -> Part:
    """Attention over encoded rows: fused where the codec and the kernels can, else its pages are decoded first. What is finer than a page
    becomes pages of its own; raw pages are read as they are, also with log-weights."""
    s, bounds = memory.shape, (reach.spans, reach.lo, reach.hi)
    if rows.grain != store.page:
        k, v, local, weight = picked(memory, store, rows)
        return attend_rows(q, k, v, local.table, local.length, *bounds, s.scale, softcap=s.softcap, weight=weight)
    if not memory.plan.weighted and store.page >= LANES:
        fused = memory.encode.attend(q, store, rows, reach, memory.span, memory.shape)
        if fused is not None:
            return fused
    if memory.plan.weighted and store.page >= LANES and (plain := memory.encode.plain(store)) is not None:
        return attend_rows(q, *plain, rows.table, rows.length, *bounds, s.scale, softcap=s.softcap, weight=store["weight"])
    k, v, local, pages = materialise(memory, store, rows)
    weight = store["weight"][pages] if memory.plan.weighted else None
    if store.page < LANES:
        k, v, local, (weight,) = packed(k, v, local, weight)
    return attend_rows(q, k, v, local.table, local.length, *bounds, s.scale, softcap=s.softcap, weight=weight)
