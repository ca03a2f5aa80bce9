"""What a codec learns of a memory's rows from the tokens that settle first: an entry for each KV head in a pool of such."""

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
    return None if pool is None else Zone(pool, pools.shape.kv_heads)


def enter(memory: LayerMemory, pages: np.ndarray, tiles: Tiles | None = None) -> None:
    """Let pages of the settled zone name the entry of their row, after the codec has learnt from the first tiles of all."""
    if memory.book is None or not len(pages):
        return
    row = _rows(memory, pages)
    if tiles is not None and not memory.book.length.any():
        inside = torch.arange(tiles.v.shape[1], device=memory.device) < tiles.fill[:, None]
        mine = [torch.from_numpy(np.flatnonzero(row == r)) for r in range(memory.shape.kv_heads)]
        k, v = ([x[own][inside[own]] for own in mine] for x in (tiles.k.transpose(1, 2), tiles.v))
        learnt = memory.encode.learn(k, v, memory.span)
        memory.book.grow(1)
        memory.book.pool.put(torch.from_numpy(memory.book.pages()).long(), learnt)
    entries = torch.from_numpy(memory.book.pages()[row])
    memory.store["book"][torch.from_numpy(pages).long()] = entries.to(memory.device)


def _rows(memory: LayerMemory, pages: np.ndarray) -> np.ndarray:
    """The row to which each page of the settled zone belongs."""
    assert memory.settled is not None
    own = memory.settled.pages()
    order = np.argsort(own)
    return np.repeat(np.arange(len(memory.settled.filled)), memory.settled.filled)[order[np.searchsorted(own[order], pages)]]
