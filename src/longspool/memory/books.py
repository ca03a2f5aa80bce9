"""What a codec learns of a memory's rows from the tokens that settle first: an entry for each row in a pool of such."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..plan import LayerPlan
from .pools import Pools
from .tiles import Tiles
from .zone import Zone

if TYPE_CHECKING:
    from .layer import LayerMemory


def book(plan: LayerPlan, pools: Pools) -> Zone | None:
    """An empty book of a layer whose codec learns."""
    pool = pools.books(plan) if plan.settles else None
    return None if pool is None else Zone(pool, plan.rows(pools.shape.kv_heads))


def enter(memory: LayerMemory, pages: np.ndarray, tiles: Tiles | None = None) -> None:
    """Let pages of the settled zone name the entry of their row and their place in it, after the codec has learnt from the first tiles of
    all."""
    if memory.book is None or not len(pages):
        return
    row, nth = _places(memory, pages)
    if tiles is not None and not memory.book.length.any():
        inside = torch.arange(tiles.v.shape[1], device=memory.device) < tiles.fill[:, None]
        mine = [torch.from_numpy(np.flatnonzero(row == r)) for r in range(len(memory.book.length))]
        k, v = ([x[own][inside[own]] for own in mine] for x in (tiles.k.transpose(1, 2), tiles.v))
        learnt = memory.encode.learn(k, v, memory.span)
        memory.book.grow(1)
        pool = memory.book.pool
        pool.put(torch.from_numpy(memory.book.pages()).long(), {name: x.to(pool.fields[name].dtype) for name, x in learnt.items()})
    entries = torch.from_numpy(np.stack([memory.book.pages()[row], nth], 1).astype(np.int32))
    memory.store["book"][torch.from_numpy(pages).long()] = entries.to(memory.device)


def _places(memory: LayerMemory, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row to which each page of the settled zone belongs, and the how-many-th of it that it is."""
    assert memory.settled is not None
    own, filled = memory.settled.pages(), memory.settled.filled
    order = np.argsort(own)
    at = order[np.searchsorted(own[order], pages)]
    row = np.repeat(np.arange(len(filled)), filled)[at]
    return row, at - (np.cumsum(filled) - filled)[row]
