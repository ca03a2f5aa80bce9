"""Explicit <8 x float> code for Numba: a vector type, its arithmetic, loads and stores.

Everything works on addresses (int64), so that a call carries no array objects. The stored type is told by `kind`, a numpy scalar
of which only the type counts: float32, uint16 (fp16 bits), int16 (bf16 bits), int8 (codes), uint8 (two 4-bit codes a byte).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

KIND = {
    torch.float32: np.float32(0),
    torch.float16: np.uint16(0),
    torch.bfloat16: np.int16(0),
    torch.int8: np.int8(0),
    torch.uint8: np.uint8(0),
}
F, HALF = KIND[torch.float32], KIND[torch.float16]
BYTES = {types.float32: 4, types.uint16: 2, types.int16: 2, types.int8: 1, types.uint8: 1}

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
LANES = 8
V8F, V8I = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


class Vector(types.Type):
    """Eight floats in a register."""

    def __init__(self) -> None:
        super().__init__(name="vector8")


vector = Vector()


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type) -> None:  # type: ignore[no-untyped-def]
        super().__init__(dmm, fe_type, V8F)


def splat_of(builder: ir.IRBuilder, value: ir.Value, kind: ir.VectorType = V8F) -> ir.Value:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(V8I, [0] * LANES))


def const(value: float) -> ir.Constant:
    return ir.Constant(V8F, [float(np.float32(value))] * LANES)


def call(builder: ir.IRBuilder, name: str, *args: ir.Value) -> ir.Value:
    """An LLVM intrinsic over v8f32."""
    kind = ir.FunctionType(V8F, [V8F] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v8f32"), args)


def pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.inttoptr(address, kind.as_pointer())


def read(builder: ir.IRBuilder, address: ir.Value, kind: types.Type) -> ir.Value:
    """Eight values of a stored kind as floats."""
    if kind == types.float32:
        return builder.load(pointer(builder, address, V8F), align=4)
    if kind == types.uint16:
        half = builder.load(pointer(builder, address, ir.VectorType(ir.HalfType(), LANES)), align=2)
        return builder.fpext(half, V8F)
    if kind == types.int16:
        bits = builder.load(pointer(builder, address, ir.VectorType(ir.IntType(16), LANES)), align=2)
        high = builder.shl(builder.zext(bits, V8I), ir.Constant(V8I, [16] * LANES))
        return builder.bitcast(high, V8F)
    codes = builder.load(pointer(builder, address, ir.VectorType(ir.IntType(8), LANES)), align=1)
    return builder.sitofp(builder.sext(codes, V8I), V8F)


def broadcast(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return splat_of(builder, builder.load(pointer(builder, address, F32), align=4))


def _op(emit: Callable, result: types.Type = vector, arity: int = 2):  # type: ignore[no-untyped-def]
    """An intrinsic over vectors from a function (builder, *values) -> value."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return emit(builder, *args)

    if arity == 1:
        return intrinsic(lambda typingctx, a: (result(vector), codegen))
    if arity == 2:
        return intrinsic(lambda typingctx, a, b: (result(vector, vector), codegen))
    return intrinsic(lambda typingctx, a, b, c: (result(vector, vector, vector), codegen))


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    # b where either is NaN, as vmaxps has it: a NaN in b lives on.
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _smaller(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def fold(combine: Callable) -> Callable:
    def emit(builder: ir.IRBuilder, v: ir.Value) -> ir.Value:
        for gap in (4, 2, 1):
            mask = ir.Constant(V8I, [(i + gap) % LANES for i in range(LANES)])
            v = combine(builder, v, builder.shuffle_vector(v, v, mask))
        return builder.extract_element(v, ir.Constant(I32, 0))

    return emit


# 2**f for |f| <= 1/2, highest power first; relative error 9.2e-8, and exactly 1 at 0.
POWERS = (0.001326472731307149, 0.009671512991189957, 0.05550733581185341, 0.24022242426872253, 0.6931470036506653, 1.0)
MAGIC = 1.5 * 2**23  # adding it rounds a float to an integer that stands in its low bits


def power(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2**x for x <= 127; exactly 0 for x <= -127."""
    x = _larger(builder, const(-127), x)
    moved = builder.fadd(x, const(MAGIC))
    f = builder.fsub(x, builder.fsub(moved, const(MAGIC)))
    p = const(POWERS[0])
    for c in POWERS[1:]:
        p = call(builder, "fma", p, f, const(c))
    exponent = builder.shl(builder.bitcast(moved, V8I), ir.Constant(V8I, [23] * LANES))
    return builder.bitcast(builder.add(builder.bitcast(p, V8I), exponent), V8F)


def _tanh(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    e = power(builder, _smaller(builder, const(60), builder.fmul(x, const(2 / np.log(2)))))
    return builder.fsub(const(1), builder.fdiv(const(2), builder.fadd(e, const(1))))


add = _op(lambda builder, a, b: builder.fadd(a, b))
sub = _op(lambda builder, a, b: builder.fsub(a, b))
mul = _op(lambda builder, a, b: builder.fmul(a, b))
div = _op(lambda builder, a, b: builder.fdiv(a, b))
larger = _op(_larger)
smaller = _op(_smaller)
fma = _op(lambda builder, a, b, c: call(builder, "fma", a, b, c), arity=3)
exp2 = _op(power, arity=1)
tanh = _op(_tanh, arity=1)
lane = _op(lambda builder, v: builder.extract_element(v, ir.Constant(I32, 0)), types.float32, arity=1)
total = _op(fold(lambda builder, a, b: builder.fadd(a, b)), types.float32, arity=1)
highest = _op(fold(_larger), types.float32, arity=1)
lowest = _op(fold(_smaller), types.float32, arity=1)


@intrinsic
def load(typingctx, address, kind):  # type: ignore[no-untyped-def]
    """Eight stored values as floats."""
    return vector(address, kind), lambda context, builder, sig, args: read(builder, args[0], kind)


@intrinsic
def load_nibbles(typingctx, address, high):  # type: ignore[no-untyped-def]
    """The low or the high nibbles of eight bytes as floats."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        codes = builder.zext(builder.load(pointer(builder, args[0], ir.VectorType(ir.IntType(8), LANES)), align=1), V8I)
        up = builder.lshr(codes, ir.Constant(V8I, [4] * LANES))
        return builder.sitofp(builder.select(args[1], up, builder.and_(codes, ir.Constant(V8I, [15] * LANES))), V8F)

    return vector(types.int64, types.boolean), codegen


@intrinsic
def store(typingctx, address, value, kind):  # type: ignore[no-untyped-def]
    """Write eight floats as the stored kind."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        value = _narrow(builder, args[1], kind, LANES)
        builder.store(value, pointer(builder, args[0], value.type), align=BYTES[kind])
        return context.get_dummy_value()

    return types.void(address, vector, kind), codegen


@intrinsic
def one(typingctx, address, kind):  # type: ignore[no-untyped-def]
    """One stored value as a float."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        if kind == types.float32:
            return builder.load(pointer(builder, args[0], F32), align=4)
        if kind == types.uint16:
            return builder.fpext(builder.load(pointer(builder, args[0], ir.HalfType()), align=2), F32)
        bits = builder.load(pointer(builder, args[0], ir.IntType(16)), align=2)
        return builder.bitcast(builder.shl(builder.zext(bits, I32), ir.Constant(I32, 16)), F32)

    return types.float32(address, kind), codegen


@intrinsic
def put(typingctx, address, value, kind):  # type: ignore[no-untyped-def]
    """Write one float as the stored kind."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        value = _narrow(builder, args[1], kind, 0)
        builder.store(value, pointer(builder, args[0], value.type), align=BYTES[kind])
        return context.get_dummy_value()

    return types.void(address, types.float32, kind), codegen


def _narrow(builder: ir.IRBuilder, value: ir.Value, kind: types.Type, lanes: int) -> ir.Value:
    """A float, or a vector of them, rounded to a stored kind."""
    shape = (lambda t: ir.VectorType(t, lanes)) if lanes else (lambda t: t)
    fill = (lambda t, x: ir.Constant(shape(t), [x] * lanes)) if lanes else ir.Constant
    if kind == types.float32:
        return value
    if kind == types.uint16:
        return builder.fptrunc(value, shape(ir.HalfType()))
    bits = builder.bitcast(value, shape(I32))
    odd = builder.and_(builder.lshr(bits, fill(I32, 16)), fill(I32, 1))
    even = builder.add(builder.add(bits, fill(I32, 0x7FFF)), odd)
    real = builder.select(builder.fcmp_unordered("uno", value, value), fill(I32, 0x7FC00000), even)
    return builder.trunc(builder.lshr(real, fill(I32, 16)), shape(ir.IntType(16)))


@intrinsic
def splat(typingctx, value):  # type: ignore[no-untyped-def]
    return vector(types.float32), lambda context, builder, sig, args: splat_of(builder, args[0])


@intrinsic
def invoke(typingctx, address, numbers):  # type: ignore[no-untyped-def]
    """Call the C function at an address with a tuple of int64; it returns nothing."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(numbers))
        builder.call(pointer(builder, args[0], kind), cgutils.unpack_tuple(builder, args[1]))
        return context.get_dummy_value()

    return types.void(address, numbers), codegen


@intrinsic
def size(typingctx, kind):  # type: ignore[no-untyped-def]
    """Bytes of a stored value, a constant of the compiled code."""
    return types.int64(kind), lambda context, builder, sig, args: ir.Constant(I64, BYTES[kind])


@intrinsic
def is_codes(typingctx, kind):  # type: ignore[no-untyped-def]
    flag = ir.Constant(ir.IntType(1), int(kind in (types.int8, types.uint8)))
    return types.boolean(kind), lambda context, builder, sig, args: flag


@intrinsic
def is_nibbles(typingctx, kind):  # type: ignore[no-untyped-def]
    flag = ir.Constant(ir.IntType(1), int(kind == types.uint8))
    return types.boolean(kind), lambda context, builder, sig, args: flag


@intrinsic
def take(typingctx, address):  # type: ignore[no-untyped-def]
    """Fetch the int64 counter at an address and add 1, atomically."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", pointer(builder, args[0], I64), ir.Constant(I64, 1), "monotonic")

    return types.int64(types.int64), codegen


@intrinsic
def whole(typingctx, address):  # type: ignore[no-untyped-def]
    """The int32 at an address."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return builder.sext(builder.load(pointer(builder, args[0], I32), align=4), I64)

    return types.int64(types.int64), codegen


@intrinsic
def get64(typingctx, address):  # type: ignore[no-untyped-def]
    return types.int64(address), lambda context, builder, sig, args: builder.load(pointer(builder, args[0], I64), align=8)


@intrinsic
def put64(typingctx, address, value):  # type: ignore[no-untyped-def]
    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        builder.store(args[1], pointer(builder, args[0], I64), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def flag(typingctx, address):  # type: ignore[no-untyped-def]
    """The bool at an address."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        byte = builder.load(pointer(builder, args[0], ir.IntType(8)), align=1)
        return builder.icmp_unsigned("!=", byte, ir.Constant(ir.IntType(8), 0))

    return types.boolean(types.int64), codegen


@intrinsic
def float_at(typingctx, address):  # type: ignore[no-untyped-def]
    """The float64 at an address."""
    kind = ir.DoubleType()
    return types.float64(types.int64), lambda context, builder, sig, args: builder.load(pointer(builder, args[0], kind), align=8)


@intrinsic
def prefetch(typingctx, address):  # type: ignore[no-untyped-def]
    """Ask for the cache line at an address, which need not be valid."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        fetch_line(builder, args[0])
        return context.get_dummy_value()

    return types.void(address), codegen


def fetch_line(builder: ir.IRBuilder, address: ir.Value) -> None:
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(fetch, [builder.inttoptr(address, byte), ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)])


@intrinsic
def above(typingctx, address, limit):  # type: ignore[no-untyped-def]
    """Which of eight floats are larger than the limit, a bit each."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        values = builder.load(pointer(builder, args[0], V8F), align=4)
        bits = builder.fcmp_ordered(">", values, splat_of(builder, args[1]))
        return builder.zext(builder.bitcast(bits, ir.IntType(LANES)), I64)

    return types.int64(types.int64, types.float32), codegen


def _carrying(lanes: int):  # type: ignore[no-untyped-def]
    @intrinsic
    def carry(typingctx, to, source, kind):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            item = ir.IntType(8 * BYTES[kind])
            form = item if lanes == 1 else ir.VectorType(item, lanes)
            value = builder.load(pointer(builder, args[1], form), align=BYTES[kind])
            builder.store(value, pointer(builder, args[0], form), align=BYTES[kind])
            return context.get_dummy_value()

        return types.void(to, source, kind), codegen

    return carry


# Copy one stored value, or eight, as they are.
carry_one, carry = _carrying(1), _carrying(LANES)
