"""What the Triton kernels over packed matrices share: codes as exact fp16 numbers, a group of 32 columns at a time, with their scales.

The nibbles of a word are taken apart in the order of its bits, and the activations are read in that order of columns instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..values import Packed
from ..values.packed import FORMS


@dataclass(frozen=True)
class Layout:
    """How a kind is stored, as constants of a kernel: BITS 4, 8 or 16 (a 2-byte float), what is taken from a code, and its scales."""

    bits: int
    offset: int = 0
    scaled: bool = False
    low: bool = False


def layout(w: Packed) -> Layout:
    form = FORMS.get(w.kind)
    return Layout(16) if form is None else Layout(form.bits, form.offset, True, form.low)


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
    """One group of columns of the matrix rows m, [32, M]: exact fp16 codes, or the 2-byte floats themselves."""
    panel, lane = m // 32, m % 32
    if BITS == 4:
        word = group * 4 + tl.arange(0, 4)
        at = panel.to(tl.int64)[None, :] * (cols // 8 * 32) + word[:, None] * 32 + lane[None, :]
        words, shift = tl.load(codes + at, mask=live[None, :], other=0), tl.arange(0, 8) * 4
        x = tl.reshape((words[:, None, :] >> shift[None, :, None]) & 15, (32, m.shape[0]))
    else:
        k = group * 32 + tl.arange(0, 32)
        at = panel.to(tl.int64)[None, :] * (cols * 32) + k[:, None] * 32 + lane[None, :]
        x = tl.load(codes + at, mask=live[None, :] & (k < cols)[:, None], other=0)
    if BITS != 16:
        x = (x - OFFSET).to(tl.float16)
    return x


@triton.jit
def group_number(numbers, group, m, live, cols):
    """A group's scale or low of the matrix rows m, fp32 [M]."""
    at = (m // 32).to(tl.int64) * (cols // 32 * 32) + group * 32 + m % 32
    return tl.load(numbers + at, mask=live, other=0.0).to(tl.float32)
