"""Pages on the disk: one file for a pool, a record with a checksum for every piece that is read alone.

The file has no name once it is open, so nothing is left behind however the process ends. Records are written and read by their place in
the file rather than through a mapping: a full disk is then an error that can be told, not a signal.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..errors import LongspoolError, OutOfMemory
from ..roles import Field

CHECK = 8  # bytes of a record's checksum
_BLOCK = 4096  # bytes: holes are punched in whole blocks
_KEEP_SIZE_PUNCH_HOLE = 3


class DamagedPage(LongspoolError):
    """A page on the disk that isn't what was written there: `record` of `file`, or one that can't be read at all."""

    def __init__(self, file: PageFile, record: int, why: str) -> None:
        super().__init__(f"A page on the disk in {file.folder} is damaged: {why}.")
        self.file, self.record = file, record


class PageFile:
    """Records of fields, by number."""

    def __init__(self, forms: Mapping[str, Field], folder: str = "") -> None:
        self.forms, self.folder = dict(forms), folder or tempfile.gettempdir()
        self._sizes = {name: prod(f.shape) * torch.empty((), dtype=f.dtype).element_size() for name, f in forms.items()}
        self.record = sum(self._sizes.values()) + CHECK
        try:
            self._file = tempfile.TemporaryFile(prefix="longspool-", dir=self.folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise OutOfMemory(f"No pages can be kept in {self.folder}: {error.strerror or error}; name another directory.") from None

    def put(self, at: np.ndarray, values: Mapping[str, Tensor]) -> None:
        """Write records at[s], each with its checksum. Raises OutOfMemory where the disk takes no more."""
        if not len(at):
            return
        raw = np.empty((len(at), self.record), np.uint8)
        for name, part in self._parts(raw):
            part[:] = values[name].cpu().contiguous().reshape(len(at), -1).view(torch.uint8).numpy()
        for row, record in zip(raw, at.tolist(), strict=True):
            row[-CHECK:] = _checksum(row, record)
        for a, b in _runs(at):
            self._write(raw[a:b].data.cast("B"), int(at[a]) * self.record)

    def get(self, at: np.ndarray) -> dict[str, Tensor]:
        """Records at[s] as they were written. Raises DamagedPage where one is not."""
        raw = np.zeros((len(at), self.record), np.uint8)
        for a, b in _runs(at):
            self._read(raw[a:b].data.cast("B"), int(at[a]))
        for row, record in zip(raw, at.tolist(), strict=True):
            if not np.array_equal(row[-CHECK:], _checksum(row, record)):
                raise DamagedPage(self, record, "it does not match its checksum")
        return {
            name: torch.from_numpy(part.copy()).view(self.forms[name].dtype).view(len(at), *self.forms[name].shape)
            for name, part in self._parts(raw)
        }

    def release(self, first: int, end: int) -> None:
        """Give the room of records first to end back to the disk, in whole blocks."""
        lo = -(-first * self.record // _BLOCK) * _BLOCK
        hi = end * self.record // _BLOCK * _BLOCK
        if hi > lo and (punch := _fallocate()) is not None:
            punch(self._file.fileno(), _KEEP_SIZE_PUNCH_HOLE, ctypes.c_int64(lo), ctypes.c_int64(hi - lo))

    def clear(self) -> None:
        """Give all of its room back."""
        os.truncate(self._file.fileno(), 0)

    @property
    def room(self) -> int:
        """Bytes that it takes on the disk."""
        return os.fstat(self._file.fileno()).st_blocks * 512

    def _parts(self, raw: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        end = 0
        for name, size in self._sizes.items():
            yield name, raw[:, end : end + size]
            end += size

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            try:
                done = os.pwrite(self._file.fileno(), data, offset)
            except OSError as error:
                said = f"The disk of {self.folder} takes no more pages: {error.strerror or error}"
                raise OutOfMemory(f"{said}; free some room or name another directory.") from None
            data, offset = data[done:], offset + done

    def _read(self, into: memoryview, record: int) -> None:
        """Fill `into`; what lies past the file's end stays zero."""
        offset = record * self.record
        try:
            while into and (done := os.preadv(self._file.fileno(), [into], offset)):
                into, offset = into[done:], offset + done
        except OSError as error:
            raise DamagedPage(self, record, str(error.strerror or error)) from None


def _checksum(row: np.ndarray, record: int) -> np.ndarray:
    """Of what a record holds and of its number, so that one in the wrong place is noticed too."""
    return np.frombuffer(zlib.crc32(row[:-CHECK].data, record & 0xFFFFFFFF).to_bytes(CHECK, "little"), np.uint8)


def _runs(at: np.ndarray) -> Iterator[tuple[int, int]]:
    """Where numbers follow one another, as ranges of indices."""
    cuts = [0, *(np.flatnonzero(np.diff(at) != 1) + 1).tolist(), len(at)]
    return ((a, b) for a, b in itertools.pairwise(cuts) if a < b)


@functools.cache
def _fallocate() -> Callable[..., int] | None:
    """The system's call that punches holes into files, where there is one."""
    return getattr(ctypes.CDLL(None), "fallocate", None) if sys.platform.startswith("linux") else None
