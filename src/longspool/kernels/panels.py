"""The two inner loops, made for each stored kind: a register-blocked product with pages as they are stored, and their unpacking.

`product(dtype)` multiplies float rows with a stored matrix, `spread(dtype)` turns it into floats. Both are C functions, called by
address, so that a kernel is compiled once for all kinds and they are not compiled again within it.

Two codes a byte leave few cycles for unpacking next to the multiply-adds, so nibbles are not taken apart first: with
a byte w = 16 * high + low, sum x * high = (sum x * w - sum x * low) / 16, and its rounding is as small as that of a plain sum.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from .simd import (
    BYTES,
    HALF,
    I64,
    KIND,
    LANES,
    V8F,
    V8I,
    F,
    broadcast,
    call,
    const,
    fetch_line,
    fma,
    is_codes,
    is_nibbles,
    load,
    load_nibbles,
    one,
    pointer,
    read,
    size,
    splat,
    store,
)

Value = ir.Value
Builder = ir.IRBuilder


def _right(builder: Builder, kind: types.Type, at: Value, vecs: int, mask: Value) -> Iterator[Value]:
    """The vectors of one row of the stored side; for nibbles the low ones and the whole bytes of each eight bytes."""
    if kind != types.uint8:
        for vec in range(vecs):
            yield read(builder, builder.add(at, ir.Constant(I64, vec * LANES * BYTES[kind])), kind)
        return
    for pair in range(vecs // 2):
        where = pointer(builder, builder.add(at, ir.Constant(I64, 8 * pair)), ir.VectorType(ir.IntType(8), LANES))
        both = builder.zext(builder.load(where, align=1), V8I)
        yield builder.sitofp(builder.and_(both, builder.load(mask, align=32)), V8F)
        yield builder.sitofp(both, V8F)


def _again(builder: Builder, value: Value) -> Value:
    """The same int64, which LLVM can't know to be the same: what is loaded through it is loaded again, not kept in a register."""
    kind = ir.FunctionType(I64, [I64])
    return builder.asm(kind, "", "=r,0", [value], side_effect=False)


def _step(builder: Builder, right: Iterator[Value], acc: list[list[Value]], a0: list[Value], k: Value, tight: bool) -> list[list[Value]]:
    """acc[row][vec] + a[row] * right[vec], holding the side with fewer registers and streaming the other."""
    rows, vecs = len(acc), len(acc[0])
    out = [list(row) for row in acc]

    def left(row: int, k: Value) -> Value:
        return broadcast(builder, builder.add(a0[row], builder.shl(k, ir.Constant(I64, 2))))

    if rows <= vecs:
        x = [left(row, k) for row in range(rows)]
        for vec, b in enumerate(right):
            for row in range(rows):
                out[row][vec] = call(builder, "fma", x[row], b, acc[row][vec])
            if tight and vec < vecs - 1:
                k = _again(builder, k)
                x = [x[0], *(left(row, k) for row in range(1, rows))]
        return out
    held = list(right)
    for row in range(rows):
        y = left(row, k)
        for vec, b in enumerate(held):
            out[row][vec] = call(builder, "fma", y, b, acc[row][vec])
    return out


def _shapes(kind: types.Type) -> list[tuple[int, int]]:
    """(rows, vecs) of every block whose sums fit the 16 registers."""
    some = (2, 4) if kind == types.uint8 else (1, 2, 4, 8)
    return [(rows, vecs) for rows in range(1, 7) for vecs in some if rows * vecs <= 12]


@intrinsic
def panel(typingctx, kind, rows, vecs, a, a_row, b, b_row, depth, c, c_row, alpha, ahead):  # type: ignore[no-untyped-def]
    """c[row, :8*vecs] = a[row, :depth] @ b[:depth, :8*vecs], or alpha[row] * c + that where alpha is not 0.

    a, c and alpha hold floats, b `kind`; a_row, b_row, c_row are bytes from row to row. (rows, vecs) must be among `_shapes`: the
    block lives in registers. What lies `ahead` bytes past b is fetched into the cache; None fetches nothing.
    """
    sig = types.void(kind, rows, vecs, a, a_row, b, b_row, depth, c, c_row, alpha, ahead)
    fetch = not isinstance(ahead, types.NoneType)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        which = builder.add(builder.shl(args[1], ir.Constant(I64, 4)), args[2])
        done = builder.append_basic_block("panels.end")
        choice = builder.switch(which, done)
        for n_rows, n_vecs in _shapes(kind):
            start = builder.append_basic_block(f"panel.{n_rows}x{n_vecs}")
            choice.add_case(ir.Constant(I64, 16 * n_rows + n_vecs), start)
            builder.position_at_end(start)
            sums = _deep(builder, kind, n_rows, n_vecs, *args[3:8], args[11] if fetch else None)
            _write(builder, [_apart(builder, row) for row in sums] if kind == types.uint8 else sums, *args[8:11])
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return sig, codegen


def _deep(builder, kind, rows, vecs, a, a_row, b, b_row, depth, ahead):  # type: ignore[no-untyped-def]
    """The loop over the depth: the sums [rows][vecs]."""
    entry, loop, done = builder.block, builder.append_basic_block("depth"), builder.append_basic_block("depth.end")
    a0 = [builder.add(a, builder.mul(a_row, ir.Constant(I64, r))) for r in range(rows)]
    builder.cbranch(builder.icmp_signed(">", depth, ir.Constant(I64, 0)), loop, done)
    builder.position_at_end(loop)
    k, at = builder.phi(I64), builder.phi(I64)
    acc = [[builder.phi(V8F) for _ in range(vecs)] for _ in range(rows)]
    tight = kind == types.uint8 and rows * vecs == 12  # the whole bytes need a register besides
    zero = builder.sub(_again(builder, k), k) if kind == types.uint8 else ir.Constant(I64, 0)
    new = _step(builder, _right(builder, kind, at, vecs, _nibble_mask(builder, zero)), acc, a0, k, tight)
    if ahead is not None:
        for line in range(0, vecs * LANES * BYTES[kind] // (2 if kind == types.uint8 else 1), 64):
            fetch_line(builder, builder.add(builder.add(at, ahead), ir.Constant(I64, line)))
    k2, at2 = builder.add(k, ir.Constant(I64, 1)), builder.add(at, b_row)
    builder.cbranch(builder.icmp_signed("<", k2, depth), loop, done)
    k.add_incoming(ir.Constant(I64, 0), entry)
    k.add_incoming(k2, loop)
    at.add_incoming(b, entry)
    at.add_incoming(at2, loop)
    for olds, news in zip(acc, new, strict=True):
        for old, fresh in zip(olds, news, strict=True):
            old.add_incoming(const(0), entry)
            old.add_incoming(fresh, loop)
    builder.position_at_end(done)
    return [[_either(builder, entry, loop, x) for x in row] for row in new]


def _either(builder: Builder, entry: ir.Block, loop: ir.Block, value: Value) -> Value:
    out = builder.phi(V8F)
    out.add_incoming(const(0), entry)
    out.add_incoming(value, loop)
    return out


def _nibble_mask(builder: Builder, zero: Value) -> Value:
    """Where eight times 15 stand. `zero` keeps the load within the loop: a register for the mask would push out a sum."""
    mask = cgutils.global_constant(builder.module, "nibble_mask", ir.Constant(V8I, [15] * LANES))
    mask.align = 32
    return pointer(builder, builder.add(builder.ptrtoint(mask, I64), zero), V8I)


def _apart(builder: Builder, sums: list[Value]) -> list[Value]:
    """(low, whole byte) pairs to (low, high)."""
    out = []
    for low, both in zip(sums[::2], sums[1::2], strict=True):
        out += [low, builder.fmul(builder.fsub(both, low), const(1 / 16))]
    return out


def _write(builder: Builder, sums: list[list[Value]], c: Value, c_row: Value, alpha: Value) -> None:
    """Store a panel's sums; onto alpha[row] * c where alpha is not 0."""
    with builder.if_else(builder.icmp_signed("!=", alpha, ir.Constant(I64, 0))) as (onto, over):
        for blend, branch in ((True, onto), (False, over)):
            with branch:
                for row, values in enumerate(sums):
                    at = builder.add(c, builder.mul(c_row, ir.Constant(I64, row)))
                    factor = broadcast(builder, builder.add(alpha, ir.Constant(I64, 4 * row))) if blend else None
                    for vec, value in enumerate(values):
                        where = pointer(builder, builder.add(at, ir.Constant(I64, 32 * vec)), V8F)
                        if blend:
                            value = call(builder, "fma", factor, builder.load(where, align=4), value)
                        builder.store(value, where, align=4)


@cache
def version(*more: str) -> int:
    """A number that changes with the shared sources, and with `more` of them.

    Numba's cache looks at the file of the compiled function alone, and at the values that it captures: capture this one.
    """
    here = Path(__file__).parent
    return zlib.crc32(b"".join((here / f"{name}.py").read_bytes() for name in ("simd", "panels", "tiles", "schedule", *more))) | 1


def callback(arity: int, function: Callable[..., None]) -> CFunc:
    return numba.cfunc(types.void(*[types.int64] * arity), cache=True, error_model="numpy")(function)


@cache
def product(dtype: torch.dtype) -> CFunc:
    """A C function (rows, a, a_row, b, b_row, depth, c, c_row, columns, alpha, ahead): c = a @ b as `panel` has it, of any size.

    columns is a multiple of 8; for two codes a byte it counts the codes and is a multiple of 16.
    """
    kind, sources = KIND[dtype], version()

    def multiply(rows, a, a_row, b, b_row, depth, c, c_row, columns, alpha, ahead):  # type: ignore[no-untyped-def]
        parts = (rows + 5) // 6 if sources else 0
        r = 0
        while r < rows:
            n = (rows - r + parts - 1) // parts
            parts -= 1
            vecs = 2 if n > 3 else 4 if n > 1 or is_nibbles(kind) else 8
            fade = alpha + 4 * r if alpha else 0
            x = 0
            while x < columns:
                while 8 * vecs > columns - x:
                    vecs //= 2
                at = b + (x // 2 if is_nibbles(kind) else x * size(kind))
                panel(kind, n, vecs, a + r * a_row, a_row, at, b_row, depth, c + r * c_row + 4 * x, c_row, fade, ahead)
                x += 8 * vecs
            r += n

    return callback(11, multiply)


@cache
def tall_product() -> CFunc:
    """A C function (rows, a, a_row, b, stride, depth, c, c_row, panels, alpha): the same with b as `spread` lays it out."""
    sources = version()

    def multiply(rows, a, a_row, b, stride, depth, c, c_row, panels, alpha):  # type: ignore[no-untyped-def]
        parts = (rows + 5) // 6
        for p in range(panels if sources else 0):
            r = 0
            for k in range(parts, 0, -1):
                n = (rows - r + k - 1) // k
                fade = alpha + 4 * r if alpha else 0
                panel(F, n, 2, a + r * a_row, a_row, b + p * stride, 64, depth, c + r * c_row + 64 * p, c_row, fade, None)
                r += n

    return callback(10, multiply)


@cache
def spread(dtype: torch.dtype) -> CFunc:
    """A C function (source, row, rows, columns, target, stride, scale, zero): unpack to floats in panels of 16 columns.

    Row r of the source, `row` bytes apart, goes to target + 64*r in each panel; panels are `stride` bytes apart. scale and zero
    are addresses of one fp16 per row, or 0.
    """
    kind, sources = KIND[dtype], version()

    def unpack(source, row, rows, columns, target, stride, scale, zero):  # type: ignore[no-untyped-def]
        for r in range(rows if sources else 0):
            gain = splat(one(scale + 2 * r, HALF)) if scale else splat(np.float32(1))
            base = splat(one(zero + 2 * r, HALF)) if zero else splat(np.float32(0))
            at = source + r * row
            for x in range(0, columns, 8):
                if is_nibbles(kind):
                    v = load_nibbles(at + x // 16 * 8, x % 16 == 8)
                else:
                    v = load(at + x * size(kind), kind)
                if is_codes(kind):
                    v = fma(v, gain, base)
                store(target + 64 * r + (x >> 4) * stride + (x & 15) * 4, v, F)

    return callback(8, unpack)


@cache
def calls(dtype: torch.dtype) -> tuple[int, int, int]:
    """The addresses of the product with stored pages, their unpacking, and the product with what was unpacked."""
    return product(dtype).address, spread(dtype).address, tall_product().address
