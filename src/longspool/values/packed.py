"""Matrices that stay packed: 8 or 4 bits in groups of 32 columns, or 2-byte floats, laid out for the kernels.

Rows are woven in panels of 32: a panel holds, column after column, the 32 rows' codes side by side, so that the lanes of a vector
are output rows and a product needs no horizontal sums. A quantized value is `scale * code`, `scale * (code - 8)` for q4_0, or
`scale * code + low`, with fp16 scale and low per row and group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import ModelError

Kind = Literal["q8_0", "q4_0", "q4_1", "int8", "int4", "f16", "bf16", "f32"]

PANEL = 32
GROUP = 32
FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True)
class Form:
    """How a quantized kind stores its values; `block` is the GGUF block's size in bytes, 0 where GGUF has no such kind."""

    bits: int
    offset: int = 0
    low: bool = False
    block: int = 0


FORMS = {
    "q8_0": Form(8, block=34),
    "q4_0": Form(4, offset=8, block=18),
    "q4_1": Form(4, low=True, block=20),
    "int8": Form(8),
    "int4": Form(4, low=True),
}


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix [rows, cols] of one kind.

    `codes` is int8 [P, cols, 32] for 8 bits; int32 [P, cols / 8, 32] for 4 bits, where word w of a group holds column 4w + b in the
    low and 16 + 4w + b in the high half of its byte b, as GGUF's blocks do; the float itself [P, cols, 32] for f16 and bf16; and
    plain [rows, cols] for f32. `scale` and `low` are fp16 [P, cols / 32, 32]. Rows past `rows` in the last panel are zero.
    """

    kind: Kind
    rows: int
    cols: int
    codes: Tensor
    scale: Tensor | None = None
    low: Tensor | None = None
    address: tuple[int, int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # CPU kernels take addresses: fetching three of them anew costs as much as the smallest product.
        parts = (self.codes, self.scale, self.low) if self.codes.device.type == "cpu" else (None, None, None)
        object.__setattr__(self, "address", tuple(0 if t is None else t.data_ptr() for t in parts))

    @staticmethod
    def from_blocks(kind: Kind, raw: Tensor, cols: int) -> Packed:
        """From GGUF blocks, uint8 [M, bytes of a row]; bit-faithful. Kinds: q8_0, q4_0, q4_1."""
        form = FORMS.get(kind)
        if form is None or not form.block:
            raise ModelError(f"There are no GGUF blocks of kind {kind!r}; q8_0, q4_0 and q4_1 can be taken as they are.")
        _whole_groups(kind, cols)
        want = cols // GROUP * form.block
        if raw.dtype != torch.uint8 or raw.dim() != 2 or raw.shape[1] != want:
            raise ModelError(f"{kind} rows of {cols} columns are uint8 [rows, {want}], not {raw.dtype} {list(raw.shape)}.")
        blocks = raw.reshape(raw.shape[0], cols // GROUP, form.block)
        tight = torch.contiguous_format
        half = blocks[..., : 4 if form.low else 2].clone(memory_format=tight).view(torch.float16)  # [M, G, 1 or 2]
        codes = blocks[..., 2 * half.shape[-1] :].clone(memory_format=tight).view(torch.int8 if form.bits == 8 else torch.int32).flatten(1)
        low = half[..., 1] if form.low else None
        return _weave(kind, cols, codes, half[..., 0], low)

    @staticmethod
    def from_float(w: Tensor, kind: Kind) -> Packed:
        """From a float matrix [M, K].

        int8 (also called q8_0) is symmetric, int4 (q4_1) asymmetric with a least-squares search of scale and low; both in groups
        of 32 columns.
        """
        if w.dim() != 2:
            raise ModelError(f"A matrix is packed from [rows, columns], not {list(w.shape)}.")
        rows, cols = w.shape
        if kind in FLOATS:
            w = w.to(FLOATS[kind])
            return Packed(kind, rows, cols, w.contiguous() if kind == "f32" else _panels(w))
        _whole_groups(kind, cols)
        if kind in ("int8", "q8_0"):
            return _weave(kind, cols, *_fit8(w), None)
        if kind in ("int4", "q4_1"):
            parts = [_fit4(block) for block in torch.split(w, max(1, (1 << 20) // max(cols, 1)))] or [_fit4(w)]
            codes, scale, low = (torch.cat(p) for p in zip(*parts, strict=True))
            return _weave(kind, cols, codes, scale, low)
        raise ModelError(f"A float matrix can't be packed as {kind!r}; int8, int4, f16, bf16 and f32 can.")

    @staticmethod
    def concat(parts: list[Packed]) -> Packed:
        """The rows of several matrices of one kind and width, one after another."""
        first = parts[0]
        if any((p.kind, p.cols) != (first.kind, first.cols) for p in parts):
            have = ", ".join(f"{p.kind} [{p.rows}, {p.cols}]" for p in parts)
            raise ModelError(f"Only matrices of one kind and width can be stacked, not {have}.")
        rows = sum(p.rows for p in parts)
        if first.kind == "f32" or all(p.rows % PANEL == 0 for p in parts[:-1]):
            columns = zip(*((p.codes, p.scale, p.low) for p in parts), strict=True)
            return Packed(first.kind, rows, first.cols, *(None if c[0] is None else torch.cat(c) for c in columns))  # type: ignore[arg-type]
        columns = zip(*(p._rows() for p in parts), strict=True)
        return _weave(first.kind, first.cols, *(None if c[0] is None else torch.cat(c) for c in columns))  # type: ignore[arg-type]

    def take(self, ids: Tensor) -> Tensor:
        """Rows by number, int [N] -> fp32 [N, cols]."""
        if self.kind == "f32":
            return self.codes[ids]
        panel, lane = ids // PANEL, ids % PANEL
        return self._decode(*(None if t is None else t[panel, :, lane] for t in (self.codes, self.scale, self.low)))

    def unpack(self) -> Tensor:
        """The whole matrix, fp32 [rows, cols]."""
        return self._decode(*self._rows())

    def part(self, lo: int, hi: int) -> Packed:
        """Rows lo to hi without a copy; lo must be a multiple of 32, and hi too unless it is the end."""
        if self.kind == "f32":
            return Packed(self.kind, hi - lo, self.cols, self.codes[lo:hi])
        if lo % PANEL or (hi % PANEL and hi != self.rows):
            raise ModelError(f"A packed matrix is cut at multiples of {PANEL} rows, not at {lo} and {hi}.")
        cut = slice(lo // PANEL, -(-hi // PANEL))
        return Packed(self.kind, hi - lo, self.cols, *(None if t is None else t[cut] for t in (self.codes, self.scale, self.low)))  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> Packed:
        """The same matrix on another device."""
        parts = (None if t is None else t.to(device) for t in (self.codes, self.scale, self.low))
        return Packed(self.kind, self.rows, self.cols, *parts)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def is_cpu(self) -> bool:
        return self.codes.is_cpu

    @property
    def nbytes(self) -> int:
        """Bytes of live storage, padding included."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scale, self.low) if t is not None)

    def _rows(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Codes, scale and low with the rows in order again, each [rows, ...]."""
        if self.kind == "f32":
            return self.codes, None, None
        codes, scale, low = (
            None if t is None else t.transpose(1, 2).flatten(0, 1)[: self.rows] for t in (self.codes, self.scale, self.low)
        )
        assert codes is not None
        return codes, scale, low

    def _decode(self, codes: Tensor | None, scale: Tensor | None, low: Tensor | None) -> Tensor:
        """fp32 [N, cols] from the codes, scale and low of N rows."""
        assert codes is not None
        if scale is None:
            return codes.float()
        form = FORMS[self.kind]
        if form.bits == 4:
            codes = _nibbles(codes)
        value = _groups(codes).float()
        if form.offset:
            value -= form.offset
        value *= scale.float()[..., None]
        if low is not None:
            value += low.float()[..., None]
        return value.flatten(1)


def _whole_groups(kind: str, cols: int) -> None:
    if cols % GROUP:
        raise ModelError(f"{kind} packs groups of {GROUP} columns, and {cols} is no multiple; keep this matrix as f16, bf16 or f32.")


def _groups(t: Tensor) -> Tensor:
    return t.reshape(t.shape[0], t.shape[1] // GROUP, GROUP)


def _panels(t: Tensor) -> Tensor:
    """[M, C] -> [P, C, 32], the last panel filled up with zero rows."""
    rows, width = t.shape
    count = -(-rows // PANEL)
    return pad(t, (0, 0, 0, count * PANEL - rows)).reshape(count, PANEL, width).transpose(1, 2).contiguous()


def _weave(kind: Kind, cols: int, codes: Tensor, scale: Tensor | None, low: Tensor | None) -> Packed:
    """From codes [M, cols or cols / 8], scale and low [M, G] with the rows in order."""
    woven = (None if t is None else _panels(t) for t in (codes, scale, low))
    return Packed(kind, codes.shape[0], cols, *woven)  # type: ignore[arg-type]


def _nibbles(words: Tensor) -> Tensor:
    """int32 [N, cols / 8] -> uint8 [N, cols]."""
    blocks = words.contiguous().view(torch.uint8).view(words.shape[0], words.shape[1] // 4, 16)
    return torch.cat([blocks & 15, blocks >> 4], dim=-1).flatten(1)


def _fit8(w: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [M, K] and scale fp16 [M, G] of a symmetric fit to each group's largest magnitude."""
    groups = _groups(w.float())
    scale = (groups.abs().amax(-1) / 127).clamp_max(65504.0).half()
    codes = torch.round(groups / _nonzero(scale)[..., None]).clamp(-127, 127)
    return codes.to(torch.int8).flatten(1), scale


def _fit4(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes int32 [M, K / 8], scale and low fp16 [M, G]: the best of several clipped ranges, each refined by least squares."""
    shape = (w.shape[0], w.shape[1] // GROUP)
    groups = w.float().reshape(-1, GROUP).T.contiguous()  # [32, M * G]: sums over a group add whole vectors
    floor, top = groups.amin(0), groups.amax(0)
    scale, low = ((top - floor) / 15).half(), floor.half()
    best = _error4(groups, scale, low)
    for shrink in (0.0, 0.04, 0.09, 0.14):
        fit = _least_squares(groups, (top - floor) * ((1 - 2 * shrink) / 15), floor + (top - floor) * shrink)
        error = _error4(groups, *fit)
        better = error < best
        best = torch.where(better, error, best)
        scale, low = torch.where(better, fit[0], scale), torch.where(better, fit[1], low)
    codes = _codes4(groups, scale, low).to(torch.uint8)
    words = (codes[:16] | codes[16:] << 4).T.clone(memory_format=torch.contiguous_format).view(torch.int32)
    return words.reshape(shape[0], shape[1] * 4), scale.reshape(shape), low.reshape(shape)


def _codes4(groups: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    return (groups - low.float()).div_(_nonzero(scale)).round_().clamp_(0, 15)


def _error4(groups: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    codes = _codes4(groups, scale, low).mul_(scale.float()).add_(low.float())
    return codes.sub_(groups).square_().sum(0)


def _least_squares(groups: Tensor, scale: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and low that fit the groups best with the codes these give."""
    codes = _codes4(groups, scale, low)
    mean = codes.mean(0)
    codes.sub_(mean)
    spread = codes.square().sum(0).clamp_min_(1e-12)
    slope = codes.mul_(groups).sum(0) / spread
    return slope.half(), (groups.mean(0) - slope * mean).half()


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.ones((), dtype=scale.dtype, device=scale.device), scale).float()


assert set(FORMS) | set(FLOATS) == set(get_args(Kind))
