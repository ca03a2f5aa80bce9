"""The attention core that every paged kernel shares: a stack of query rows absorbs a range of a row's keys, tile by tile.

A stack is some tokens of one request times some query heads of one KV head, token by token. Up to DIRECT rows multiply the pages as they
are stored; a taller stack first unpacks a tile of keys and values to floats, laid out in panels of 16 columns, and uses it for
all its rows. Logits are kept in base 2. Addresses stand in for arrays; 0 means none.
"""

from __future__ import annotations

from math import inf, log
from typing import NamedTuple

import numpy as np

from .simd import (
    HALF,
    F,
    add,
    exp2,
    flag,
    fma,
    get64,
    highest,
    invoke,
    lane,
    larger,
    load,
    mul,
    one,
    prefetch,
    put,
    put64,
    splat,
    store,
    sub,
    tanh,
    total,
    whole,
)
from .threads import helper

TILE = 256  # keys at a time, a multiple of every page
STACK = 96  # query rows at a time
GROUP = 12  # query rows whose logits stay in the first cache
DIRECT = 12  # query rows, at most GROUP, for which unpacking would cost more than it saves
AHEAD = 64  # keys to fetch before they are needed
LN2, LOG2E = log(2), 1 / log(2)


class Queries(NamedTuple):
    """q and out float [N, H, D], lse float [N, H]. Logits are gain * q.k, or cap * tanh(gain * q.k) where cap > 0."""

    q: int
    out: int
    lse: int
    heads: int
    dim: int
    gain: float
    cap: float


class Keys(NamedTuple):
    """The pool and its rows. `times` and `spread` are the product and the unpacking of the stored kind, `plain` that of floats.

    `split` values share a stored item of `item` bytes. The four fp16 fields hold the scales and zeros of quantized pages.
    """

    k: int
    v: int
    table: int
    length: int
    columns: int  # of the table
    page: int
    item: int
    split: int
    times: int
    spread: int
    plain: int
    kscale: int
    kzero: int
    vscale: int
    vzero: int


class Sight(NamedTuple):
    """Which keys a token sees: lo, hi int32 [N], tree bool [N, branches]; weight float [Pages, page]."""

    lo: int
    hi: int
    tree: int
    branches: int
    weight: int


class Stack(NamedTuple):
    """Query rows: tokens from `first` on, heads `head` to head + wide of each. The step's own keys begin at `own`."""

    row: int
    first: int
    rows: int
    head: int
    wide: int
    own: int


class Room(NamedTuple):
    """A worker's scratch, by address: floats, and int64 for `seen`."""

    q: int  # [rows, D]
    o: int  # [rows, wide]
    s: int  # [GROUP, TILE]
    k: int  # [TILE/16, D, 16]
    v: int  # [wide/16, TILE, 16]
    scaled: int  # [DIRECT, D], queries times the keys' scales
    weight: int  # [TILE]
    top: int  # [rows], the largest logit
    mass: int  # [rows], the sum of weights
    zero: int  # [rows], what the values' zero points add to every dim
    fade: int  # [rows], the factor of what was absorbed before
    one: int  # [rows], ones
    seen: int  # [rows, 2], the keys that a row sees
    wide: int  # D up to a multiple of 16


def room_bytes(dim: int) -> int:
    """Scratch of one worker."""
    wide = -(-dim // 16) * 16
    return 4 * (STACK * (dim + wide) + GROUP * TILE + TILE * (dim + wide) + DIRECT * dim + TILE + 9 * STACK) + 128


@helper
def room_at(at, dim):  # type: ignore[no-untyped-def]
    wide = (dim + 15) // 16 * 16
    k = (at + 63) // 64 * 64
    v = k + 4 * TILE * dim
    s = v + 4 * TILE * wide
    q = s + 4 * GROUP * TILE
    o = q + 4 * STACK * dim
    scaled = o + 4 * STACK * wide
    weight = scaled + 4 * DIRECT * dim
    top = weight + 4 * TILE
    n = 4 * STACK
    return Room(q, o, s, k, v, scaled, weight, top, top + n, top + 2 * n, top + 3 * n, top + 4 * n, top + 5 * n, wide)


@helper
def open_stack(x, y, z, s, room):  # type: ignore[no-untyped-def]
    """Copy the queries, scaled, and note which keys each of them sees. Returns the range that any of them sees."""
    length = whole(y.length + 4 * s.row)
    gain, nothing = splat(np.float32(x.gain)), splat(np.float32(0))
    first, last = length, 0
    for i in range(s.rows):
        token, head = s.first + i // s.wide, s.head + i % s.wide
        source = x.q + 4 * x.dim * (token * x.heads + head)
        for d in range(0, x.dim, 8):
            store(room.q + 4 * (i * x.dim + d), mul(load(source + 4 * d, F), gain), F)
        for d in range(0, room.wide, 8):
            store(room.o + 4 * (i * room.wide + d), nothing, F)
        put(room.top + 4 * i, np.float32(-inf), F)
        put(room.mass + 4 * i, np.float32(0), F)
        put(room.zero + 4 * i, np.float32(0), F)
        put(room.one + 4 * i, np.float32(1), F)
        a = max(whole(z.lo + 4 * token), 0) if z.lo else 0
        b = min(whole(z.hi + 4 * token), length) if z.hi else length
        put64(room.seen + 16 * i, a)
        put64(room.seen + 16 * i + 8, b)
        if a < b:
            first, last = min(first, a), max(last, b)
    return first, last


@helper
def absorb(x, y, z, s, a, b, room):  # type: ignore[no-untyped-def]
    """Take the row's keys a to b into the stack."""
    grain = y.page if y.kscale else 16
    direct = s.rows <= DIRECT
    for t in range(a // grain * grain, b if a < b else 0, TILE):
        end = min(t + TILE, b)
        if z.weight:
            weigh(y, z, s.row, t, end, room)
        if not direct:
            unpack_tile(x, y, s.row, t, end, room)
        for i in range(0, s.rows, GROUP):
            n = min(GROUP, s.rows - i)
            first, last = extent(i, n, max(a, t), end, room)
            if first < last:
                if direct:
                    score_pages(x, y, s.row, n, t, first // grain * grain, last, b, room)
                else:
                    score_panels(x, y, i, n, t, first // 16 * 16, last, room)
                soften(x, z, s, i, n, t, first // grain * grain, first, last, grain, room)
                if direct:
                    gather_pages(x, y, s.row, n, t, first, last, b, room)
                else:
                    gather_panels(y, i, n, t, first, last, room)


@helper
def extent(i, n, a, b, room):  # type: ignore[no-untyped-def]
    """The range of keys in a to b that any of the rows i to i + n sees."""
    first, last = b, a
    for r in range(i, i + n):
        u, v = max(get64(room.seen + 16 * r), a), min(get64(room.seen + 16 * r + 8), b)
        if u < v:
            first, last = min(first, u), max(last, v)
    return first, last


@helper
def page_at(y, row, j):  # type: ignore[no-untyped-def]
    return whole(y.table + 4 * (row * y.columns + j // y.page))


@helper
def ahead(y, row, j, end):  # type: ignore[no-untyped-def]
    """How many pages of the pool lie between key j's and the one that is read some time later, which is to be fetched already."""
    later = j + max(y.page, AHEAD)
    return page_at(y, row, later) - page_at(y, row, j) if later < end else 0


@helper
def weigh(y, z, row, t, end, room):  # type: ignore[no-untyped-def]
    """The log-weights of a tile, in base 2."""
    for j in range(t, end):
        w = one(z.weight + 4 * (page_at(y, row, j) * y.page + j % y.page), F)
        put(room.weight + 4 * (j - t), np.float32(w * LOG2E), F)


@helper
def unpack_tile(x, y, row, t, end, room):  # type: ignore[no-untyped-def]
    j = t
    while j < end:
        page, off = page_at(y, row, j), j % y.page
        n = min(y.page - off, t + TILE - j)
        kscale = y.kscale + 2 * page * x.dim if y.kscale else 0
        kzero = y.kzero + 2 * page * x.dim if y.kzero else 0
        krow, vrow = y.page // y.split * y.item, x.dim // y.split * y.item
        source = y.k + page * x.dim * krow + off * y.item
        to = room.k + 4 * (j - t) * x.dim
        invoke(y.spread, (source, krow, x.dim, n, to, 64 * x.dim, kscale, kzero))
        if y.v == 0:
            j += n
            continue
        at = page * y.page + off
        vscale = y.vscale + 2 * at if y.vscale else 0
        vzero = y.vzero + 2 * at if y.vzero else 0
        invoke(y.spread, (y.v + at * vrow, vrow, min(n, end - j), x.dim, room.v + 64 * (j - t), 64 * TILE, vscale, vzero))
        j += n


@helper
def score_panels(x, y, i, n, t, first, last, room):  # type: ignore[no-untyped-def]
    a, panels, row = first - t, (last - first + 15) // 16, 4 * x.dim
    invoke(y.plain, (n, room.q + row * i, row, room.k + row * a, 64 * x.dim, x.dim, room.s + 4 * a, 4 * TILE, panels, 0))


@helper
def gather_panels(y, i, n, t, first, last, room):  # type: ignore[no-untyped-def]
    a, row, fade = first - t, 4 * room.wide, room.fade + 4 * i
    panels = room.wide // 16
    invoke(y.plain, (n, room.s + 4 * a, 4 * TILE, room.v + 64 * a, 64 * TILE, last - first, room.o + row * i, row, panels, fade))


@helper
def score_pages(x, y, row, n, t, first, last, end, room):  # type: ignore[no-untyped-def]
    krow = y.page // y.split * y.item
    j = first
    while j < last:
        page, off, hop = page_at(y, row, j), j % y.page, ahead(y, row, j, end)
        width = y.page if y.kscale else min(y.page - off, (last - j + 15) // 16 * 16)
        q = room.q
        if y.kscale:
            q = room.scaled
            scale_queries(x.dim, n, y.kscale + 2 * page * x.dim, room)
            fetch_scales(y.kscale, y.kzero, (page + hop) * x.dim, x.dim)
        source = y.k + page * x.dim * krow + off * y.item
        to = room.s + 4 * (j - t)
        invoke(y.times, (n, q, 4 * x.dim, source, krow, x.dim, to, 4 * TILE, width, 0, hop * x.dim * krow))
        if y.kzero:
            shift_logits(x.dim, n, y.kzero + 2 * page * x.dim, to, width, room)
        j += width


@helper
def fetch_scales(scale, zero, at, count):  # type: ignore[no-untyped-def]
    for line in range(0, 2 * count, 64):
        prefetch(scale + 2 * at + line)
        if zero:
            prefetch(zero + 2 * at + line)


@helper
def scale_queries(dim, n, scale, room):  # type: ignore[no-untyped-def]
    for d in range(0, dim, 8):
        gain = load(scale + 2 * d, HALF)
        for r in range(n):
            at = 4 * (r * dim + d)
            store(room.scaled + at, mul(load(room.q + at, F), gain), F)


@helper
def shift_logits(dim, n, zero, to, width, room):  # type: ignore[no-untyped-def]
    """Every key of the page has the same zero points, so q.zero is one number for the page."""
    for r in range(n):
        sums = splat(np.float32(0))
        for d in range(0, dim, 8):
            sums = fma(load(room.q + 4 * (r * dim + d), F), load(zero + 2 * d, HALF), sums)
        more = splat(total(sums))
        for c in range(0, width, 8):
            at = to + 4 * (r * TILE + c)
            store(at, add(load(at, F), more), F)


@helper
def gather_pages(x, y, row, n, t, first, last, end, room):  # type: ignore[no-untyped-def]
    vrow = x.dim // y.split * y.item
    fade = room.fade
    j = first
    while j < last:
        at, hop = page_at(y, row, j) * y.page + j % y.page, ahead(y, row, j, end) * y.page
        depth = min(y.page - j % y.page, last - j)
        p = room.s + 4 * (j - t)
        if y.vscale:
            scale_weights(n, p, depth, y.vscale + 2 * at, y.vzero + 2 * at if y.vzero else 0, fade, room)
            fetch_scales(y.vscale, y.vzero, at + hop, y.page)
        invoke(y.times, (n, p, 4 * TILE, y.v + at * vrow, vrow, depth, room.o, 4 * room.wide, x.dim, fade, hop * vrow))
        fade = room.one
        j += depth


@helper
def scale_weights(n, p, depth, scale, zero, fade, room):  # type: ignore[no-untyped-def]
    """Fold the values' scales into the weights, after their zero points have been summed up."""
    whole_lanes = depth // 8 * 8
    for r in range(n):
        at = p + 4 * r * TILE
        rest = np.float32(0)
        for c in range(whole_lanes, depth):
            if zero:
                rest += one(at + 4 * c, F) * one(zero + 2 * c, HALF)
            put(at + 4 * c, one(at + 4 * c, F) * one(scale + 2 * c, HALF), F)
        sums = splat(np.float32(0))
        for c in range(0, whole_lanes, 8):
            w = load(at + 4 * c, F)
            if zero:
                sums = fma(w, load(zero + 2 * c, HALF), sums)
            store(at + 4 * c, mul(w, load(scale + 2 * c, HALF)), F)
        if zero:
            old = one(room.zero + 4 * r, F) * one(fade + 4 * r, F)
            put(room.zero + 4 * r, old + total(sums) + rest, F)


@helper
def soften(x, z, s, i, n, t, left, first, last, grain, room):  # type: ignore[no-untyped-def]
    """Logits to weights exp2(logit - top), row by row; `fade` is what the older sums must be multiplied with."""
    c0, c1 = left - t, (last - t + 7) // 8 * 8
    for r in range(i, i + n):
        at = room.s + 4 * (r - i) * TILE
        bend(x, z, at, c0, c1, room)
        u, v = max(get64(room.seen + 16 * r), first), min(get64(room.seen + 16 * r + 8), last)
        hide(at, c0, max(u - t, c0), min(v - t, c1), c1)
        if z.tree:
            cut(z, s, s.first + r // s.wide, max(u, s.own), v, at - 4 * t)
        best = splat(np.float32(-inf))
        for c in range(c0, c1, 8):
            best = larger(load(at + 4 * c, F), best)
        old = one(room.top + 4 * r, F)
        new = max(highest(best), old)
        base = new if new > -inf else np.float32(0)
        sums, less = splat(np.float32(0)), splat(base)
        for c in range(c0, c1, 8):
            w = exp2(sub(load(at + 4 * c, F), less))
            sums = add(sums, w)
            store(at + 4 * c, w, F)
        fade = lane(exp2(splat(np.float32(old - base))))
        put(room.top + 4 * r, new, F)
        put(room.fade + 4 * r, fade, F)
        put(room.mass + 4 * r, one(room.mass + 4 * r, F) * fade + total(sums), F)


@helper
def bend(x, z, at, c0, c1, room):  # type: ignore[no-untyped-def]
    if x.cap > 0:
        cap = splat(np.float32(x.cap))
        for c in range(c0, c1, 8):
            store(at + 4 * c, mul(tanh(load(at + 4 * c, F)), cap), F)
    if z.weight:
        for c in range(c0, c1, 8):
            store(at + 4 * c, add(load(at + 4 * c, F), load(room.weight + 4 * c, F)), F)


@helper
def hide(at, c0, u, v, c1):  # type: ignore[no-untyped-def]
    """-inf in the columns c0 to c1 outside of u to v."""
    for c in range(c0, min(u, c1)):
        put(at + 4 * c, np.float32(-inf), F)
    for c in range(max(u, v, c0), c1):
        put(at + 4 * c, np.float32(-inf), F)


@helper
def cut(z, s, token, a, b, at):  # type: ignore[no-untyped-def]
    """-inf for the step's own tokens that are no ancestors of this one."""
    for j in range(a, b):
        if not flag(z.tree + token * z.branches + j - s.own):
            put(at + 4 * j, np.float32(-inf), F)


@helper
def close_stack(x, s, room):  # type: ignore[no-untyped-def]
    for i in range(s.rows):
        at = (s.first + i // s.wide) * x.heads + s.head + i % s.wide
        settle(x, room.o + 4 * i * room.wide, room.top + 4 * i, room.mass + 4 * i, room.zero + 4 * i, at)


@helper
def settle(x, o, top, mass, zero, at):  # type: ignore[no-untyped-def]
    """Write one query row's result from its sums."""
    m = one(mass, F)
    seen = m > 0
    gain, more = splat(np.float32(1 / m if seen else 0)), splat(one(zero, F))
    for d in range(0, x.dim, 8):
        store(x.out + 4 * (at * x.dim + d), mul(add(load(o + 4 * d, F), more), gain), F)
    put(x.lse + 4 * at, np.float32((one(top, F) + np.log2(m)) * LN2 if seen else -inf), F)
