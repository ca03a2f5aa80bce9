"""How many bytes a plan needs, before it runs."""

from __future__ import annotations

import functools

from ..memory.disk import CHECK
from ..memory.pool import size
from ..memory.pools import encoder, piece, settled_fields, staged_bytes, staged_fields
from ..memory.raw import Raw
from ..method import Needs
from ..plan import PAGE, Item, LayerPlan, Plan, resolve
from ..roles import Admit, Decode, Evict, Place, Select
from ..values import Shape


def page_bytes(plan: LayerPlan, shape: Shape) -> tuple[int, int]:
    """Bytes on the device of a raw page and of a settled one, all KV heads together; of a page that several layers share, the layer's
    part."""
    raw = size(Raw(plan.dtype).fields(shape, plan.page, 1))
    fields = settled_fields(plan, shape) if plan.settles else {}
    settled = size({name: f for name, f in fields.items() if f.resident or not _away(plan)}) if plan.settles else raw
    return raw * shape.kv_heads, -(-settled * (plan.rows(shape.kv_heads) if plan.settles else shape.kv_heads) // _layers(plan))


@functools.lru_cache(maxsize=256)
def need(plan: Plan, prompt: int, chunk: int, answer: int = 0) -> int:
    """Bytes on the device at the peak of a request: while its prompt is read in chunks, or when its answer ends."""
    chunk = min(chunk, plan.chunk or chunk)
    total = sum(max(_reading(layer, plan.shape, prompt, chunk), _holding(layer, plan.shape, prompt, answer)) for layer in plan.layers)
    total += sum(_side(layer, plan.shape, prompt + answer) for layer in plan.layers)
    total += 4 * (prompt + answer) if plan.text else 0
    total += max(_staged(layer, plan.shape, prompt + answer) for layer in plan.layers)
    total += sum(_near(layer, plan.shape, prompt + answer) + _learnt(layer, plan.shape) for layer in plan.layers)
    total += max(_evicting(layer, plan.shape, prompt) for layer in plan.layers)
    for method in plan.methods:
        if isinstance(method, Decode) and (inner := method.beside()):
            draft = resolve(tuple(map(Item, inner)), plan.shape, plan.dtype, Needs(recent=method.needs().recent))
            total += sum(_holding(layer, plan.shape, prompt, answer) + _side(layer, plan.shape, prompt + answer) for layer in draft.layers)
            total += sum(_learnt(layer, plan.shape) for layer in draft.layers)
            # It is made layer by layer, each first raw and whole until the last of those that are stored or settle together is there.
            whole = [page_bytes(layer, plan.shape)[0] * _layers(layer) * _pages(prompt, layer) for layer in draft.layers]
            total += 4 * (prompt + answer) if draft.text else 0
            total += sum(whole) if any(layer.after is not None for layer in draft.layers) else max(whole)
    return total


@functools.lru_cache(maxsize=256)
def token_bound(plan: Plan) -> int:
    """More than one new token can add on the device beside what settles: a fresh page of each kind per row, tables, queries."""
    pages = sum(4 * sum(page_bytes(layer, plan.shape)) for layer in plan.layers) + (4 * plan.context if plan.text else 0)
    return pages + sum(2 * _side(layer, plan.shape, plan.context) for layer in plan.layers)


def _reading(layer: LayerPlan, shape: Shape, prompt: int, chunk: int) -> int:
    raw, settled = page_bytes(layer, shape)
    fresh = layer.needs.recent + _slack(layer) + chunk
    if layer.window is not None:
        return raw * _pages(min(prompt, layer.window + fresh), layer)
    if not layer.settles:
        return raw * _pages(prompt, layer)
    evicts = layer.chain(Evict)
    if layer.prompts or (evicts and min(e.peak(prompt, chunk) for e in evicts) >= prompt):
        return raw * _pages(prompt, layer)
    return raw * _pages(min(prompt, fresh), layer) + _old(layer, settled, _kept(layer, max(prompt - layer.needs.recent, 0)))


def _evicting(layer: LayerPlan, shape: Shape, prompt: int) -> int:
    """What an eviction writes before it lets go of what was raw; the layers do that one after another."""
    if not (layer.prompts or layer.chain(Evict)):
        return 0
    together = _layers(layer) if layer.prompts else 1
    return _old(layer, page_bytes(layer, shape)[1], _kept(layer, prompt)) * together


def _holding(layer: LayerPlan, shape: Shape, prompt: int, answer: int) -> int:
    raw, settled = page_bytes(layer, shape)
    recent = layer.needs.recent + _slack(layer)
    if layer.window is not None:
        return raw * _pages(min(prompt + answer, layer.window + recent), layer)
    if not layer.settles:
        return raw * _pages(prompt + answer, layer)
    later = min(answer, min((a.admits(answer) for a in layer.chain(Admit)), default=answer))
    old = _kept(layer, max(prompt - layer.needs.recent, 0)) + later
    old = min([old, *(e.bound(prompt + answer) + period for e in layer.chain(Evict) if (period := e.period()) is not None)])
    if layer.prompts:
        return raw * (_pages(min(prompt, recent), layer) + _pages(answer, layer)) + _old(layer, settled, old - later)
    return raw * _pages(min(prompt + answer, recent), layer) + _old(layer, settled, old)


def _kept(layer: LayerPlan, tokens: int) -> int:
    """How many of so many old tokens of the prompt stay at most."""
    return min([tokens, *(a.admits(tokens) for a in layer.chain(Admit)), *(e.bound(tokens) for e in layer.chain(Evict))])


def _old(layer: LayerPlan, settled: int, tokens: int) -> int:
    """Bytes of settled tokens on the device; heads that differ in length may each begin one more page."""
    return settled * (_pages(tokens, layer) + layer.ragged)


def _staged(layer: LayerPlan, shape: Shape, tokens: int) -> int:
    """Bytes that are brought to the device, or cut into pieces on it, at once."""
    place = layer.one(Place)
    if not layer.settles or (not _away(layer) and piece(layer) == layer.page):
        return 0
    rows = layer.rows(place.widest(shape.kv_heads) if place else shape.kv_heads)
    return staged_bytes(layer, shape) * rows * _pages(tokens, layer)


def _near(layer: LayerPlan, shape: Shape, tokens: int) -> int:
    """Bytes of the copies that stay on the device; layers that are stored together share them."""
    place = layer.one(Place)
    if place is None or not _away(layer):
        return 0
    small = piece(layer)
    copies = min(place.keeps() // small, _pages(tokens, layer) * (layer.page // small)) * layer.rows(shape.kv_heads)
    return -(-copies * size(staged_fields(layer, shape, small)) // _layers(layer))


def _learnt(layer: LayerPlan, shape: Shape) -> int:
    """Bytes of what the layer's codec learns, and of the table that says where."""
    fields = encoder(layer).learns(shape, _layers(layer)) if layer.settles else {}
    return -(-(size(fields) + 20) * layer.rows(shape.kv_heads) // _layers(layer)) if fields else 0


def _away(layer: LayerPlan) -> bool:
    """Whether settled pages live elsewhere."""
    place = layer.one(Place)
    return place is not None and place.home != "device"


def disk_need(plan: Plan, tokens: int) -> int:
    """Bytes on the disk of a request at its end, at most."""
    total = 0
    for layer in plan.layers:
        place = layer.one(Place)
        if place is not None and place.home == "disk":
            per = layer.page // piece(layer)
            away = size(staged_fields(layer, plan.shape, piece(layer), away=True)) + CHECK
            total += -(-away * per * layer.rows(plan.shape.kv_heads) * _pages(tokens, layer) // _layers(layer))
    return total


def _side(layer: LayerPlan, shape: Shape, tokens: int) -> int:
    """Bytes of kept queries, of what tokens have drawn, of what a Select knows, and of the page tables, which grow by half."""
    select = layer.one(Select)
    known = select.index_bytes(shape, tokens) if select else 0
    drawn = 4 * shape.kv_heads * tokens if layer.needs.drawn else 0
    return _queries(layer, shape) + drawn + known + 2 * shape.kv_heads * (8 + 6 * (_pages(tokens, layer) + 4))


def _queries(layer: LayerPlan, shape: Shape) -> int:
    return 2 * layer.queries * shape.heads * shape.head_dim * 4


def _slack(layer: LayerPlan) -> int:
    """Old tokens that wait in the recent zone until it is worth to settle them."""
    return max(layer.page, PAGE)


def _layers(layer: LayerPlan) -> int:
    """Layers that share a settled page."""
    return max(len(layer.joint), 1)


def _pages(tokens: int, layer: LayerPlan) -> int:
    return -(-tokens // layer.page)
