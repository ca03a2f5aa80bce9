"""What the Triton kernels over packed matrices share: codes as exact fp16 numbers, a group of 32 columns at a time, with their scales.

The nibbles of a word are taken apart in the order of its bits, and the activations are read in that order of columns instead. Codes
are multiplied as they are and scaled in fp32 after that. A product counts 4-bit codes from their middle, 8, whatever the kind: seen
from there codes are about as large as the weights, so that rounding stays what it is for the unpacked matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..values import Packed
from ..values.packed import FORMS
from .triton_tiles import levelled, product


@dataclass(frozen=True)
class Layout:
    """How a kind is stored, as constants of a kernel: 4 or 8 bits of a code, 16 or 32 of a float; what is taken from a code, and
    what is taken from it in a product, where a low makes up for it."""

    bits: int
    offset: int = 0
    middle: int = 0


def layout(w: Packed) -> Layout:
    form = FORMS.get(w.kind)
    return Layout(w.codes.element_size() * 8) if form is None else Layout(form.bits, form.offset, 8 if form.bits == 4 else 0)


def tensors(w: Packed) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return w.codes.contiguous(), *(None if t is None else t.contiguous() for t in (w.scale, w.low))  # type: ignore[return-value]


@triton.jit
def column(i, BITS: tl.constexpr):
    """The column within a group that stands at place i."""
    if BITS == 4:
        i = i // 8 * 4 + i % 8 // 2 + i % 2 * 16
    return i


@triton.jit
def group_codes(codes, group, m, live, cols, BITS: tl.constexpr, OFFSET: tl.constexpr):
    """One group of columns of the matrix rows m, [32, M]: exact fp16 codes, or the floats themselves."""
    panel, lane = m // 32, m % 32
    if BITS == 4:
        word = group * 4 + tl.arange(0, 4)
        at = panel.to(tl.int64)[None, :] * (cols // 8 * 32) + word[:, None] * 32 + lane[None, :]
        words, shift = tl.load(codes + at, mask=live[None, :], other=0), tl.arange(0, 8) * 4
        x = tl.reshape((words[:, None, :] >> shift[None, :, None]) & 15, (32, m.shape[0]))
    else:
        k = group * 32 + tl.arange(0, 32)
        if BITS == 32:
            at = m.to(tl.int64)[None, :] * cols + k[:, None]
        else:
            at = panel.to(tl.int64)[None, :] * (cols * 32) + k[:, None] * 32 + lane[None, :]
        x = tl.load(codes + at, mask=live[None, :] & (k < cols)[:, None], other=0)
    if BITS < 16:
        x = (x - OFFSET).to(tl.float16)
    return x


@triton.jit
def group_number(numbers, group, m, live, cols):
    """A group's scale or low of the matrix rows m, fp32 [M]."""
    at = (m // 32).to(tl.int64) * (cols // 32 * 32) + group * 32 + m % 32
    return tl.load(numbers + at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def group_middle(scale, low, group, m, live, cols, OFFSET: tl.constexpr):
    """The weight that a code of OFFSET stands for, fp32 [M]."""
    return group_number(low, group, m, live, cols) + OFFSET * group_number(scale, group, m, live, cols)


@triton.jit
def multiply(
    x, codes, scale, low, n, m, real, live, begin, end, cols, BITS: tl.constexpr, OFFSET: tl.constexpr, N: tl.constexpr, M: tl.constexpr
):
    """The tokens n times the matrix rows m over the groups begin to end, fp32 [N, M]; one token leaves the tensor cores alone."""
    if N == 1:
        y = multiply_one(x + tl.sum(n).to(tl.int64) * cols, codes, scale, low, m, live, begin, end, cols, BITS, OFFSET, M)[None, :]
    else:
        y, at, i = tl.zeros((N, M), tl.float32), n.to(tl.int64)[:, None] * cols, column(tl.arange(0, 32), BITS)
        for group in range(begin, end):
            k = (group * 32 + i)[None, :]
            a = tl.load(x + at + k, mask=real[:, None] & (k < cols), other=0.0)
            level, undo = levelled(a, 1.0)
            part = product(level, group_codes(codes, group, m, live, cols, BITS, OFFSET)) * undo[:, None]
            if scale is not None:
                part *= group_number(scale, group, m, live, cols)[None, :]
            if low is not None:
                part += tl.sum(a, 1)[:, None] * group_middle(scale, low, group, m, live, cols, OFFSET)[None, :]
            y += part
    return y


@triton.jit
def multiply_one(x, codes, scale, low, m, live, begin, end, cols, BITS: tl.constexpr, OFFSET: tl.constexpr, M: tl.constexpr):
    """One token times the matrix rows m, fp32 [M]."""
    y, flat, i = tl.zeros((32, M), tl.float32), tl.zeros((M,), tl.float32), column(tl.arange(0, 32), BITS)
    for group in range(begin, end):
        k = group * 32 + i
        a = tl.load(x + k, mask=k < cols, other=0.0)
        part = a[:, None] * group_codes(codes, group, m, live, cols, BITS, OFFSET).to(tl.float32)
        if scale is not None:
            part *= group_number(scale, group, m, live, cols)[None, :]
        y += part
        if low is not None:
            flat += tl.sum(a) * group_middle(scale, low, group, m, live, cols, OFFSET)
    return tl.sum(y, 0) + flat
