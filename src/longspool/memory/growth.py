"""What a step adds to a layer's memory at most, before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..plan import PAGE
from ..roles import Admit, Evict
from ..values import Step
from . import index, near
from .settle import waits

if TYPE_CHECKING:
    from .layer import LayerMemory


def growth(memory: LayerMemory, step: Step) -> tuple[int, int, int, int]:
    """Bytes on the device that one request's step adds at most: when its tokens enter, while what is elsewhere is fetched, when old
    tokens settle; and what is freed after that."""
    raw, count, shape = memory.recent.pool, len(step.ids), memory.shape
    fresh = memory.recent.wants(count)
    enter = fresh * raw.page_bytes + memory.recent.growth(fresh) + _beside(memory, count)
    old, due = max(len(memory.pos) + count - memory.plan.needs.recent - (memory.plan.window or 0), 0), memory.due(step)
    if not due and (waits(memory, step, due) or old < max(raw.page, PAGE)):
        return enter, near.staged(memory), 0, 0
    moves = old // raw.page * shape.kv_heads * len(memory.span.layers)
    if memory.settled is None:
        return enter, 0, 0, moves * raw.page_bytes if memory.plan.window else 0
    if not memory.span.last:
        return enter, near.staged(memory), 0, 0
    admitted = min([old // raw.page * raw.page, *(a.admits(old) for a in memory.plan.chain(Admit))])
    new = _resettled(memory, old, due) if due else memory.settled.wants(admitted)
    size = memory.store.sizes["device"]
    return enter, near.staged(memory), new * size + memory.settled.growth(max(new, 0)), moves * raw.page_bytes


def _beside(memory: LayerMemory, count: int) -> int:
    """Bytes of the queries that are kept of new tokens, of the index, and of what all tokens have drawn."""
    side = min(count, memory.plan.queries) * memory.shape.heads * memory.shape.head_dim * 4 + index.growth(memory, count)
    if memory.drawn is None:
        return side
    return side + (memory.longest + len(memory.pos) + count) * memory.shape.kv_heads * 4 - memory.drawn.nbytes


def _resettled(memory: LayerMemory, old: int, due: list[Evict]) -> int:
    """Settled pages that an eviction adds at most; it gives the present ones back first."""
    assert memory.settled is not None
    longest = memory.longest + old
    kept = min([longest, *(e.bound(longest) for e in due)])
    return (kept // memory.store.page + 2) * memory.shape.kv_heads - int(memory.settled.filled.sum())
