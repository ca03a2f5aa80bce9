"""Safetensors files that appear whole or not at all, and that are known to be undamaged when they are read.

They are written tensor by tensor, so saving needs no second copy of what is saved. The SHA-256 in the header covers the whole file, with
zeros in its own place.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from ..errors import LongspoolError
from .pool import item

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
_BLANK = "0" * 64
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Form:
    """A kind of file: its format, which ends with a version, what it is called, and the error that a bad one raises."""

    format: str
    name: str
    error: type[LongspoolError]

    @property
    def family(self) -> str:
        return self.format.rpartition("-")[0] + "-"


@dataclass(frozen=True)
class Entry:
    """One tensor of the file; `take` makes it when its turn has come."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    take: Callable[[], Tensor]

    @staticmethod
    def of(name: str, tensor: Tensor) -> Entry:
        return Entry(name, tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * item(self.dtype)


def replace(path: Path, entries: list[Entry], about: dict[str, str], form: Form) -> int:
    """Write beside the target, then put the whole file in its place; its size."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        draft = Path(file.name)
        try:
            size = _write(file, entries, {"format": form.format, "sha256": _BLANK, **about})
            file.close()
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    return size


def _write(file: IO[bytes], entries: list[Entry], about: dict[str, str]) -> int:
    header: dict[str, object] = {"__metadata__": about}
    end = 0
    for e in entries:
        header[e.name] = {"dtype": _DTYPES[e.dtype], "shape": list(e.shape), "data_offsets": [end, end + e.nbytes]}
        end += e.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(start)
    file.write(start)
    for e in entries:
        raw = e.take().contiguous().cpu().view(-1).view(torch.uint8).numpy().data
        digest.update(raw)
        file.write(raw)
    file.seek(start.index(_BLANK.encode()))
    file.write(digest.hexdigest().encode())
    file.flush()
    os.fsync(file.fileno())
    return len(start) + end


def checked(path: Path, form: Form) -> dict[str, str]:
    """The header's facts of a whole, undamaged file of this form; raises the form's error."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= path.stat().st_size - 8:
                raise form.error(f"{path} is damaged or no {form.name}: its header says it is {size:,} bytes long.")
            text = file.read(size)
            about = _metadata(path, text, form)
            digest = hashlib.sha256(size.to_bytes(8, "little") + text.replace(about["sha256"].encode(), _BLANK.encode(), 1))
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise form.error(f"The {form.name} {path} can't be read: {error.strerror or error}.") from None
    if digest.hexdigest() != about["sha256"]:
        raise form.error(f"{path} is damaged: its content does not match its checksum.")
    return about


def _metadata(path: Path, text: bytes, form: Form) -> dict[str, str]:
    try:
        about = json.loads(text).get("__metadata__", {})
    except (ValueError, AttributeError):
        raise form.error(f"{path} is damaged or no {form.name}: its header can't be read.") from None
    if not isinstance(about, dict) or not str(about.get("format", "")).startswith(form.family):
        raise form.error(f"{path} is no {form.name}.")
    if about["format"] != form.format:
        raise form.error(f"{path} is of the format {about['format']!r}, and this version of Longspool reads {form.format!r}.")
    if not isinstance(about.get("sha256"), str) or not about["sha256"]:
        raise form.error(f"{path} is damaged: its header has no checksum.")
    return about
