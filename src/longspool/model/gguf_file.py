"""Reading a GGUF file: its metadata, its table of tensors and, one tensor at a time, their bytes.

The header is parsed here and not by the gguf package's reader, which builds several numpy views for each of the 100,000 strings of a
vocabulary and takes seconds. Types, block sizes and dequantization are the package's.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import ModelError

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")
_VERSIONS = (2, 3)
_LEAST_ENTRY = 13  # bytes of the shortest metadata entry: an empty key, a type and one byte
_LEAST_TENSOR = 24  # bytes of the shortest table entry


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in torch's order, `start` counts from the beginning of the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    nbytes: int


class _Cursor:
    """Reads little-endian values one after another and never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple[Scalar, ...]:
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def number(self, form: str = "Q") -> int:
        return int(self.take(form)[0])

    def fits(self, count: int, size: int) -> int:
        """The count, if that many items of at least this size can follow."""
        if count * size > len(self.data) - self.at:
            raise struct.error(f"{count} items of {size} bytes")
        return count

    def text(self) -> str:
        length = self.fits(self.number(), 1)
        start, self.at = self.at, self.at + length
        return self.data[start : self.at].decode("utf-8")

    def texts(self, count: int) -> list[Scalar]:
        """Like `text` many times over, without its calls: a vocabulary has 100,000 of them."""
        data, at, size = self.data, self.at, len(self.data)
        out: list[Scalar] = []
        for _ in range(count):
            (length,) = _U64.unpack_from(data, at)
            at += 8 + length
            if at > size:
                raise struct.error(f"a string of {length} bytes")
            out.append(data[at - length : at].decode())
        self.at = at
        return out

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.take(_SCALARS[kind])[0]
        inner, count = self.number("I"), self.number()
        if inner == _STRING:
            return self.texts(self.fits(count, 8))
        form = _SCALARS[inner]
        return list(self.take(f"{self.fits(count, struct.calcsize('<' + form))}{form}"))


class GGUFFile:
    """An open GGUF file. `metadata` and `tensors` are read at once; `raw` copies one tensor's bytes and lets go of its pages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _open(path)
        cursor = _Cursor(self._map)
        try:
            self.metadata, table = _header(cursor, path)
            self.tensors = {info.name: info for info in _tensors(cursor, table, self.metadata, path)}
        except (struct.error, KeyError, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise ModelError(f"The GGUF header of {path} is damaged near byte {cursor.at}: {error}.") from None

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes, uint8 [rows, bytes of a row] (one row for a vector), as a copy."""
        info = self.tensors[name]
        data: np.ndarray = np.frombuffer(self._map, np.uint8, info.nbytes, info.start).copy()
        self._release(info.start, info.start + info.nbytes)
        return np.reshape(data, (prod(info.shape[:-1]), -1))

    def close(self) -> None:
        self._map.close()

    def _release(self, start: int, end: int) -> None:
        """Give read pages back, so that resident memory does not grow by the file's size while its matrices are packed."""
        start -= start % mmap.PAGESIZE
        if sys.platform != "win32":
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


def _open(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        magic = file.read(8)
        if len(magic) < 8 or magic[:4] != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it begins with {magic[:4]!r} where b'GGUF' is expected.")
        version = int.from_bytes(magic[4:], "little")
        if version not in _VERSIONS:
            swapped = " (a big-endian file)" if int.from_bytes(magic[4:], "big") in _VERSIONS else ""
            raise ModelError(f"{path} is GGUF version {version}{swapped}; versions 2 and 3, little-endian, can be read.")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _header(cursor: _Cursor, path: Path) -> tuple[dict[str, Value], int]:
    """The metadata and the number of tensors; leaves the cursor at the table."""
    cursor.at = 8
    tensors, entries = cursor.number(), cursor.number()
    metadata: dict[str, Value] = {}
    for _ in range(cursor.fits(entries, _LEAST_ENTRY)):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    if int(str(metadata.get("split.count", 1))) > 1:
        raise ModelError(f"{path} is one part of a split GGUF model; join the parts with `llama-gguf-split --merge` first.")
    return metadata, cursor.fits(tensors, _LEAST_TENSOR)


def _tensors(cursor: _Cursor, count: int, metadata: dict[str, Value], path: Path) -> Iterator[TensorInfo]:
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align <= 0 or align & (align - 1):
        raise ModelError(f"The GGUF header of {path} is damaged: an alignment of {align!r} is no power of two.")
    table = []
    for _ in range(count):
        name = cursor.text()
        dims = cursor.take(f"{cursor.fits(cursor.number('I'), 8)}Q")
        table.append((name, tuple(int(d) for d in reversed(dims)), cursor.number("I"), cursor.number()))
    base = -(-cursor.at // align) * align
    seen = set()
    for name, shape, kind, offset in table:
        if name in seen or not shape:
            raise ModelError(
                f"The GGUF header of {path} is damaged: tensor {name!r} {'appears twice' if name in seen else 'has no shape'}."
            )
        seen.add(name)
        yield _info(name, shape, kind, base + offset, len(cursor.data), path)


def _info(name: str, shape: tuple[int, ...], kind: int, start: int, size: int, path: Path) -> TensorInfo:
    try:
        known = GGMLQuantizationType(kind)
    except ValueError:
        raise ModelError(f"Tensor {name} of {path} has the unknown GGUF type {kind}.") from None
    block, block_bytes = GGML_QUANT_SIZES[known]
    if shape[-1] % block:
        raise ModelError(f"Tensor {name} of {path} has rows of {shape[-1]} values, which {known.name} blocks of {block} can't hold.")
    nbytes = prod(shape) // block * block_bytes
    if start + nbytes > size:
        raise ModelError(f"{path} is truncated: tensor {name} ends at byte {start + nbytes}, but the file has {size}.")
    return TensorInfo(name, known, shape, start, nbytes)
