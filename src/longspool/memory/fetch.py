"""Settled pages made ready for attention: brought to the device where they live elsewhere, and decoded where no kernel reads the codes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import take_tokens
from ..roles import Place
from ..values import Rows, Step
from .pool import Pool
from .view import LayerView

if TYPE_CHECKING:
    from .layer import LayerMemory


def head_parts(memory: LayerMemory, step: Step, alike: bool = True) -> list[tuple[int, int]]:
    """Ranges of KV heads that one request attends apart: one by one where they hold different tokens, else as its Place says."""
    heads, place = memory.shape.kv_heads, memory.plan.one(Place)
    if not alike:
        return [(h, h + 1) for h in range(heads)]
    if place is None or memory.store.tier == "device":
        return [(0, heads)]
    return list(place.parts(heads, LayerView(memory.layer, memory.shape, step, memory.rows(), (memory,))))


@contextmanager
def fetched(group: Sequence[LayerMemory], rows: Rows, lo: int, hi: int) -> Iterator[tuple[Pool, Rows]]:
    """The rows of KV heads lo to hi of all requests, and the device pool where they are while the context lasts."""
    memory, heads, per = group[0], group[0].shape.kv_heads, rows.count // (len(group) * group[0].shape.kv_heads)
    if (lo, hi) != (0, heads):
        mine = [r for b in range(len(group)) for r in range((b * heads + lo) * per, (b * heads + hi) * per)]
        rows = Rows(rows.table[mine], rows.length[mine], rows.grain)
    place, home = memory.plan.one(Place), memory.store
    if place is None or home.tier == "device":
        yield home, rows
        return
    stage, (held, local) = memory.pools.stage(home), _pages(rows, home.page)
    pages = stage.take(len(held))
    try:
        target = torch.from_numpy(pages).long()
        for name in home.fields:
            stage[name][target] = home[name][held].to(stage.device, non_blocking=True)
        share = rows.count // len(group)
        for b, one in enumerate(group):
            own = held if len(group) == 1 else _pages(rows.part(b * share, (b + 1) * share), home.page)[0]
            one.count(place, bytes_fetched=len(own) * stage.page_bytes)
        per = home.page // rows.grain  # pages are renamed; a token keeps its place in its page
        at = local[local >= 0].long()
        yield stage, Rows(_renumbered(rows, local >= 0, (target[at // per] * per + at % per).to(torch.int32)), rows.length, rows.grain)
    finally:
        stage.give(pages)


def materialise(memory: LayerMemory, store: Pool, rows: Rows) -> tuple[Tensor, Tensor, Rows, Tensor]:
    """Rows decoded into a pool of their own: k [S, D, W], v [S, W, D], the rows over it, and the S source pages."""
    where, local = _pages(rows, store.page)
    k, v = memory.encode.read(store, where, memory.span)
    return k, v, Rows(local, rows.length, rows.grain), where


def picked(memory: LayerMemory, store: Pool, rows: Rows) -> tuple[Tensor, Tensor, Rows, Tensor | None]:
    """Single tokens as pages of their own: k [S, D, W], v [S, W, D], rows over these and their log-weights [S, W]. Nothing else is read
    where floats are stored or the codec takes single tokens; else the pages that hold them."""
    page, wide = store.page, -(-rows.table.shape[1] // store.page)
    if (plain := memory.encode.plain(store)) is not None:
        k, v = take_tokens(*plain, rows.table, rows.length)
    elif (tokens := memory.encode.take(store, rows.table[_used(rows)].long(), memory.span)) is not None:
        k, v = (_paged(x, rows, page) for x in tokens)
        k = k.transpose(1, 2).contiguous()
    else:
        k, v, local, _ = materialise(memory, store, rows)
        k, v = take_tokens(k, v, local.table, rows.length)
    weight = None
    if memory.plan.weighted:
        at = torch.nn.functional.pad(rows.table, (0, wide * page - rows.table.shape[1])).clamp_min(0).long()
        weight = store["weight"].view(-1)[at].view(-1, page)
    return k, v, Rows(_counted(rows.count, wide), rows.length, page), weight


def _paged(x: Tensor, rows: Rows, page: int) -> Tensor:
    """Tokens [S, D] of single-token rows, row after row, as pages of their own [R * C, W, D]."""
    most = -(-rows.table.shape[1] // page) * page
    out = x.new_zeros(rows.count, most, x.shape[1])
    out[torch.nn.functional.pad(_used(rows), (0, most - rows.table.shape[1]))] = x
    return out.view(-1, page, x.shape[1])


@functools.lru_cache(maxsize=256)
def _counted(rows: int, wide: int) -> Tensor:
    """A table whose rows have so many pages each, one after another."""
    return torch.arange(rows * wide, dtype=torch.int32).view(rows, wide)


def _pages(rows: Rows, page: int) -> tuple[Tensor, Tensor]:
    """The pages of `page` tokens that rows use, int64 [S], and the rows' table with these renamed to 0, 1 and so on."""
    used = _used(rows)
    ids = rows.table[used].long()
    if rows.grain == page:
        return ids, _renumbered(rows, used, torch.arange(len(ids), dtype=torch.int32))
    held, at = torch.unique(ids // page, return_inverse=True)
    return held, _renumbered(rows, used, (at * page + ids % page).to(torch.int32))


def _used(rows: Rows) -> Tensor:
    """Which entries of the tables are pages in use, bool [R, P]."""
    return torch.arange(rows.table.shape[1]) < rows.filled[:, None]


def _renumbered(rows: Rows, used: Tensor, pages: Tensor) -> Tensor:
    """The table with its pages in use renamed, in order."""
    table = torch.full(rows.table.shape, -1, dtype=torch.int32)
    table[used] = pages
    return table
