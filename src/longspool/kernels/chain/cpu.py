"""A chain on the CPU: all moves in one compiled call, slice by slice of tokens, whose registers lie side by side in one buffer."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from math import erf, sqrt
from typing import NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor

from ...values import Packed
from ...values.chain import Add, Chain, Gate, Move, Norm, Product, Turn
from ..matmul.cpu import prepare, scratch, sweep
from ..panels import version
from ..record import run as call
from ..rms_norm.cpu import norm_row
from ..room import room
from ..rope.cpu import tokens as turn
from ..simd import F, add, div, exp2, float_at, fma, get64, larger, load, mul, smaller, splat, store, tanh
from ..simd_matmul import BITS, floats, panel_address
from ..threads import chunks, helper, pnjit, use_threads
from ..tiles import LOG2E
from .walk import Angles, walk

FEW = 48  # tokens whose registers may stay in memory as long as the results do
SLICE = 256  # tokens at once: their registers fit in the cache, and a long prompt takes no more memory than that

COPY, PRODUCT, NORM, ADD, GATE, TURN = range(6)
SILU, GELU, GELU_TANH, RELU = range(4)
ACTS = {"silu": SILU, "gelu": GELU, "gelu_pytorch_tanh": GELU_TANH, "relu": RELU}
STEEP = sqrt(2 / np.pi)  # of GELU's approximation by tanh
LINE = 13  # int64 numbers of a move


class Tape(NamedTuple):
    """A chain as numbers: moves [M, LINE], and floats for each token: all registers, then scratch. `wanted` are starts and widths."""

    moves: np.ndarray
    at: int
    registers: int
    floats: int
    wanted: tuple[tuple[int, int], ...]


def can(x: Tensor, chain: Chain, rest: list[Tensor], angles: Angles) -> str | None:
    for t in (x, *rest, *(angles or ())):
        if t.dtype != torch.float32:
            return f"something is {t.dtype}, not float32"
    return None


def run(x: Tensor, chain: Chain, rest: list[Tensor], angles: Angles) -> list[Tensor]:
    tape, n = tape_of(chain), x.shape[0]
    if tape is None:
        return walk(x, chain, rest, angles)
    given = [value.contiguous() for value in (x, *rest)]
    if angles is not None:
        angles = angles[0].contiguous(), angles[1].contiguous()
    if 0 < n <= FEW:
        space = torch.empty(n * tape.floats)
        play(tape, given, angles, 0, n, space.data_ptr())
        return views(tape, space, n)
    outs = [torch.empty(n, width) for _, width in tape.wanted]
    _, held = room(4 * min(n, SLICE) * tape.floats)
    space = held.view(torch.float32)
    for first in range(0, n, SLICE):
        count = min(SLICE, n - first)
        play(tape, given, angles, first, count, space.data_ptr())
        for out, value in zip(outs, views(tape, space, count), strict=True):
            out[first : first + count] = value
    return outs


def play(tape: Tape, given: list[Tensor], angles: Angles, first: int, count: int, space: int) -> None:
    """The tokens first to first + count, registers and scratch at `space`."""
    sources = array("q", [value.data_ptr() + 4 * first * value.shape[1] for value in given])
    cos, sin, half = 0, 0, 0
    if angles is not None:
        half = angles[0].shape[1]
        cos, sin = angles[0].data_ptr() + 4 * first * half, angles[1].data_ptr() + 4 * first * half
    scratch = space + 4 * count * tape.registers
    numbers = (tape.at, len(tape.moves), sources.buffer_info()[0], space, scratch, count, cos, sin, half, chunks())
    call(player(), numbers, tape, sources, given)


def views(tape: Tape, space: Tensor, count: int) -> list[Tensor]:
    """The wanted registers of `count` tokens."""
    return [space.as_strided((count, width), (width, 1), count * start) for start, width in tape.wanted]


def tape_of(chain: Chain) -> Tape | None:
    """The chain's numbers, made once."""
    if "cpu" not in chain.compiled:
        chain.compiled["cpu"] = compiled(chain)
    tape = chain.compiled["cpu"]
    assert tape is None or isinstance(tape, Tape)
    return tape


def compiled(chain: Chain) -> Tape | None:
    """None where a matrix is not packed, or a vector not plain floats."""
    weights = [move.weight for move in chain.moves if isinstance(move, Product)]
    if not all(isinstance(w, Packed) and w.kind in BITS and w.address[0] for w in weights):
        return None
    vectors = [move.bias if isinstance(move, Product) else move.gain for move in chain.moves if isinstance(move, Product | Norm)]
    if not all(v is None or (v.dtype == torch.float32 and v.is_contiguous() and v.is_cpu) for v in vectors):
        return None
    starts = (0, *accumulate(chain.widths))
    copies = [[COPY, i, 0, starts[r], chain.widths[r], *[0] * (LINE - 5)] for i, r in enumerate(chain.given)]
    moves = np.array([*copies, *(line(move, starts, chain.widths) for move in chain.moves)], np.int64)
    more = max((scratch(1, w.cols) for w in weights), default=0)
    return Tape(moves, moves.ctypes.data, starts[-1], starts[-1] + more, tuple((starts[r], chain.widths[r]) for r in chain.wanted))


def line(move: Move, starts: tuple[int, ...], widths: tuple[int, ...]) -> list[int]:
    """Kind, then source and target with their widths, then what the kind needs."""
    source = move.to if isinstance(move, Turn) else move.source
    head = [starts[source], widths[source], starts[move.to], widths[move.to]]
    match move:
        case Product(_, _, Packed() as w, bias, first):
            tail = [panel_address(w.kind), BITS[w.kind], *w.address, 0 if bias is None else bias.data_ptr(), w.rows, first]
            kind = PRODUCT
        case Norm(_, _, gain, floor):
            kind, tail = NORM, [gain.data_ptr(), *gain.shape, int(np.float64(floor).view(np.int64))]
        case Add():
            kind, tail = ADD, []
        case Gate(_, _, act):
            kind, tail = GATE, [ACTS[act]]
        case Turn(_, heads, dim):
            kind, tail = TURN, [heads, dim]
        case _:
            raise TypeError(move)
    return [kind, *head, *tail, *[0] * (LINE - 5 - len(tail))]


@helper
def bent(x, act):  # type: ignore[no-untyped-def]
    """Eight numbers through an activation, other than GELU."""
    if act == SILU:
        return div(x, add(exp2(smaller(mul(x, splat(np.float32(-LOG2E))), splat(np.float32(126)))), splat(np.float32(1))))
    if act == GELU_TANH:
        cubic = fma(mul(x, x), splat(np.float32(0.044715 * STEEP)), splat(np.float32(STEEP)))
        half = mul(x, splat(np.float32(0.5)))
        return fma(half, tanh(mul(x, cubic)), half)
    return larger(splat(np.float32(0)), x)  # a NaN stays one


@helper
def bent_one(x, act):  # type: ignore[no-untyped-def]
    """One number through any activation."""
    if act == SILU:
        return x / (np.float32(1) + np.exp(-x))
    if act == GELU:
        return np.float32(0.5 * x * (1 + erf(x / sqrt(2))))
    if act == GELU_TANH:
        return np.float32(0.5 * x * (1 + np.tanh(STEEP * (x + 0.044715 * x * x * x))))
    return np.float32(0) if x < 0 else x


@helper
def gate(source, to, width, act):  # type: ignore[no-untyped-def]
    """act(source[:width]) * source[width:] for one token."""
    x, y = floats(source), floats(to)
    whole = 0 if act == GELU else width // 8 * 8
    for i in range(0, whole, 8):
        store(to + 4 * i, mul(bent(load(source + 4 * i, F), act), load(source + 4 * (width + i), F)), F)
    for i in range(whole, width):
        y[i] = bent_one(x[i], act) * x[width + i]


@helper
def plus(source, to, width):  # type: ignore[no-untyped-def]
    x, y = floats(source), floats(to)
    for i in range(width):
        y[i] += x[i]


@helper
def copy(source, to, width):  # type: ignore[no-untyped-def]
    x, y = floats(source), floats(to)
    for i in range(width):
        y[i] = x[i]


@helper
def single(move, sources, base, tokens, cos, sin, half, lo, hi):  # type: ignore[no-untyped-def]
    """A move that is no product, for the tokens lo to hi."""
    kind, width, to_width = get64(move), get64(move + 16), get64(move + 32)
    source, to = base + 4 * tokens * get64(move + 8), base + 4 * tokens * get64(move + 24)
    for t in range(lo, hi):
        x, y = source + 4 * t * width, to + 4 * t * to_width
        if kind == NORM:
            gain, parts, size = get64(move + 40), get64(move + 48), get64(move + 56)
            for p in range(parts):
                norm_row(x + 4 * p * size, gain + 4 * p * size, float_at(move + 64), y + 4 * p * size, size)
        elif kind == ADD:
            plus(x, y, width)
        elif kind == GATE:
            gate(x, y, to_width, get64(move + 40))
        elif kind == TURN:
            if half:
                heads, dim = get64(move + 40), get64(move + 48)
                turn(y, cos + 4 * t * half, sin + 4 * t * half, y, heads, dim, half, 0, dim, 0, 1)
        else:
            copy(get64(sources + 8 * get64(move + 8)) + 4 * t * to_width, y, to_width)


@cache
def player() -> Callable[..., None]:
    """(tape, count, sources, base, scratch, tokens, cos, sin, half, pieces), everything by address."""
    sources_seen = version("matmul/cpu", "rms_norm/cpu", "rope/cpu", "simd_matmul")

    def moves(tape, count, sources, base, space, tokens, cos, sin, half, pieces):  # type: ignore[no-untyped-def]
        use_threads(pieces)
        for m in range(count if sources_seen else 0):
            move = tape + 8 * LINE * m
            if get64(move) == PRODUCT:
                cols, stride, bits, rows = get64(move + 16), get64(move + 32), get64(move + 48), get64(move + 88)
                x = base + 4 * tokens * get64(move + 8)
                out = base + 4 * (tokens * get64(move + 24) + get64(move + 96))
                panels, tiles = (rows + 31) // 32, (tokens + 5) // 6
                if tiles == 1:
                    prepare(x, space, tokens, cols, bits, 0, 1)
                else:
                    for c in prange(pieces):
                        prepare(x, space, tokens, cols, bits, tiles * c // pieces, tiles * (c + 1) // pieces)
                for c in prange(pieces):
                    lo, hi = panels * c // pieces, panels * (c + 1) // pieces
                    codes, scale, low = get64(move + 56), get64(move + 64), get64(move + 72)
                    sweep(out, stride, space, tokens, cols, rows, get64(move + 40), bits, codes, scale, low, lo, hi)
                if get64(move + 80):
                    for t in range(tokens):
                        plus(get64(move + 80), out + 4 * t * stride, rows)
            elif tokens == 1:
                single(move, sources, base, tokens, cos, sin, half, 0, 1)
            else:
                for c in prange(pieces):
                    single(move, sources, base, tokens, cos, sin, half, tokens * c // pieces, tokens * (c + 1) // pieces)

    return pnjit(moves)
