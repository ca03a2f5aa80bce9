"""The heart: what one request holds at one layer. Everything enters the recent zone; old tokens settle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..errors import LongspoolError
from ..kernels import append_rows, gather_rows
from ..method import Method
from ..plan import LayerPlan
from ..roles import Admit, Evict, Kept, Select
from ..values import Rows, Step
from .pool import Pool
from .pools import Pools, encoder
from .positions import Positions
from .tiles import Tiles, pad_rows, tile
from .view import Counters, LayerView
from .zone import Zone

Rotate = Callable[[Tensor, Tensor], Tensor]
"""Rotates x [N, A, D] at positions int64 [N]; the model's rotary embedding of a layer."""
Notes = dict[str, dict[str, object]]


class LayerMemory:
    """Two zones of one request at one layer: recent (raw, the same tokens for all heads) and settled (ragged, encoded, placed)."""

    def __init__(self, layer: int, plan: LayerPlan, pools: Pools, rotate: Rotate | None, notes: Notes, actions: Counters) -> None:
        self.layer, self.shape, self.plan, self.pools, self.rotate = layer, pools.shape, plan, pools, rotate
        self.notes, self.actions = notes, actions
        self.encode = encoder(plan)
        self.recent = Zone(pools.recent(layer, plan), self.shape.kv_heads)
        self.settled = Zone(pools.settled(layer, plan), self.shape.kv_heads) if plan.settles else None
        self.pos = Positions()
        self.mass: Tensor | None = None
        self.held = self._side = 0
        self.gone = 0
        """The position after the last token that has left the recent zone."""
        self._queries: list[Tensor] = []

    # ---- what it holds

    @property
    def store(self) -> Pool:
        """The pool of the settled zone."""
        assert self.settled is not None
        return self.settled.pool

    def queries(self) -> Tensor:
        """The last queries, [H, n, D]."""
        return torch.cat(self._queries)[-self.plan.needs.queries :].transpose(0, 1)

    def _remember(self, queries: list[Tensor]) -> None:
        self.pools.ledger.add("device", sum(q.nbytes for q in queries) - sum(q.nbytes for q in self._queries))
        self._queries = queries

    def keys(self) -> list[Tensor]:
        """All keys, settled ones first, per KV head [T, D]."""
        return [torch.cat([a[0], b[0]]) for a, b in zip(self.read_settled(), self.read_recent(), strict=True)]

    def read_recent(self, first: int = 0, count: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Per KV head k, v [n, D] of the recent tokens first to first + count."""
        n = len(self.pos) - first if count is None else count
        rows, heads = self.recent.rows(), self.shape.kv_heads
        index = torch.arange(first, first + n).repeat(heads)
        k, v = gather_rows(self.recent.pool["k"], self.recent.pool["v"], rows.table, index, torch.arange(heads + 1) * n)
        return list(zip(k.view(heads, n, -1), v.view(heads, n, -1), strict=True))

    def read_settled(self) -> list[tuple[Tensor, Tensor]]:
        """Per KV head k, v [n, D] of the settled tokens, decoded."""
        heads, dim = self.shape.kv_heads, self.shape.head_dim
        if self.settled is None or not self.settled.length.any():
            return [(torch.zeros(0, dim), torch.zeros(0, dim))] * heads
        out = []
        for pages, n in zip(self.settled.table, self.settled.length, strict=True):
            k, v = self.encode.read(self.store, torch.from_numpy(pages[: -(-n // self.store.page)]).long(), self.layer)
            out.append((k.transpose(1, 2).reshape(-1, dim)[:n], v.reshape(-1, dim)[:n]))
        return out

    def settled_field(self, name: str) -> list[Tensor]:
        """A per-token field ("pos" or "weight") of the settled tokens, per KV head [n]."""
        assert self.settled is not None
        rows = self.settled.rows()
        if name == "pos" and not self.plan.ragged:
            return [torch.arange(int(n)) for n in rows.length]
        return [self.store[name].view(-1)[rows.slots(r)] for r in range(rows.count)]

    def positions(self) -> list[Tensor]:
        """The positions that each KV head holds, ascending, int64."""
        recent = torch.from_numpy(self.pos.array())
        if self.settled is None:
            return [recent] * self.shape.kv_heads
        return [torch.cat([p.long(), recent]) for p in self.settled_field("pos")]

    # ---- the verbs

    def enter(self, q: Tensor, pos: Tensor) -> None:
        """Make room for one request's new tokens and remember its queries; the keys are appended by `write`."""
        self.recent.grow(pos.shape[0])
        self.pos.append(pos.numpy())
        self._account()
        if keep := self.plan.needs.queries:
            keep += self.plan.rollback
            self._remember([*self._queries, q[-keep:].clone()])
            if len(q) > 1 or len(self._queries) > keep:
                self._remember([torch.cat(self._queries)[-keep:].clone()])

    @property
    def restless(self) -> bool:
        """Whether enough tokens have grown old for a settle to move any."""
        old = len(self.pos) - self.plan.needs.recent - (self.plan.window or 0)
        return old >= self.recent.pool.page

    def settle(self, view: LayerView) -> None:
        """Move old tokens out of the recent zone: admit, evict, encode, summarise, place."""
        plan, step, page = self.plan, view.step, self.recent.pool.page
        if plan.window is not None:
            self._slide(plan.window + plan.needs.recent)
        if self.settled is None:
            return
        n = max(len(self.pos) - plan.needs.recent, 0) // page * page
        due = self.due(step)
        waits = plan.chain(Evict) and not due and step.phase == "prefill" and not step.final[0]
        if waits or not (n or (due and self.settled.length.any())):
            return
        self.held = len(self.pos) - n
        if due:
            self._resettle(n, due, view)
        elif plan.chain(Admit) or (self.settled.length % page).any():
            k, v = self._stacked(self.read_recent(0, n))
            self._append(self._admitted(k, v, self._pos_rows(n), view))
        else:
            self._hand_over(n)
        if n:
            self._drop(n)

    def due(self, step: Step) -> list[Evict]:
        """The evictors that run after this step."""
        return [e for e in self.plan.chain(Evict) if e.due(step)]

    def _drop(self, n: int) -> None:
        """The n oldest tokens, whole pages, leave the recent zone."""
        self.gone = int(self.pos.array(n)[-1]) + 1
        self.recent.drop_front(n // self.recent.pool.page)
        self.pos.drop(n)
        self._account()

    def _account(self) -> None:
        """Book the bytes that the positions take."""
        if (size := self.pos.nbytes) != self._side:
            self.pools.ledger.add("device", size - self._side)
            self._side = size

    def _slide(self, reach: int) -> None:
        """A sliding-window layer keeps only what its window can still see."""
        page = self.recent.pool.page
        dead = int(self.pos.below(self.pos.last - reach + 1)) // page
        if dead:
            self._drop(dead * page)

    def _hand_over(self, n: int) -> None:
        """Whole pages move from raw to settled: the same tokens for all heads."""
        assert self.settled is not None
        raw, count = self.recent.pool, n // self.recent.pool.page
        source = torch.from_numpy(self.recent.table[:, :count].reshape(-1).copy()).long()
        fill = torch.full((len(source),), raw.page, dtype=torch.int32)
        pos = np.broadcast_to(self.pos.array(n).reshape(count, -1), (self.shape.kv_heads, count, raw.page)).reshape(-1, raw.page)
        tiles = Tiles(raw["k"][source].float(), raw["v"][source].float(), fill, torch.from_numpy(pos.astype(np.int32)), None)
        first = self.settled.filled
        self.settled.grow(np.full(self.shape.kv_heads, n))
        self._store(tiles, np.concatenate([self.settled.table[r, f : f + count] for r, f in enumerate(first)]))
        self.count(self.encode, tokens=n * self.shape.kv_heads)

    def _resettle(self, n: int, evicts: list[Evict], view: LayerView) -> None:
        """Everything settled competes with the n tokens that are due; what is kept is written anew."""
        assert self.settled is not None
        k, v, pos, weight = self._candidates(n, view)
        all_of_them = int((pos >= 0).sum())
        for method in evicts:
            before = int((pos >= 0).sum())
            kept = method.keep(k, v, pos, view)
            k, v, pos, weight = _apply(kept, k, v, pos, weight)
            self.count(method, candidates=before, evicted=before - int((pos >= 0).sum()))
        if n == 0 and int((pos >= 0).sum()) == all_of_them:
            return
        self.settled.truncate(0)
        self._append(
            [
                (k[r, : int(m)], v[r, : int(m)], pos[r, : int(m)], None if weight is None else weight[r, : int(m)])
                for r, m in enumerate((pos >= 0).sum(1))
            ]
        )

    def _candidates(self, n: int, view: LayerView) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Settled tokens and the n due ones that are admitted: k, v [R, T, D], pos [R, T] (-1 pads), weight [R, T] or None."""
        k, v = self._stacked(self.read_recent(0, n))
        fresh = self._admitted(k, v, self._pos_rows(n), view)
        old, old_pos = self.read_settled(), self.settled_field("pos")
        keys = [torch.cat([a, f[0]]) for (a, _), f in zip(old, fresh, strict=True)]
        values = [torch.cat([b, f[1]]) for (_, b), f in zip(old, fresh, strict=True)]
        pos = [torch.cat([p.long(), f[2]]) for p, f in zip(old_pos, fresh, strict=True)]
        weight = None
        if self.plan.weighted:
            weight = pad_rows([torch.cat([w, torch.zeros(len(f[2]))]) for w, f in zip(self.settled_field("weight"), fresh, strict=True)])
        return pad_rows(keys), pad_rows(values), pad_rows(pos, -1), weight

    def _admitted(self, k: Tensor, v: Tensor, pos: Tensor, view: LayerView) -> list[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        """Per row k, v, pos of the tokens that every Admit lets in."""
        ok = torch.ones(pos.shape, dtype=torch.bool)
        for method in self.plan.chain(Admit):
            mine = method.admit(k, v, pos, view)
            self.count(method, seen=mine.numel(), dropped=int((ok & ~mine).sum()))
            ok = ok & mine
        return [(k[r, m], v[r, m], pos[r, m], None) for r, m in enumerate(ok)]

    def _append(self, rows: list[tuple[Tensor, Tensor, Tensor, Tensor | None]]) -> None:
        """Add ragged tokens to the settled zone; a partly filled last page is read, completed and written again."""
        assert self.settled is not None
        zone, page = self.settled, self.store.page
        begun = zone.length % page
        new = np.array([len(row[2]) for row in rows], np.int32)
        if not new.any():
            return
        # A row without new tokens keeps its last page as it is: forks may share it.
        rows = [self._with_tail(r, int(b), row) if b and n else row for r, (b, n, row) in enumerate(zip(begun, new, rows, strict=True))]
        first = zone.length // page
        zone.grow(new)
        fresh = [zone.table[r, first[r] : zone.filled[r]] for r in np.flatnonzero(new)]
        self._store(tile(rows, page), np.concatenate(fresh))
        self.count(self.encode, tokens=sum(len(row[2]) for row in rows))

    def _with_tail(
        self, row: int, count: int, new: tuple[Tensor, Tensor, Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The tokens of a row's partly filled last page, decoded, before its new ones."""
        assert self.settled is not None
        last = torch.tensor([int(self.settled.table[row, self.settled.length[row] // self.store.page])])
        k, v = self.encode.read(self.store, last, self.layer)
        pos = self.store["pos"][last][0, :count].long()
        weight = None
        if self.plan.weighted:
            weight = torch.cat([self.store["weight"][last][0, :count], torch.zeros(len(new[2])) if new[3] is None else new[3]])
        return torch.cat([k[0].T[:count], new[0]]), torch.cat([v[0][:count], new[1]]), torch.cat([pos, new[2]]), weight

    def _store(self, tiles: Tiles, pages: np.ndarray) -> None:
        where = torch.from_numpy(pages).long()
        self.encode.write(self.store, where, tiles.fill, tiles.k, tiles.v, self.layer)
        if select := self.plan.one(Select):
            select.summarise(self.store, where, tiles.fill, tiles.k)
        if "pos" in self.store:
            self.store["pos"][where] = tiles.pos
        if "weight" in self.store:
            self.store["weight"][where] = torch.zeros(tiles.pos.shape) if tiles.weight is None else tiles.weight

    # ---- small helpers

    def _stacked(self, rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows])

    def _pos_rows(self, n: int) -> Tensor:
        return torch.from_numpy(self.pos.array(n)).expand(self.shape.kv_heads, n)

    def count(self, method: object, **amounts: float) -> None:
        """Add to the counters that prove what a method did; what is no method (the raw codec, say) counts nothing."""
        if isinstance(method, Method):
            for name, amount in amounts.items():
                self.actions[method.slug][name] += amount

    # ---- life

    def rows(self) -> Rows:
        """The settled rows, or none."""
        return self.settled.rows() if self.settled is not None else Rows.empty(self.shape.kv_heads, self.recent.pool.page)

    def truncate(self, upto: int) -> None:
        """Forget the tokens at position `upto` and later. Reaches only into the recent zone."""
        n = int(self.pos.below(upto))
        taken = len(self.pos) - n
        if not taken:
            return
        if upto < self.gone + (self.plan.window or 1) - 1 and self.gone:
            raise LongspoolError(
                f"Layer {self.layer} can't be rolled back to position {upto}: tokens up to {self.gone - 1} have left its recent zone; "
                "whoever rolls back must declare Needs(recent=...)."
            )
        self.recent.truncate(n)
        self.pos.keep(n)
        self._account()
        if self._queries:
            self._remember([torch.cat(self._queries)[:-taken].clone()])

    def fork(self, notes: Notes, actions: Counters) -> LayerMemory:
        """The same tokens; pages are shared until one side writes."""
        twin = LayerMemory(self.layer, self.plan, self.pools, self.rotate, notes, actions)
        twin.recent.take_over(self.recent)
        if self.settled is not None and twin.settled is not None:
            twin.settled.take_over(self.settled)
        twin.pos, twin.gone = self.pos.copy(), self.gone
        twin._account()
        twin._remember(list(self._queries))
        return twin

    def take_over(self, other: LayerMemory, since: int = 0) -> None:
        """Append the other memory's tokens from position `since` on to the recent zone, and know its queries."""
        first = int(other.pos.below(since))
        rows = other.read_recent(first)
        pos = other.pos.array()[first:]
        if since == 0:
            settled = other.read_settled()
            pos = np.concatenate([other.positions()[0].numpy()[: len(settled[0][0])], pos])
            rows = [(torch.cat([a, c]), torch.cat([b, d])) for (a, b), (c, d) in zip(settled, rows, strict=True)]
        start = self.recent.length.copy()
        self.recent.grow(len(pos))
        self.pos.append(pos)
        self._account()
        table, heads = self.recent.rows().table, self.shape.kv_heads
        k, v = torch.cat([k for k, _ in rows]), torch.cat([v for _, v in rows])
        append_rows(self.recent.pool["k"], self.recent.pool["v"], table, torch.from_numpy(start), k, v, torch.arange(heads + 1) * len(pos))
        if self.plan.needs.queries:
            self._remember(list(other._queries))

    def free(self) -> None:
        """Give every page back."""
        self._remember([])
        self.pos.keep(0)
        self._account()
        self.recent.free()
        if self.settled is not None:
            self.settled.free()

    @property
    def bytes(self) -> int:
        """Live bytes: pages in full, tables, positions and kept queries."""
        zones = [self.recent] if self.settled is None else [self.recent, self.settled]
        return sum(z.bytes + z.side for z in zones) + self.pos.nbytes + sum(q.nbytes for q in self._queries)

    def check(self) -> None:
        """Raise AssertionError where tables, lengths and positions don't fit together."""
        assert (self.recent.length == len(self.pos)).all(), f"layer {self.layer}: {self.recent.length} tokens, {len(self.pos)} positions"
        for zone in [self.recent] if self.settled is None else [self.recent, self.settled]:
            assert (zone.pool.refs[zone.pages()] > 0).all(), f"layer {self.layer} holds a page that was given back"
        for held in self.positions():
            assert (held.diff() > 0).all(), f"layer {self.layer}: positions don't ascend"


def _apply(kept: Kept, k: Tensor, v: Tensor, pos: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The candidates that are kept, with merged entries in their places."""
    keys = kept.k or tuple(k[r, i] for r, i in enumerate(kept.index))
    values = kept.v or tuple(v[r, i] for r, i in enumerate(kept.index))
    if weight is not None or kept.weight is not None:
        old = torch.zeros(pos.shape) if weight is None else weight
        weight = pad_rows([old[r, i] if kept.weight is None else kept.weight[r] for r, i in enumerate(kept.index)])
    return pad_rows(list(keys)), pad_rows(list(values)), pad_rows([pos[r, i] for r, i in enumerate(kept.index)], -1), weight
