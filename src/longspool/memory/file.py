"""A memory on disk: a safetensors file with every page as it is stored, and a header that says which model and recipe it belongs to.

It is written tensor by tensor, so saving needs no second copy of the memory. The SHA-256 in the header covers the whole file, with
zeros in its own place.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import LongspoolError, MemoryFileError
from ..plan import Plan
from . import books, index
from .layer import LayerMemory, Rotate
from .memory import Memory
from .pool import Pool, item
from .pools import Pools
from .zone import Zone

FORMAT = "longspool-memory-1"
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
_ZONES = ("recent", "settled", "book")
_BLANK = "0" * 64
_BLOCK = 1 << 22


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


def save(memory: Memory, path: Path, fingerprint: str) -> int:
    """Write a memory at the size that its methods give it; the file appears whole or not at all. Returns its size in bytes.

    Raises MemoryFileError where it can't be written."""
    entries = [entry for layer in memory.layers for entry in _entries(layer)]
    scalars: dict[str, dict[str, object]] = {}
    for slug, note in memory.notes.items():
        entries += [Entry.of(f"note.{slug}.{key}", value) for key, value in note.items() if isinstance(value, Tensor)]
        scalars[slug] = {key: value for key, value in note.items() if not isinstance(value, Tensor)}
    try:
        about = _about(memory.plan, fingerprint) | {
            "seen": str(memory.seen),
            "gone": json.dumps([layer.gone for layer in memory.layers]),
            "notes": json.dumps(scalars),
        }
        return _replace(path, entries, about)
    except TypeError as error:
        raise MemoryFileError(
            f"The memory can't be saved, since a method's notes hold what is neither tensor nor number: {error}."
        ) from None
    except OSError as error:
        raise MemoryFileError(f"The memory can't be written to {path}: {error.strerror or error}.") from None


def load(path: Path, plan: Plan, pools: Pools, rotates: Sequence[Rotate | None], fingerprint: str) -> Memory:
    """Read a memory that `save` wrote.

    Raises MemoryFileError where the file is damaged, or belongs to another model, recipe or version."""
    about = _checked(path)
    for key, own in _about(plan, fingerprint).items():
        if about.get(key) != own:
            raise MemoryFileError(f"{path} was saved with {_WHAT[key]} {about.get(key)!r}, and this is {own!r}.")
    memory = Memory(plan, pools, rotates)
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            for layer, gone in zip(memory.layers, json.loads(about["gone"]), strict=True):
                own_names = [name for name in names if name.startswith(f"{layer.layer}.")]
                _restore(layer, {name.split(".", 1)[1]: file.get_tensor(name) for name in own_names}, gone)
            for slug, note in json.loads(about["notes"]).items():
                tensors = {name.split(".", 2)[2]: file.get_tensor(name) for name in names if name.startswith(f"note.{slug}.")}
                memory.notes[slug] = note | tensors
    except LongspoolError:
        memory.free()
        raise
    except (KeyError, ValueError) as error:
        memory.free()
        raise MemoryFileError(f"{path} does not hold what this version of its methods stores: {error}.") from None
    memory.seen = int(about["seen"])
    return memory


_WHAT = {"model": "the model", "recipe": "the recipe", "dtype": "the storage type", "pages": "the page sizes", "recent": "a recent zone of"}


def _about(plan: Plan, fingerprint: str) -> dict[str, str]:
    """What a file and its reader must agree on."""
    pages = ", ".join(str(layer.page) for layer in plan.layers)
    return {"model": fingerprint, "recipe": str(plan), "dtype": str(plan.dtype), "pages": pages, "recent": str(plan.recent)}


def _entries(layer: LayerMemory) -> Iterator[Entry]:
    for name, zone in zip(_ZONES, layer.zones, strict=False):
        yield from _zone(f"{layer.layer}.{name}", zone)
    yield Entry.of(f"{layer.layer}.pos", torch.from_numpy(layer.pos.array()))
    for name, tensor in layer.index.items():
        yield Entry.of(f"{layer.layer}.index.{name}", tensor)
    if layer.past:
        yield Entry.of(f"{layer.layer}.past", torch.cat(layer.past))


def _zone(name: str, zone: Zone) -> Iterator[Entry]:
    pages = torch.from_numpy(zone.pages()).long()
    yield Entry.of(f"{name}.length", torch.from_numpy(zone.length.copy()))
    for field, form in zone.pool.fields.items():
        take = functools.partial(_field, zone.pool, pages, field)
        yield Entry(f"{name}.{field}", (len(pages), *form.shape), form.dtype, take)


def _field(pool: Pool, pages: Tensor, field: str) -> Tensor:
    return pool.get(pages, names=[field])[field]


def _restore(layer: LayerMemory, tensors: dict[str, Tensor], gone: int) -> None:
    """Fill an empty layer. Raises KeyError or ValueError where the tensors are not what the layer stores."""
    for name, zone in zip(_ZONES, layer.zones, strict=False):
        _refill(zone, {key.split(".", 1)[1]: tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")})
    if layer.settled is not None:
        books.enter(layer, layer.settled.pages())
    layer.pos.append(tensors["pos"].numpy())
    layer.account()
    layer.gone = gone
    index.keep(layer, {key.split(".", 1)[1]: tensor.to(layer.device) for key, tensor in tensors.items() if key.startswith("index.")})
    if "past" in tensors:
        layer.remember([tensors["past"]])


def _refill(zone: Zone, tensors: dict[str, Tensor]) -> None:
    zone.grow(tensors["length"].numpy())
    pages = torch.from_numpy(zone.pages()).long()
    for field, form in zone.pool.fields.items():
        found, want = tensors[field], (len(pages), *form.shape)
        if tuple(found.shape) != want or found.dtype != form.dtype:
            raise ValueError(f"{field} is {found.dtype} {list(found.shape)} where {form.dtype} {list(want)} is expected")
    zone.pool.put(pages, {field: tensors[field] for field in zone.pool.fields})


def _replace(path: Path, entries: list[Entry], about: dict[str, str]) -> int:
    """Write beside the target, then put the whole file in its place."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        draft = Path(file.name)
        try:
            size = _write(file, entries, about)
            file.close()
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    return size


def _write(file: IO[bytes], entries: list[Entry], about: dict[str, str]) -> int:
    header: dict[str, object] = {"__metadata__": {"format": FORMAT, "sha256": _BLANK, **about}}
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


def _checked(path: Path) -> dict[str, str]:
    """The header's facts of a whole, undamaged file of this format."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= path.stat().st_size - 8:
                raise MemoryFileError(f"{path} is damaged or no saved memory: its header says it is {size:,} bytes long.")
            text = file.read(size)
            about = _metadata(path, text)
            digest = hashlib.sha256(size.to_bytes(8, "little") + text.replace(about["sha256"].encode(), _BLANK.encode(), 1))
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise MemoryFileError(f"The memory {path} can't be read: {error.strerror or error}.") from None
    if digest.hexdigest() != about["sha256"]:
        raise MemoryFileError(f"{path} is damaged: its content does not match its checksum.")
    return about


def _metadata(path: Path, text: bytes) -> dict[str, str]:
    try:
        about = json.loads(text).get("__metadata__", {})
    except (ValueError, AttributeError):
        raise MemoryFileError(f"{path} is damaged or no saved memory: its header can't be read.") from None
    if not isinstance(about, dict) or not str(about.get("format", "")).startswith("longspool-memory-"):
        raise MemoryFileError(f"{path} is no saved memory.")
    if about["format"] != FORMAT:
        raise MemoryFileError(f"{path} is of the format {about['format']!r}, and this version of Longspool reads {FORMAT!r}.")
    if not isinstance(about.get("sha256"), str) or not about["sha256"]:
        raise MemoryFileError(f"{path} is damaged: its header has no checksum.")
    return about
