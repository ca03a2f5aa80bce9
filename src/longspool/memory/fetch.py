"""Settled pages made ready for attention: brought to the device where they live elsewhere, and decoded where no kernel reads the codes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..kernels import take_tokens
from ..plan import PAGE
from ..roles import Place, Store
from ..values import Rows, Step
from .pool import Pool, size
from .pools import piece
from .view import LayerView

if TYPE_CHECKING:
    from .layer import LayerMemory

LANES = 16
"""Tokens of a page below which no kernel but the reference reads it."""


def head_parts(memory: LayerMemory, step: Step, alike: bool = True) -> list[tuple[int, int]]:
    """Ranges of KV heads that one request attends apart: one by one where they hold different tokens, else as its Place says."""
    heads, place = memory.shape.kv_heads, memory.plan.one(Place)
    if not alike:
        return [(h, h + 1) for h in range(heads)]
    if place is None or memory.store.tier == "device":
        return [(0, heads)]
    return list(place.parts(heads, LayerView(memory.layer, memory.shape, step, memory.rows(), (memory,))))


@contextmanager
def fetched(group: Sequence[LayerMemory], rows: Rows, lo: int, hi: int, keep: bool = False) -> Iterator[tuple[Pool, Rows]]:
    """The rows of KV heads lo to hi of all requests, and the device pool where they are while the context lasts. With `keep` the caches
    are used, and what is read stays in them."""
    memory, heads, per = group[0], group[0].shape.kv_heads, rows.count // (len(group) * group[0].shape.kv_heads)
    if (lo, hi) != (0, heads):
        mine = [r for b in range(len(group)) for r in range((b * heads + lo) * per, (b * heads + hi) * per)]
        rows = Rows(rows.table[mine], rows.length[mine], rows.grain)
    home = memory.store
    if home.tier == "device":
        yield home, rows
        return
    grain = max(rows.grain, piece(memory.plan))  # what is read of larger pieces keeps its place in them
    stage, used, share = memory.pools.stage(memory.plan, grain), rows.used, rows.count // len(group)
    per = grain // rows.grain * memory.sharers
    loans: list[_Loan] = []
    try:
        table = torch.full(rows.table.shape, -1, dtype=torch.int32)
        for b, one in enumerate(group):
            part = slice(b * share, (b + 1) * share)
            entries = rows.table[part][used[part]].numpy()
            wanted, at = np.unique(entries // per, return_inverse=True)
            loans.append(_Loan(one, stage, wanted, keep))
            local = loans[-1].bring()[at.reshape(-1)] * per + entries % per
            table[part] = table[part].masked_scatter(used[part], torch.from_numpy(local.astype(np.int32)))
        yield stage, Rows(table, rows.length, rows.grain)
    finally:
        for loan in loans:
            loan.end()


class _Loan:
    """Copies on the device of what one request reads: those in its cache, and fresh ones for the rest."""

    def __init__(self, memory: LayerMemory, stage: Pool, wanted: np.ndarray, keep: bool) -> None:
        self.memory, self.stage, self.wanted = memory, stage, wanted
        assert memory.settled is not None
        caches = {c.pool.tier: c for c in memory.settled.near if keep and c.pool.page == stage.page}
        self.cache, self.shelf = caches.get("device"), caches.get("host")
        self.slots = np.full(len(wanted), -1, np.int32) if self.cache is None else self.cache.find(wanted)
        self.fresh = self.slots < 0
        self.slots[self.fresh] = stage.take(int(self.fresh.sum()))
        self.whole = False

    def bring(self) -> np.ndarray:
        """Where each entry is on the device."""
        missing = self.wanted[self.fresh]
        target = torch.from_numpy(self.slots[self.fresh]).long()
        if len(missing):
            for name, value in self._load(missing).items():
                self.stage[name][target] = value.to(self.stage.device, non_blocking=True)
        self.whole = True
        away = size({name: form for name, form in self.stage.fields.items() if name in self.memory.store.away})
        amounts: dict[str, float] = {"bytes_fetched": len(missing) * away}
        if self.cache is not None:
            amounts |= {"device_hits": len(self.wanted) - len(missing), "device_misses": len(missing)}
        self.memory.count(self.memory.plan.one(Place), **amounts)
        return self.slots

    def _load(self, ids: np.ndarray) -> dict[str, Tensor]:
        """What is read of pages or pieces, from the shelf on the host where they lie there, else from home."""
        home, names = self.memory.store, tuple(self.stage.fields)
        away = [name for name in names if name in home.away]
        got = home.get(torch.from_numpy(ids).long(), self.stage.page, [name for name in names if name not in home.away])
        if self.shelf is None:
            self._count_disk(len(ids))
            return got | home.get(torch.from_numpy(ids).long(), self.stage.page, away)
        slots = self.shelf.find(ids)
        new = slots < 0
        slots[new] = self.shelf.pool.take(int(new.sum()))
        try:
            if new.any():
                self.shelf.pool.put(torch.from_numpy(slots[new]).long(), home.get(torch.from_numpy(ids[new]).long(), self.stage.page, away))
            got |= self.shelf.pool.get(torch.from_numpy(slots).long())
        except BaseException:
            self.shelf.pool.give(slots[new])
            raise
        self.shelf.keep(ids[new], slots[new])
        self.memory.count(self.memory.plan.one(Place), host_hits=len(ids) - int(new.sum()), host_misses=int(new.sum()))
        self._count_disk(int(new.sum()))
        return got

    def _count_disk(self, count: int) -> None:
        home = self.memory.store
        if home.disk is not None:
            records = count * (self.stage.page // home.piece)
            self.memory.count(self.memory.plan.one(Place), bytes_from_disk=records * home.disk.record)

    def end(self) -> None:
        """Keep the fresh copies, or give them back."""
        slots = self.slots[self.fresh]
        if self.cache is None or not self.whole:
            self.stage.give(slots)
        else:
            self.cache.keep(self.wanted[self.fresh].astype(np.int64), slots)


def materialise(memory: LayerMemory, store: Store, rows: Rows) -> tuple[Tensor, Tensor, Rows, Tensor]:
    """Rows decoded into a pool of their own: k [S, D, W], v [S, W, D], the rows over it, and the S source pages."""
    heads = memory.sharers
    where, local = pages_of(rows, store.page, heads)
    k, v = apart(*memory.encode.read(store, where, memory.span), heads)
    return k, v, local, where if heads == 1 else where.repeat_interleave(heads)


def apart(k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Pages of so many heads side by side, k [S, heads * D, W] and v [S, W, heads * D], as pages of one head, k [S * heads, D, W] and
    v [S * heads, W, D]."""
    if heads == 1:
        return k, v
    return k.reshape(-1, k.shape[1] // heads, k.shape[2]), v.view(*v.shape[:2], heads, -1).transpose(1, 2).flatten(0, 1).contiguous()


def picked(memory: LayerMemory, store: Store, rows: Rows) -> tuple[Tensor, Tensor, Rows, Tensor | None]:
    """Single tokens, or pieces of pages, as pages of their own: k [S, D, W], v [S, W, D], rows over these and their log-weights [S, W].
    Nothing else is read where floats are stored or the codec takes single tokens; else the pages that hold them."""
    rows = rows.cut(1)
    page, wide = store.page, -(-rows.table.shape[1] // store.page)
    if (plain := memory.encode.plain(store)) is not None:
        k, v = take_tokens(*plain, rows.table, rows.length)
    elif (tokens := memory.encode.take(store, rows.table[rows.used].long(), memory.span)) is not None:
        k, v = (_paged(x, rows, page) for x in tokens)
        k = k.transpose(1, 2).contiguous()
    else:
        k, v, local, _ = materialise(memory, store, rows)
        k, v = take_tokens(k, v, local.table, rows.length)
    weight = spread(store["weight"], rows, page, memory.sharers) if memory.plan.weighted else None
    return k, v, Rows(_counted(rows.count, wide), rows.length, page), weight


def spread(x: Tensor, rows: Rows, page: int, heads: int) -> Tensor:
    """What is stored of each token, [pages, W] for so many heads together, of single-token rows as pages of their own [R * C, page]."""
    wide = -(-rows.table.shape[1] // page)
    at = torch.nn.functional.pad(rows.table, (0, wide * page - rows.table.shape[1])).clamp_min(0).long()
    if heads > 1:
        at = at // (heads * x.shape[1]) * x.shape[1] + at % x.shape[1]
    return x.reshape(-1)[at].view(-1, page)


def _paged(x: Tensor, rows: Rows, page: int) -> Tensor:
    """Tokens [S, D] of single-token rows, row after row, as pages of their own [R * C, W, D]."""
    most = -(-rows.table.shape[1] // page) * page
    out = x.new_zeros(rows.count, most, x.shape[1])
    out[torch.nn.functional.pad(rows.used, (0, most - rows.table.shape[1]))] = x
    return out.view(-1, page, x.shape[1])


@functools.lru_cache(maxsize=256)
def _counted(rows: int, wide: int) -> Tensor:
    """A table whose rows have so many pages each, one after another."""
    return torch.arange(rows * wide, dtype=torch.int32).view(rows, wide)


def pages_of(rows: Rows, page: int, heads: int = 1) -> tuple[Tensor, Rows]:
    """The pages of `page` tokens, shared by so many heads, that rows use, int64 [S], and the rows with these renamed to 0, 1 and so on."""
    ids, per = rows.table[rows.used].long(), page // rows.grain * heads
    if per == 1:
        return ids, rows.renamed(torch.arange(len(ids)))
    held, at = torch.unique(ids // per, return_inverse=True)
    return held, rows.renamed(at * per + ids % per)


def packed(k: Tensor, v: Tensor, rows: Rows, *fields: Tensor | None) -> tuple[Tensor, Tensor, Rows, list[Tensor | None]]:
    """Pages of fewer than LANES tokens, which the tables of rows name, put together to larger ones; so are fields [S, W] of them."""
    per, count = PAGE // rows.grain, rows.count
    wide = -(-rows.table.shape[1] // per)
    at = torch.nn.functional.pad(rows.table, (0, wide * per - rows.table.shape[1])).clamp_min(0).long().view(count * wide, per)
    local = Rows(torch.arange(count * wide, dtype=torch.int32).view(count, wide), rows.length, PAGE)
    return k[at].transpose(1, 2).flatten(2), v[at].flatten(1, 2), local, [None if x is None else x[at].flatten(1) for x in fields]
