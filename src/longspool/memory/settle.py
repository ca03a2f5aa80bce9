"""Settling: old tokens leave the recent zone; who is admitted, who is evicted, and how the rest is stored."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..roles import Admit, Evict, Select
from ..values import Step
from . import books
from .drawn import Drawn
from .frames import rotated
from .index import learn
from .near import decoded, written
from .tiles import Candidates, Row, Tiles, pad_rows, tile
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
            learn(member, step)


def _move(memory: LayerMemory, view: LayerView) -> bool:
    """Whether anything has settled."""
    assert memory.settled is not None
    plan, step, page = memory.plan, view.step, memory.recent.pool.page
    n, due = _old(memory), memory.due(step)
    if waits(memory, step, due) or not (n or (due and memory.settled.length.any())):
        return False
    memory.held = len(memory.pos) - n
    recent = [None if m.drawn is None else m.drawn.whole(m.longest + len(m.pos))[:, m.longest + n :] for m in memory.members]
    if due:
        drawn = [_resettle(memory, n, due, view)]
    elif plan.chain(Admit) or (memory.settled.length % page).any():
        k, v = _stacked(memory.read_recent(0, n))
        pos = _pos_rows(memory, n)
        ok = _admitted(memory, k, v, pos, view)
        drawn = [_settled_mass(memory, memory.drawn, n, ok)]
        _append(memory, _chosen(k, v, pos, ok))
    else:
        drawn = [_settled_mass(m, m.drawn, n, None) for m in memory.members]
        _hand_over(memory, n)
    for member, old, new in zip(memory.members, drawn, recent, strict=True):
        if member.drawn is not None and old is not None and new is not None:
            member.drawn.put(torch.cat([pad_rows(old), new], 1))
        if n:
            member.drop(n)
    if due and plan.evicts_prompts_only and step.final[0]:
        memory.remember([])
    return True


def waits(memory: LayerMemory, step: Step, due: list[Evict]) -> bool:
    """Whether old tokens stay where they are for now: until the prompt's end, or for good."""
    reading = step.phase == "prefill" and not step.final[0]
    return (memory.plan.prompts and (reading or step.phase != "prefill")) or (bool(memory.plan.chain(Evict)) and not due and reading)


def weigh(memory: LayerMemory, view: LayerView) -> None:
    """Show the candidates to the evictors that choose among the tokens of several layers."""
    n = _old(memory)
    if memory.settled is None or not (n or memory.settled.length.any()):
        return
    memory.held = len(memory.pos) - n
    found = _candidates(memory, n, view, counted=False)
    for method in memory.due(view.step):
        if method.together:
            method.weigh(found.k, found.v, found.pos, replace(view, candidates=found))


def _old(memory: LayerMemory) -> int:
    """How many of the recent tokens may settle: whole pages of what nobody needs raw."""
    page = memory.recent.pool.page
    return max(len(memory.pos) - memory.plan.needs.recent, 0) // page * page


def _slide(memory: LayerMemory, reach: int) -> None:
    """A sliding-window layer keeps only what its window can still see."""
    page = memory.recent.pool.page
    dead = int(memory.pos.below(memory.pos.last - reach + 1)) // page
    if dead:
        if memory.drawn is not None:
            memory.drawn.put(memory.drawn.whole(len(memory.pos))[:, dead * page :])
        memory.drop(dead * page)


def _hand_over(memory: LayerMemory, n: int) -> None:
    """Whole pages move from raw to settled: the same tokens for all heads, and for all layers that are stored together."""
    assert memory.settled is not None
    raw, count, rows = memory.recent.pool, n // memory.recent.pool.page, len(memory.settled.length)
    parts = [_raw_pages(member, count) for member in memory.members]
    k, v = parts[0] if len(parts) == 1 else (torch.cat([k for k, _ in parts], 1), torch.cat([v for _, v in parts], 2))
    fill = torch.full((len(k),), raw.page, dtype=torch.int32)
    pos = np.broadcast_to(memory.pos.array(n).reshape(count, -1), (rows, count, raw.page)).reshape(-1, raw.page)
    tiles = Tiles(k, v, fill, torch.from_numpy(pos.astype(np.int32)), None)
    first = memory.settled.filled
    memory.settled.grow(np.full(rows, n))
    _store(memory, tiles, np.concatenate([memory.settled.table[r, f : f + count] for r, f in enumerate(first)]))
    memory.count(memory.encode, tokens=n * memory.shape.kv_heads * len(parts))


def _raw_pages(memory: LayerMemory, count: int) -> tuple[Tensor, Tensor]:
    """The first pages of every head's recent row, row after row: k [S, D, W], v [S, W, D]; of heads that share settled pages side by side
    in D."""
    source = torch.from_numpy(memory.recent.table[:, :count].reshape(-1).copy()).long()
    k, v = memory.recent.pool["k"][source].float(), memory.recent.pool["v"][source].float()
    if not memory.plan.joins:
        return k, v
    k, v = (x.view(-1, count, *x.shape[1:]).transpose(0, 1) for x in (k, v))  # [count, Hkv, ...]
    return k.flatten(1, 2), v.transpose(1, 2).flatten(2)


def _resettle(memory: LayerMemory, n: int, evicts: list[Evict], view: LayerView) -> list[Tensor] | None:
    """Everything settled competes with the n tokens that are due; what is kept is written anew. What the kept ones have drawn, for each
    row."""
    assert memory.settled is not None
    found = _candidates(memory, n, view)
    all_of_them = found.count
    for method in evicts:
        before = found.count
        found = found.take(method.keep(found.k, found.v, found.pos, replace(view, candidates=found)))
        if found.count < before:
            memory.count(method, candidates=before, evicted=before - found.count)
    if n or found.count < all_of_them:
        memory.settled.truncate(0)
        for member in memory.members:
            member.keep({})
        _append(memory, found.rows())
    return found.ragged(found.drawn)


def _candidates(memory: LayerMemory, n: int, view: LayerView, counted: bool = True) -> Candidates:
    """Settled tokens and the n due ones that are admitted."""
    k, v = _stacked(memory.read_recent(0, n))
    pos = _pos_rows(memory, n)
    ok = _admitted(memory, k, v, pos, view, counted)
    fresh, old = _chosen(k, v, pos, ok), memory.read_settled()
    keys = [torch.cat([a, f[0]]) for (a, _), f in zip(old, fresh, strict=True)]
    values = [torch.cat([b, f[1]]) for (_, b), f in zip(old, fresh, strict=True)]
    at = [torch.cat([p.long().to(f[2].device), f[2]]) for p, f in zip(memory.settled_field("pos"), fresh, strict=True)]
    weight = None
    if memory.plan.weighted:
        weight = pad_rows([torch.cat([w, torch.zeros(len(f[2]))]) for w, f in zip(memory.settled_field("weight"), fresh, strict=True)])
        weight = weight.to(memory.device)
    mass, drawn = (_settled_mass(memory, of, n, ok) for of in (memory.mass, memory.drawn))
    return Candidates(
        pad_rows(keys), pad_rows(values), pad_rows(at, -1), weight, *(None if m is None else pad_rows(m) for m in (mass, drawn))
    )


def _settled_mass(memory: LayerMemory, of: Tensor | Drawn | None, n: int, ok: Tensor | None) -> list[Tensor] | None:
    """The mass of each row's settled tokens and of the n oldest recent ones, or of those among these that are let in."""
    if of is None or memory.settled is None:
        return None
    first = memory.longest
    mass = of.whole(first + len(memory.pos)) if isinstance(of, Drawn) else of
    new = mass[:, first : first + n]
    return [
        torch.cat([mass[r, : int(length)], new[r] if ok is None else new[r, ok[r].to(mass.device)]])
        for r, length in enumerate(memory.settled.length)
    ]


def _admitted(memory: LayerMemory, k: Tensor, v: Tensor, pos: Tensor, view: LayerView, counted: bool = True) -> Tensor:
    """Which tokens every Admit lets in, bool [R, T]."""
    ok = torch.ones(pos.shape, dtype=torch.bool, device=pos.device)
    for method in memory.plan.chain(Admit):
        mine = method.admit(k, v, pos, view)
        if counted:
            memory.count(method, seen=mine.numel(), dropped=int((ok & ~mine).sum()))
        ok = ok & mine
    return ok


def _chosen(k: Tensor, v: Tensor, pos: Tensor, ok: Tensor) -> list[Row]:
    """Per row k, v and pos of the tokens that are let in."""
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
            _summarise(select, member, where, tiles.fill, member.span.own(tiles.k, 1), tiles.pos)
    if "pos" in memory.store:
        memory.store["pos"][where] = tiles.pos
    if "weight" in memory.store:
        memory.store["weight"][where] = 0.0 if tiles.weight is None else tiles.weight


def _summarise(select: Select, memory: LayerMemory, pages: Tensor, fill: Tensor, k: Tensor, pos: Tensor) -> None:
    """A layer's summaries of pages, one for each head that shares them."""
    if (heads := memory.sharers) > 1:
        pages = (pages[:, None] * heads + torch.arange(heads)).flatten()
        fill, pos, k = fill.repeat_interleave(heads), pos.repeat_interleave(heads, 0), k.reshape(-1, k.shape[1] // heads, k.shape[2])
    select.summarise(memory.summaries, pages, fill, _seen(memory, k, pos))


def _seen(memory: LayerMemory, k: Tensor, pos: Tensor) -> Tensor:
    """Keys [S, D, W] at pos [S, W] as queries see them, though they may be stored bare."""
    return rotated(memory, k, pos.long(), memory.reach) if memory.plan.bare else k


def _stacked(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows])


def _pos_rows(memory: LayerMemory, n: int) -> Tensor:
    return torch.from_numpy(memory.pos.array(n)).to(memory.device).expand(memory.shape.kv_heads, n)
