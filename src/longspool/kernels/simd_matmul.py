"""Explicit vectors for packed matrices: LLVM's autovectoriser makes poor code of woven panels, so these write it out.

A panel is 32 rows, four vectors of 8. `product(form, tokens)` multiplies `tokens` activations with a panel, the accumulators in
registers: weights are decoded once for all of them, on ports that the multiply-adds leave idle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

Store = Literal["8", "4", "f16", "bf16"]

LANES = 8
F8 = ir.VectorType(ir.FloatType(), LANES)
I8 = ir.VectorType(ir.IntType(32), LANES)
HALF8 = ir.VectorType(ir.HalfType(), LANES)
SHORT8 = ir.VectorType(ir.IntType(16), LANES)
BYTE8 = ir.VectorType(ir.IntType(8), LANES)
I64 = ir.IntType(64)


class Vectors:
    """Vector instructions at byte addresses held in integers."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder
        self.fma_ = cgutils.get_or_insert_function(builder.module, ir.FunctionType(F8, [F8, F8, F8]), "llvm.fma.v8f32")

    def at(self, base: ir.Value, offset: int | ir.Value) -> ir.Value:
        return self.b.add(base, I64(offset) if isinstance(offset, int) else offset)

    def load(self, kind: ir.Type, base: ir.Value, offset: int | ir.Value = 0) -> ir.Value:
        return self.b.load(self.b.inttoptr(self.at(base, offset), kind.as_pointer()), align=1)

    def store(self, value: ir.Value, base: ir.Value, offset: int | ir.Value = 0) -> None:
        self.b.store(value, self.b.inttoptr(self.at(base, offset), value.type.as_pointer()), align=1)

    def splat(self, scalar: ir.Value) -> ir.Value:
        vector = ir.VectorType(scalar.type, LANES)
        first = self.b.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.IntType(32)(0))
        return self.b.shuffle_vector(first, first, ir.Constant(I8, [0] * LANES))

    def spread(self, base: ir.Value, offset: int | ir.Value) -> ir.Value:
        """One float of memory in all lanes."""
        return self.splat(self.load(ir.FloatType(), base, offset))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self.b.call(self.fma_, [a, b, c])

    def halves(self, base: ir.Value, offset: int | ir.Value) -> ir.Value:
        """Eight fp16 numbers as fp32."""
        return self.b.fpext(self.load(HALF8, base, offset), F8)

    def brains(self, base: ir.Value, offset: int | ir.Value) -> ir.Value:
        """Eight bf16 numbers as fp32."""
        wide = self.b.zext(self.load(SHORT8, base, offset), I8)
        return self.b.bitcast(self.b.shl(wide, ir.Constant(I8, [16] * LANES)), F8)

    def codes(self, base: ir.Value, offset: int | ir.Value) -> ir.Value:
        """Eight signed bytes as fp32."""
        return self.b.sitofp(self.b.sext(self.load(BYTE8, base, offset), I8), F8)

    def nibble(self, words: ir.Value, i: int) -> ir.Value:
        """Nibble i of eight words as fp32, times 16**i: the activations carry the inverse. The seventh would meet the sign."""
        if i == 7:
            return self.b.sitofp(self.b.lshr(words, ir.Constant(I8, [28] * LANES)), F8)
        return self.b.sitofp(self.b.and_(words, ir.Constant(I8, [15 << 4 * i] * LANES)), F8)


class Block:
    """Writes out `count` blocks of a panel as floats: 32 rows of 32 columns each (8 for float kinds), `stride` bytes from row to row."""

    def __init__(self, builder: ir.IRBuilder, store: Store, offset: int, args: list[ir.Value]) -> None:
        self.v, self.b, self.kind, self.offset = Vectors(builder), builder, store, offset
        self.codes, self.scale, self.low, self.out, self.stride, self.count = args

    def write(self) -> None:
        """Eight rows at a time through all blocks: more at once would fall into the same cache sets where the width is a power of 2."""
        size, step = {"8": (8, 1024), "4": (32, 512)}.get(self.kind, (16, 512))
        with cgutils.for_range(self.b, I64(4), intp=I64) as strip:
            out = self.v.at(self.out, self.b.mul(self.b.mul(strip.index, I64(8)), self.stride))
            with cgutils.for_range(self.b, self.count, intp=I64) as loop:
                codes = self.v.at(self.codes, self.b.add(self.b.mul(strip.index, I64(size)), self.b.mul(loop.index, I64(step))))
                scales = self.b.add(self.b.mul(strip.index, I64(16)), self.b.mul(loop.index, I64(64)))
                to = self.v.at(out, self.b.mul(loop.index, I64(128 if self.kind in "84" else 32)))
                for start, columns in self.columns(codes, self.v.at(self.scale, scales), self.v.at(self.low, scales)):
                    for row, vector in enumerate(self.turned(columns)):
                        self.v.store(vector, self.v.at(to, self.b.mul(self.stride, I64(row))), 4 * start)

    def columns(self, codes: ir.Value, scale: ir.Value, low: ir.Value) -> Iterator[tuple[int, list[ir.Value]]]:
        """Runs of 8 columns of 8 rows: the first column's number and the vectors."""
        if self.kind in ("f16", "bf16"):
            read = self.v.halves if self.kind == "f16" else self.v.brains
            yield 0, [read(codes, 64 * c) for c in range(8)]
            return
        # A code times an fp16 scale is exact in fp32, so that fusing the sum gives the reference's very bits.
        s = self.v.halves(scale, 0)
        if self.kind == "8":
            for start in range(0, 32, 8):
                yield start, [self.b.fmul(self.v.codes(codes, 32 * (start + c)), s) for c in range(8)]
            return
        m = self.b.fmul(s, ir.Constant(F8, [float(-self.offset)] * LANES)) if self.offset > 0 else self.v.halves(low, 0)
        scales = [self.b.fmul(s, ir.Constant(F8, [1.0 if i == 7 else 16.0**-i] * LANES)) for i in range(8)]
        for pair in range(2):
            words = [self.v.load(I8, codes, 128 * (2 * pair + w)) for w in range(2)]
            for half in range(2):
                nibbles = [(w, i) for w in words for i in range(half, 8, 2)]
                yield 16 * half + 8 * pair, [self.v.fma(self.v.nibble(w, i), scales[i], m) for w, i in nibbles]

    def turned(self, rows: list[ir.Value]) -> list[ir.Value]:
        """The transpose of 8 vectors: in each of three rounds, pairs of vectors swap blocks of 1, 2 and 4 lanes."""
        for width in (1, 2, 4):
            turned: list[ir.Value] = [None] * LANES
            for i in (i for i in range(LANES) if not i & width):
                low = [lane if not lane & width else LANES + lane - width for lane in range(LANES)]
                high = [lane + width if not lane & width else LANES + lane for lane in range(LANES)]
                for to, mask in ((i, low), (i + width, high)):
                    turned[to] = self.b.shuffle_vector(rows[i], rows[i + width], ir.Constant(I8, mask))
            rows = turned
        return rows


class Panel:
    """Writes the product of `tokens` activations with `width` vectors of a panel."""

    def __init__(self, builder: ir.IRBuilder, store: Store, tokens: int, width: int, args: list[ir.Value]) -> None:
        self.v, self.b, self.store_ = Vectors(builder), builder, store
        self.tokens, self.width = tokens, width
        self.codes, self.scale, self.low, self.x, self.sums, self.count, self.out = args
        # With few accumulators the multiply-add's latency shows: they get two sets.
        self.sets = 2 if tokens * width <= 6 else 1
        self.acc = [[[self._zero() for _ in range(width)] for _ in range(tokens)] for _ in range(self.sets)]

    def _zero(self) -> ir.Value:
        return cgutils.alloca_once_value(self.b, ir.Constant(F8, [0.0] * LANES))

    def clear(self) -> None:
        for one in self.each():
            self.b.store(ir.Constant(F8, [0.0] * LANES), one)

    def each(self) -> list[ir.Value]:
        return [a for s in self.acc for t in s for a in t]

    def add(self, weights: list[ir.Value], x: ir.Value, column: int) -> None:
        """acc += weights * x[column] for every token."""
        if self.tokens < self.width:
            spreads = [self.v.spread(x, 4 * (column * self.tokens + t)) for t in range(self.tokens)]
            for r, w in enumerate(weights):
                for t, spread in enumerate(spreads):
                    self.step(column, t, r, w, spread)
            return
        for t in range(self.tokens):
            spread = self.v.spread(x, 4 * (column * self.tokens + t))
            for r, w in enumerate(weights):
                self.step(column, t, r, w, spread)

    def step(self, column: int, t: int, r: int, weight: ir.Value, spread: ir.Value) -> None:
        a = self.acc[column % self.sets][t][r]
        self.b.store(self.v.fma(weight, spread, self.b.load(a)), a)

    def sum(self, t: int, r: int) -> ir.Value:
        total = self.b.load(self.acc[0][t][r])
        return total if self.sets == 1 else self.b.fadd(total, self.b.load(self.acc[1][t][r]))

    def columns(self, codes: ir.Value, x: ir.Value, n: int) -> None:
        """The next n columns."""
        size, read = {"8": (1, self.v.codes), "f16": (2, self.v.halves), "bf16": (2, self.v.brains)}[self.store_]
        for c in range(n):
            self.add([read(codes, (c * 32 + r * LANES) * size) for r in range(self.width)], x, c)

    def words(self, codes: ir.Value, x: ir.Value) -> None:
        """The next 8 columns of 4-bit codes, in the order of their nibbles."""
        words = [self.v.load(I8, codes, r * 32) for r in range(self.width)]
        for i in range(8):
            self.add([self.v.nibble(w, i) for w in words], x, i)

    def steps(self, count: ir.Value, codes: ir.Value, x: ir.Value, columns: int) -> None:
        """`count` times `columns` columns."""
        size = {"8": 32 * columns, "4": 16 * columns}.get(self.store_, 64 * columns)
        with cgutils.for_range(self.b, count, intp=I64) as loop:
            here = self.v.at(codes, self.b.mul(loop.index, I64(size)))
            there = self.v.at(x, self.b.mul(loop.index, I64(4 * columns * self.tokens)))
            if self.store_ == "4":
                self.words(here, there)
            else:
                self.columns(here, there, columns)

    def floats(self) -> None:
        """All columns of a float panel, then the sums to `out`."""
        whole = self.b.udiv(self.count, I64(4))
        self.steps(whole, self.codes, self.x, 4)
        done = self.b.mul(whole, I64(4))
        rest = self.b.sub(self.count, done)
        codes, x = self.v.at(self.codes, self.b.mul(done, I64(64))), self.v.at(self.x, self.b.mul(done, I64(4 * self.tokens)))
        self.steps(rest, codes, x, 1)
        for t in range(self.tokens):
            for r in range(self.width):
                self.v.store(self.sum(t, r), self.out, 128 * t + 32 * r)

    def quantized(self, offset: int) -> None:
        """All groups: the codes' products of a group first, then its scale and low once."""
        for t in range(self.tokens):
            for r in range(self.width):
                self.v.store(ir.Constant(F8, [0.0] * LANES), self.out, 128 * t + 32 * r)
        bytes_ = 1024 if self.store_ == "8" else 512
        with cgutils.for_range(self.b, self.count, intp=I64) as loop:
            self.clear()
            codes = self.v.at(self.codes, self.b.mul(loop.index, I64(bytes_)))
            x = self.v.at(self.x, self.b.mul(loop.index, I64(128 * self.tokens)))
            self.steps(I64(4), codes, x, 8)
            self.scaled(loop.index, offset)

    def scaled(self, group: ir.Value, offset: int) -> None:
        """out += scale * acc + low * sum(x); `offset` stands for a low of -offset * scale."""
        row = self.b.mul(group, I64(64))
        sums = self.v.at(self.sums, self.b.mul(group, I64(4 * self.tokens)))
        for r in range(self.width):
            scale = self.v.halves(self.scale, self.v.at(row, 16 * r))
            low = None
            if offset > 0:
                low = self.b.fmul(scale, ir.Constant(F8, [float(-offset)] * LANES))
            elif offset < 0:
                low = self.v.halves(self.low, self.v.at(row, 16 * r))
            for t in range(self.tokens):
                total = self.v.fma(scale, self.sum(t, r), self.v.load(F8, self.out, 128 * t + 32 * r))
                if low is not None:
                    total = self.v.fma(low, self.v.spread(sums, 4 * t), total)
                self.v.store(total, self.out, 128 * t + 32 * r)


# A stored form as a scalar's type: Numba compiles and caches by types, and a type costs nothing to pass.
# Its code store, and its offset as `Panel.scaled` takes it.
FORMS: dict[types.Type, tuple[Store, int]] = {
    types.int8: ("8", 0),
    types.int16: ("4", 8),
    types.int32: ("4", -1),
    types.uint8: ("f16", 0),
    types.uint16: ("bf16", 0),
}


FORM = {
    "q8_0": types.int8,
    "int8": types.int8,
    "q4_0": types.int16,
    "q4_1": types.int32,
    "int4": types.int32,
    "f16": types.uint8,
    "bf16": types.uint16,
}
BITS = {"q8_0": 8, "int8": 8, "q4_0": 4, "q4_1": 4, "int4": 4, "f16": 16, "bf16": 16}


def _product(tokens: int, width: int) -> Callable[..., None]:
    """An intrinsic product(form, codes, scale, low, x, sums, count, out), all addresses; count is groups, or columns for floats."""

    @intrinsic
    def panel(typing, form, codes, scale, low, x, sums, count, out):  # type: ignore[no-untyped-def]
        store, offset = FORMS[form]

        def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
            writer = Panel(builder, store, tokens, width, list(args[1:]))
            if store in ("f16", "bf16"):
                writer.floats()
            else:
                writer.quantized(offset)
            return context.get_dummy_value()

        return types.void(form, *[types.int64] * 7), emit

    return panel


one, two, three = (_product(tokens, 4) for tokens in (1, 2, 3))
four, five, six = (_product(tokens, 2) for tokens in (4, 5, 6))


@intrinsic
def call(typing, address, *args):  # type: ignore[no-untyped-def]
    """Calls a panel function (see matmul/cpu.py) by its address."""

    def emit(context, builder, signature, values):  # type: ignore[no-untyped-def]
        numbers = list(cgutils.unpack_tuple(builder, values[1]))
        kind = ir.FunctionType(ir.VoidType(), [I64] * (1 + len(numbers)))
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [I64(0), *numbers])
        return context.get_dummy_value()

    return types.void(types.int64, types.StarArgTuple.from_types([types.int64] * len(args))), emit


def memory_of(kind: types.Type) -> Callable[[int], Sequence[float]]:
    @intrinsic
    def memory(typing, address):  # type: ignore[no-untyped-def]
        def emit(context, builder, signature, values):  # type: ignore[no-untyped-def]
            return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(address), emit

    return memory


# Memory at an address, to be indexed.
floats, ints, longs = memory_of(types.float32), memory_of(types.int32), memory_of(types.int64)


@intrinsic
def _unpacked(typing, form, codes, scale, low, out, stride, count):  # type: ignore[no-untyped-def]
    """Blocks of a panel as floats; see Block."""
    store, offset = FORMS[form]

    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        Block(builder, store, offset, list(args[1:])).write()
        return context.get_dummy_value()

    return types.void(form, *[types.int64] * 6), emit


# Kept in this file: Numba looks only at the age of a function's own file to see whether its compiled code is still good.
def panel(form, n, bits, codes, scale, low, xt, sums, count, acc):  # type: ignore[no-untyped-def]
    """n tokens times one panel, to acc [n, 32]; four tokens and more take half a panel at a time to stay in the registers."""
    if n == 1:
        one(form, codes, scale, low, xt, sums, count, acc)
    elif n == 2:
        two(form, codes, scale, low, xt, sums, count, acc)
    elif n == 3:
        three(form, codes, scale, low, xt, sums, count, acc)
    else:
        skip = 64 if bits == 4 else 2 * bits
        for h in range(2):
            c, s, m, a = codes + skip * h, scale + 32 * h, low + 32 * h, acc + 64 * h
            if n == 4:
                four(form, c, s, m, xt, sums, count, a)
            elif n == 5:
                five(form, c, s, m, xt, sums, count, a)
            else:
                six(form, c, s, m, xt, sums, count, a)


def blocks(form, codes, scale, low, out, stride, count):  # type: ignore[no-untyped-def]
    _unpacked(form, codes, scale, low, out, stride, count)


@functools.cache
def blocks_address(kind: str) -> int:
    """`blocks` compiled for a kind."""
    return int(cfunc(types.void(FORM[kind], *[types.int64] * 6), cache=True)(blocks).address)


@functools.cache
def panel_address(kind: str) -> int:
    """`panel` compiled for a kind, reached by its address: the parallel kernel around it is then compiled once for all."""
    signature = types.void(FORM[kind], *[types.int64] * 9)
    return int(cfunc(signature, cache=True)(panel).address)
