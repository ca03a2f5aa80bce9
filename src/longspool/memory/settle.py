"""Settling: old tokens leave the recent zone; who is admitted, who is evicted, and how the rest is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..roles import Admit, Evict, Kept, Select
from . import books, index
from .frames import rotated
from .near import decoded, written
from .tiles import Row, Tiles, pad_rows, tile
from .view import LayerView

if TYPE_CHECKING:
    from .layer import LayerMemory


def settle(memory: LayerMemory, view: LayerView) -> None:
    """Move old tokens out of the recent zone: admit, evict, encode, summarise, place. Layers that are stored together do it after the last
    of them."""
    plan, step = memory.plan, view.step
    for member in memory.members:
        member.reach = step.reach
    if plan.window is not None:
        _slide(memory, plan.window + plan.needs.recent)
    if memory.settled is None or not memory.span.last:
        return
    if _move(memory, view):
        for member in memory.members:
            index.learn(member, step)


def _move(memory: LayerMemory, view: LayerView) -> bool:
    """Whether anything has settled."""
    assert memory.settled is not None
    plan, step, page = memory.plan, view.step, memory.recent.pool.page
    n = max(len(memory.pos) - plan.needs.recent, 0) // page * page
    due = memory.due(step)
    waits = plan.chain(Evict) and not due and step.phase == "prefill" and not step.final[0]
    if waits or not (n or (due and memory.settled.length.any())):
        return False
    memory.held = len(memory.pos) - n
    if due:
        _resettle(memory, n, due, view)
    elif plan.chain(Admit) or (memory.settled.length % page).any():
        k, v = _stacked(memory.read_recent(0, n))
        _append(memory, _admitted(memory, k, v, _pos_rows(memory, n), view))
    else:
        _hand_over(memory, n)
    if n:
        for member in memory.members:
            member.drop(n)
    if due and plan.evicts_prompts_only and step.final[0]:
        memory.remember([])
    return True


def _slide(memory: LayerMemory, reach: int) -> None:
    """A sliding-window layer keeps only what its window can still see."""
    page = memory.recent.pool.page
    dead = int(memory.pos.below(memory.pos.last - reach + 1)) // page
    if dead:
        memory.drop(dead * page)


def _hand_over(memory: LayerMemory, n: int) -> None:
    """Whole pages move from raw to settled: the same tokens for all heads, and for all layers that are stored together."""
    assert memory.settled is not None
    raw, count = memory.recent.pool, n // memory.recent.pool.page
    parts = [_raw_pages(member, count) for member in memory.members]
    k, v = parts[0] if len(parts) == 1 else (torch.cat([k for k, _ in parts], 1), torch.cat([v for _, v in parts], 2))
    fill = torch.full((len(k),), raw.page, dtype=torch.int32)
    pos = np.broadcast_to(memory.pos.array(n).reshape(count, -1), (memory.shape.kv_heads, count, raw.page)).reshape(-1, raw.page)
    tiles = Tiles(k, v, fill, torch.from_numpy(pos.astype(np.int32)), None)
    first = memory.settled.filled
    memory.settled.grow(np.full(memory.shape.kv_heads, n))
    _store(memory, tiles, np.concatenate([memory.settled.table[r, f : f + count] for r, f in enumerate(first)]))
    memory.count(memory.encode, tokens=n * memory.shape.kv_heads * len(parts))


def _raw_pages(memory: LayerMemory, count: int) -> tuple[Tensor, Tensor]:
    """The first pages of every head's recent row, row after row: k [S, D, W], v [S, W, D]."""
    source = torch.from_numpy(memory.recent.table[:, :count].reshape(-1).copy()).long()
    return memory.recent.pool["k"][source].float(), memory.recent.pool["v"][source].float()


def _resettle(memory: LayerMemory, n: int, evicts: list[Evict], view: LayerView) -> None:
    """Everything settled competes with the n tokens that are due; what is kept is written anew."""
    assert memory.settled is not None
    k, v, pos, weight = _candidates(memory, n, view)
    all_of_them = int((pos >= 0).sum())
    for method in evicts:
        before = int((pos >= 0).sum())
        kept = method.keep(k, v, pos, view)
        k, v, pos, weight = _apply(kept, k, v, pos, weight)
        memory.count(method, candidates=before, evicted=before - int((pos >= 0).sum()))
    if n == 0 and int((pos >= 0).sum()) == all_of_them:
        return
    memory.settled.truncate(0)
    for member in memory.members:
        index.keep(member, {})
    counts = (pos >= 0).sum(1).tolist()
    _append(memory, [(k[r, :m], v[r, :m], pos[r, :m], None if weight is None else weight[r, :m]) for r, m in enumerate(counts)])


def _candidates(memory: LayerMemory, n: int, view: LayerView) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Settled tokens and the n due ones that are admitted: k, v [R, T, D], pos [R, T] (-1 pads), weight [R, T] or None."""
    k, v = _stacked(memory.read_recent(0, n))
    fresh = _admitted(memory, k, v, _pos_rows(memory, n), view)
    old, old_pos = memory.read_settled(), memory.settled_field("pos")
    keys = [torch.cat([a, f[0]]) for (a, _), f in zip(old, fresh, strict=True)]
    values = [torch.cat([b, f[1]]) for (_, b), f in zip(old, fresh, strict=True)]
    pos = [torch.cat([p.long().to(f[2].device), f[2]]) for p, f in zip(old_pos, fresh, strict=True)]
    weight = None
    if memory.plan.weighted:
        weight = pad_rows([torch.cat([w, torch.zeros(len(f[2]))]) for w, f in zip(memory.settled_field("weight"), fresh, strict=True)])
        weight = weight.to(memory.device)
    return pad_rows(keys), pad_rows(values), pad_rows(pos, -1), weight


def _admitted(memory: LayerMemory, k: Tensor, v: Tensor, pos: Tensor, view: LayerView) -> list[Row]:
    """Per row k, v, pos of the tokens that every Admit lets in."""
    ok = torch.ones(pos.shape, dtype=torch.bool, device=pos.device)
    for method in memory.plan.chain(Admit):
        mine = method.admit(k, v, pos, view)
        memory.count(method, seen=mine.numel(), dropped=int((ok & ~mine).sum()))
        ok = ok & mine
    return [(k[r, m], v[r, m], pos[r, m], None) for r, m in enumerate(ok)]


def _append(memory: LayerMemory, rows: list[Row]) -> None:
    """Add ragged tokens to the settled zone; a partly filled last page is read, completed and written again."""
    assert memory.settled is not None
    zone, page = memory.settled, memory.store.page
    begun = zone.length % page
    new = np.array([len(row[2]) for row in rows], np.int32)
    if not new.any():
        return
    if memory.plan.weighted:
        rows = [(k, v, pos, pos.new_zeros(len(pos), dtype=torch.float32) if weight is None else weight) for k, v, pos, weight in rows]
    # A row without new tokens keeps its last page as it is: forks may share it.
    rows = [_with_tail(memory, r, int(b), row) if b and n else row for r, (b, n, row) in enumerate(zip(begun, new, rows, strict=True))]
    first = zone.length // page
    zone.grow(new)
    fresh = [zone.table[r, first[r] : zone.filled[r]] for r in np.flatnonzero(new)]
    _store(memory, tile(rows, page), np.concatenate(fresh))
    memory.count(memory.encode, tokens=sum(len(row[2]) for row in rows))


def _with_tail(memory: LayerMemory, row: int, count: int, new: Row) -> Row:
    """The tokens of a row's partly filled last page, decoded, before its new ones."""
    assert memory.settled is not None
    last = torch.tensor([int(memory.settled.table[row, memory.settled.length[row] // memory.store.page])])
    k, v = decoded(memory, last)
    pos = memory.store["pos"][last][0, :count].long().to(memory.device)
    weight = None if new[3] is None else torch.cat([memory.store["weight"][last][0, :count].to(memory.device), new[3]])
    return torch.cat([k[0].T[:count], new[0]]), torch.cat([v[0][:count], new[1]]), torch.cat([pos, new[2]]), weight


def _store(memory: LayerMemory, tiles: Tiles, pages: np.ndarray) -> None:
    assert memory.settled is not None
    where, tiles = torch.from_numpy(pages).long(), tiles.to(memory.device)
    memory.settled.forget(pages)
    books.enter(memory, pages, tiles)
    with written(memory, where) as (store, at):
        memory.encode.write(store, at, tiles.fill, tiles.k, tiles.v, memory.span)
    if select := memory.plan.one(Select):
        for member in memory.members:
            select.summarise(member.summaries, where, tiles.fill, _seen(member, member.span.own(tiles.k, 1), tiles.pos))
    if "pos" in memory.store:
        memory.store["pos"][where] = tiles.pos
    if "weight" in memory.store:
        memory.store["weight"][where] = 0.0 if tiles.weight is None else tiles.weight


def _seen(memory: LayerMemory, k: Tensor, pos: Tensor) -> Tensor:
    """Keys [S, D, W] at pos [S, W] as queries see them, though they may be stored bare."""
    return rotated(memory, k, pos.long(), memory.reach) if memory.plan.bare else k


def _stacked(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows])


def _pos_rows(memory: LayerMemory, n: int) -> Tensor:
    return torch.from_numpy(memory.pos.array(n)).to(memory.device).expand(memory.shape.kv_heads, n)


def _apply(kept: Kept, k: Tensor, v: Tensor, pos: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The candidates that are kept, with merged entries in their places."""
    keys = kept.k or tuple(k[r, i] for r, i in enumerate(kept.index))
    values = kept.v or tuple(v[r, i] for r, i in enumerate(kept.index))
    if weight is not None or kept.weight is not None:
        old = pos.new_zeros(pos.shape, dtype=torch.float32) if weight is None else weight
        weight = pad_rows([old[r, i] if kept.weight is None else kept.weight[r] for r, i in enumerate(kept.index)])
    return pad_rows(list(keys)), pad_rows(list(values)), pad_rows([pos[r, i] for r, i in enumerate(kept.index)], -1), weight
