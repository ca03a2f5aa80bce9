"""Settled pages that live on another tier than the device: what of them is near, and what that takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..plan import LayerPlan
from ..roles import Place, Store
from ..values import Rows, Step
from .cache import Cache
from .fetch import apart, pages_of
from .pool import Draft
from .pools import Pools, piece, read_fields, staged_bytes
from .zone import Zone

if TYPE_CHECKING:
    from .layer import LayerMemory


def zone(layer: int, plan: LayerPlan, pools: Pools) -> Zone:
    """An empty settled zone with the caches that its Place keeps."""
    heads, place = plan.rows(pools.shape.kv_heads), plan.one(Place)
    made = Zone(pools.settled(layer, plan), heads)
    if place is None or made.pool.tier == "device":
        return made
    small = piece(plan)
    near = [(pools.stage(plan, small), place.keeps())]
    if made.pool.tier == "disk":
        near.append((pools.shelf(plan), place.shelves()))
    made.near = [Cache(pool, most // small * heads, plan.page // small) for pool, most in near if most >= small]
    return made


def at_home(group: Sequence[LayerMemory], rows: Rows) -> tuple[Store, Rows]:
    """Where rows are read on the host: in their own pool if nothing of them is elsewhere, else as a draft."""
    memory = group[0]
    home, fields = memory.store, read_fields(memory.plan, memory.shape)
    if home.disk is None and all(name in home.away for name in fields):
        return home, rows
    grain = max(rows.grain, piece(memory.plan))
    wanted, local = pages_of(rows, grain, memory.sharers)
    draft = Draft(grain, {name: x.cpu() for name, x in home.get(wanted, grain, tuple(fields)).items()}, home.books, home.fits)
    return draft, local


def cache(zone: Zone, tier: str) -> Cache | None:
    """The zone's cache on a tier."""
    return next((c for c in zone.near if c.pool.tier == tier), None)


def decoded(memory: LayerMemory, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Settled pages, int64 [S] as the rows name them, decoded on the device, wherever they lie: k [S, D, W], v [S, W, D]."""
    store, heads = memory.store, memory.sharers
    pages, at = (ids, None) if heads == 1 else torch.unique(ids // heads, return_inverse=True)
    if store.tier == "device":
        read = memory.encode.read(store, pages, memory.span)
    else:
        read = memory.encode.read(brought(memory, pages), torch.arange(len(pages)), memory.span)
    k, v = apart(*read, heads)
    if at is None:
        return k, v
    own = (at * heads + ids % heads).to(k.device)
    return k[own], v[own]


def read(memory: LayerMemory, first: Sequence[int] | None) -> list[tuple[Tensor, Tensor]]:
    """Per KV head k, v [n, D] of the settled tokens, decoded; of row r from its token first[r] on."""
    heads, dim = memory.shape.kv_heads, memory.shape.head_dim
    if memory.settled is None or not memory.settled.length.any():
        none = torch.zeros(0, dim, device=memory.device)
        return [(none, none)] * heads
    out, rows, page = [], memory.rows(), memory.store.page
    for ids, n, start in zip(rows.table, rows.length.tolist(), first or [0] * heads, strict=True):
        skip = start // page
        k, v = decoded(memory, ids[skip : -(-n // page)].long())
        part = slice(start - skip * page, n - skip * page)
        out.append((k.transpose(1, 2).reshape(-1, dim)[part], v.reshape(-1, dim)[part]))
    return out


def brought(memory: LayerMemory, pages: Tensor) -> Draft:
    """What a codec reads of settled pages int64 [S], on the device."""
    got = memory.store.get(pages, names=tuple(read_fields(memory.plan, memory.shape)))
    return Draft(memory.store.page, {name: value.to(memory.device) for name, value in got.items()}, memory.store.books, memory.store.fits)


@contextmanager
def written(memory: LayerMemory, pages: Tensor) -> Iterator[tuple[Store, Tensor]]:
    """Where on the device a codec writes settled pages int64 [S]; those that live elsewhere are sent home when it has."""
    if memory.store.tier == "device":
        yield memory.store, pages
        return
    count, page = len(pages), memory.store.page
    fields = memory.encode.fields(memory.shape, page, len(memory.span.layers))
    data = {name: torch.empty(count, *f.shape, dtype=f.dtype, device=memory.device) for name, f in fields.items()}
    if "book" in memory.store:
        data["book"] = memory.store["book"][pages]
    draft = Draft(page, data, memory.store.books, memory.store.fits)
    yield draft, torch.arange(count)
    memory.store.put(pages, draft.data)


def staged(memory: LayerMemory) -> int:
    """Bytes that are brought to the device at once."""
    zone, place = memory.settled, memory.plan.one(Place)
    if zone is None or place is None or place.attends or zone.pool.tier == "device":
        return 0
    rows = memory.plan.rows(place.widest(memory.shape.kv_heads))
    return int(zone.filled.max()) * rows * staged_bytes(memory.plan, memory.shape)


def growth(memory: LayerMemory, step: Step) -> int:
    """Bytes on the device that a layer's cache, and what its codec learns, grow by at most in one request's step."""
    zone, book = memory.settled, memory.book
    learnt = 0 if book is None or book.length.any() else len(book.length) * book.pool.page_bytes
    if zone is None or step.phase == "prefill" or memory.span.index:
        return learnt
    own = cache(zone, "device")
    return learnt + (0 if own is None else max(min(own.most, int(zone.filled.sum()) * own.per) - len(own), 0) * own.pool.page_bytes)
