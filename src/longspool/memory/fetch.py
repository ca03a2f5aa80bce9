"""Settled pages made ready for attention: brought to the device where they live elsewhere, and decoded where no kernel reads the codes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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
    stage, used = memory.pools.stage(home), _used(rows)
    pages = stage.take(int(used.sum()))
    try:
        target = torch.from_numpy(pages).long()
        for name in home.fields:
            stage[name][target] = home[name][rows.table[used].long()].to(stage.device, non_blocking=True)
        for own, one in zip(rows.filled.view(len(group), -1), group, strict=True):
            one.count(place, bytes_fetched=int(own.sum()) * stage.page_bytes)
        yield stage, Rows(_renumbered(rows, used, target.to(torch.int32)), rows.length, rows.grain)
    finally:
        stage.give(pages)


def materialise(memory: LayerMemory, store: Pool, rows: Rows) -> tuple[Tensor, Tensor, Rows, Tensor]:
    """Rows decoded into a pool of their own: k [S, D, W], v [S, W, D], the rows over it, and the S source pages."""
    used = _used(rows)
    where = rows.table[used].long()
    k, v = memory.encode.read(store, where, memory.span)
    return k, v, Rows(_renumbered(rows, used, torch.arange(len(where), dtype=torch.int32)), rows.length, rows.grain), where


def _used(rows: Rows) -> Tensor:
    """Which entries of the tables are pages in use, bool [R, P]."""
    return torch.arange(rows.table.shape[1]) < rows.filled[:, None]


def _renumbered(rows: Rows, used: Tensor, pages: Tensor) -> Tensor:
    """The table with its pages in use renamed, in order."""
    table = torch.full(rows.table.shape, -1, dtype=torch.int32)
    table[used] = pages
    return table
