"""Checkpoints on disk, as the model wants them: tensors under Hugging Face names, one at a time, packed as they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from ..errors import ModelError
from ..values.packed import GROUP, PANEL, Kind, Packed
from .checkpoint import Directory
from .gguf_file import GGUFFile, TensorInfo
from .names import family, hf_config, hf_names
from .tokenizer import Tokenizer

KINDS = ("int8", "int4", "f16", "bf16", "f32")

_AS_STORED: dict[GGMLQuantizationType, Kind] = {
    GGMLQuantizationType.Q8_0: "q8_0",
    GGMLQuantizationType.Q4_0: "q4_0",
    GGMLQuantizationType.Q4_1: "q4_1",
}
_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_SHORT = {torch.float16: "f16", torch.bfloat16: "bf16"}
_SLICE = 1 << 22  # values that are unpacked to fp32 at a time


class GGUFSource:
    """A GGUF file. `config` and `sizes` (bytes on disk under each name) speak Hugging Face; `notes` counts what reading changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: Counter[str] = Counter()
        self._file = GGUFFile(path)
        self._family = family(self._file.metadata)
        self._names = hf_names(self._family, self._file.tensors)
        shapes = {name: info.shape for name, info in self._file.tensors.items()}
        factors = {stem: self._vector(self._file.tensors[f"{stem}.weight"]).tolist() for stem in _factors(shapes)}
        self.config = hf_config(self._file.metadata, shapes, factors)
        self.sizes = {name: self._file.tensors[theirs].nbytes for name, theirs in self._names.items()}

    def files(self) -> list[Path]:
        return [self.path]

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf(self._file.metadata)

    def read(self, name: str, kind: Kind | None) -> Tensor | Packed:
        """A vector in fp32, or a matrix packed as `kind` (None: as stored)."""
        info = self._file.tensors[self._names[name]]
        heads = self._heads(name)
        if heads and info.shape[0] % (2 * heads):
            heads = 0  # a wrong shape, which the model's builder tells best
        if len(info.shape) == 1:
            vector = self._vector(info)
            if heads:
                vector = torch.from_numpy(_unpermuted(vector.numpy(), heads))
            return vector - 1 if self._family.norm_offset and name.endswith("norm.weight") else vector
        raw = self._file.raw(info.name)
        return self._matrix(info, _unpermuted(raw, heads) if heads else raw, kind)

    def _matrix(self, info: TensorInfo, raw: np.ndarray, kind: Kind | None) -> Tensor | Packed:
        cols = info.shape[-1]
        if info.kind in _FLOATS:
            return pack(torch.from_numpy(raw).view(_FLOATS[info.kind]), kind, self.notes)
        stored = _AS_STORED.get(info.kind)
        if stored and kind is None:
            return Packed.from_blocks(stored, torch.from_numpy(raw), cols)
        self.notes[f"{info.kind.name} unpacked" + ("" if kind == "f32" else f" and packed as {kind or 'q8_0'}")] += 1
        step = _rows_at_once(cols)
        slices = (self._dequantized(raw[at : at + step], info) for at in range(0, len(raw), step))
        return torch.cat(list(slices)) if kind == "f32" else _packed(slices, kind or "q8_0")

    def _dequantized(self, raw: np.ndarray, info: TensorInfo) -> Tensor:
        try:
            return torch.from_numpy(gguf.quants.dequantize(raw, info.kind))
        except NotImplementedError:
            known = ", ".join(k.name for k in (*_FLOATS, *_AS_STORED)) + ", Q5_0, Q5_1 and the K types"
            raise ModelError(f"Tensor {info.name} has the type {info.kind.name}, which is not supported; known are {known}.") from None

    def _vector(self, info: TensorInfo) -> Tensor:
        raw = self._file.raw(info.name)
        if info.kind in _FLOATS:
            return torch.from_numpy(raw).view(_FLOATS[info.kind]).flatten().float()
        return self._dequantized(raw, info).flatten()

    def _heads(self, name: str) -> int:
        """How many heads' rows are permuted in this tensor."""
        key = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        return int(str(self.config[key])) if key and self._family.permuted else 0


class DirectorySource:
    """A Hugging Face directory, in the same terms."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: Counter[str] = Counter()
        self._directory = Directory(path)
        self.config = self._directory.config
        self.sizes = {name: stored.nbytes for name, stored in self._directory.tensors.items()}

    def files(self) -> list[Path]:
        return sorted({stored.shard for stored in self._directory.tensors.values()})

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_directory(self.path, self.config)

    def read(self, name: str, kind: Kind | None) -> Tensor | Packed:
        stored = self._directory.read(name)
        return pack(stored, kind, self.notes) if stored.dim() == 2 else stored.float()


Source = GGUFSource | DirectorySource


def pack(w: Tensor, kind: Kind | None, notes: Counter[str]) -> Tensor | Packed:
    """A float matrix as `kind`, or as it is: 2-byte floats packed bit by bit, fp32 as a plain tensor."""
    if kind in ("int8", "int4") and w.shape[1] % GROUP:
        notes[f"kept as floats, since the width is no multiple of {GROUP}"] += 1
        kind = None
    kind = kind or _SHORT.get(w.dtype)  # type: ignore[assignment]
    return w.float() if kind is None or kind == "f32" else _packed(torch.split(w, _rows_at_once(w.shape[1])), kind)


def _packed(slices: Iterable[Tensor], kind: Kind) -> Packed:
    return Packed.concat([Packed.from_float(part, kind) for part in slices])


def _rows_at_once(cols: int) -> int:
    """So many rows that a slice stays small, in whole panels, so that packed slices can be stacked as they are."""
    return max(_SLICE // max(cols, 1) // PANEL, 1) * PANEL


def _unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp turns neighbouring rows as a pair, Hugging Face row i with row i + half; quantized rows move whole."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _factors(names: Iterable[str]) -> Iterator[str]:
    """The tensors that hold divisors of rope frequencies."""
    return (name.removesuffix(".weight") for name in names if name.startswith(("rope_freqs.", "rope_factors_")))


assert set(KINDS) <= set(get_args(Kind))
