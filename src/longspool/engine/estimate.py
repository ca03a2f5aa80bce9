"""How many bytes a plan needs, before it runs."""

from __future__ import annotations

from math import prod

from ..memory.pool import item
from ..memory.pools import settled_fields
from ..memory.raw import Raw
from ..plan import LayerPlan, Plan
from ..roles import Evict
from ..values import Shape


def page_bytes(plan: LayerPlan, shape: Shape) -> tuple[int, int]:
    """Bytes of a raw page and of a settled one, all KV heads together."""
    raw = sum(prod(f.shape) * item(f.dtype) for f in Raw(plan.dtype).fields(shape, plan.page).values())
    settled = sum(prod(f.shape) * item(f.dtype) for f in settled_fields(plan, shape).values()) if plan.settles else raw
    return raw * shape.kv_heads, settled * shape.kv_heads


def need(plan: Plan, tokens: int, chunk: int) -> int:
    """Bytes at the peak of a request of so many tokens, prompt and answer."""
    total = 0
    for layer in plan.layers:
        raw, settled = page_bytes(layer, plan.shape)
        recent = layer.needs.recent + layer.page
        if layer.window is not None:
            total += raw * -(-min(tokens, layer.window + recent + chunk) // layer.page)
        elif not layer.settles:
            total += raw * -(-tokens // layer.page)
        else:
            kept = min([e.peak(tokens, chunk) for e in layer.chain(Evict)], default=0)
            fresh = min(tokens, max(recent + chunk, kept))
            total += raw * -(-fresh // layer.page) + settled * -(-(0 if kept else max(tokens - fresh, 0)) // layer.page)
    return total


def growth(plan: Plan, tokens: int) -> int:
    """Bytes that a step of so many new tokens can add."""
    return sum(page_bytes(layer, plan.shape)[0] * (-(-tokens // layer.page) + 1) for layer in plan.layers)
