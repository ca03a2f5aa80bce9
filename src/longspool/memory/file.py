"""A memory on disk: a safetensors file with every page as it is stored, and a header that says which model and recipe it belongs to."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import LongspoolError, MemoryFileError
from ..plan import Plan
from . import books
from .fits import Fits
from .layer import LayerMemory, Rotate
from .memory import Memory
from .pool import Pool, item
from .pools import Pools
from .sealed import Entry, Form, checked, replace
from .zone import Zone

FORMAT = "longspool-memory-1"
_FORM = Form(FORMAT, "saved memory", MemoryFileError)
_ZONES = ("recent", "settled", "book")


def save(memory: Memory, path: Path, fingerprint: str) -> int:
    """Write a memory at the size that its methods give it; the file appears whole or not at all. Returns its size in bytes.

    Raises MemoryFileError where it can't be written."""
    entries = [entry for layer in memory.layers for entry in _entries(layer)]
    if memory.text is not None:
        entries.append(Entry.of("text", torch.from_numpy(memory.text.ids)))
    scalars: dict[str, dict[str, object]] = {}
    for slug, note in memory.notes.items():
        entries += [Entry.of(f"note.{slug}.{key}", value) for key, value in note.items() if isinstance(value, Tensor)]
        scalars[slug] = {key: value for key, value in note.items() if not isinstance(value, Tensor)}
    try:
        about = _about(memory.plan, fingerprint, memory.pools.fits) | {
            "seen": str(memory.seen),
            "gone": json.dumps([layer.gone for layer in memory.layers]),
            "notes": json.dumps(scalars),
        }
        return replace(path, entries, about, _FORM)
    except TypeError as error:
        raise MemoryFileError(
            f"The memory can't be saved, since a method's notes hold what is neither tensor nor number: {error}."
        ) from None
    except OSError as error:
        raise MemoryFileError(f"The memory can't be written to {path}: {error.strerror or error}.") from None


def load(path: Path, plan: Plan, pools: Pools, rotates: Sequence[Rotate | None], fingerprint: str) -> Memory:
    """Read a memory that `save` wrote.

    Raises MemoryFileError where the file is damaged, or belongs to another model, recipe or version."""
    about = checked(path, _FORM)
    for key, own in _about(plan, fingerprint, pools.fits).items():
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
            if memory.text is not None:
                memory.text.put(file.get_tensor("text").numpy())
    except LongspoolError:
        memory.free()
        raise
    except (KeyError, ValueError) as error:
        memory.free()
        raise MemoryFileError(f"{path} does not hold what this version of its methods stores: {error}.") from None
    memory.seen = int(about["seen"])
    return memory


_WHAT = {
    "model": "the model",
    "recipe": "the recipe",
    "dtype": "the storage type",
    "pages": "the page sizes",
    "recent": "a recent zone of",
    "fits": "methods that were fitted as",
}


def _about(plan: Plan, fingerprint: str, fits: Fits) -> dict[str, str]:
    """What a file and its reader must agree on."""
    pages = ", ".join(str(layer.page) for layer in plan.layers)
    about = {"model": fingerprint, "recipe": str(plan), "dtype": str(plan.dtype), "pages": pages, "recent": str(plan.base.recent)}
    fitted = ", ".join(fit.digest for fit in fits.of(plan.methods))
    return about | ({"fits": fitted} if fitted else {})


def _entries(layer: LayerMemory) -> Iterator[Entry]:
    for name, zone in zip(_ZONES, layer.zones, strict=False):
        yield from _zone(f"{layer.layer}.{name}", zone, name == "settled" and layer.encode.packs)
    yield Entry.of(f"{layer.layer}.pos", torch.from_numpy(layer.pos.array()))
    for name, tensor in layer.index.items():
        yield Entry.of(f"{layer.layer}.index.{name}", tensor)
    if layer.past:
        yield Entry.of(f"{layer.layer}.past", torch.cat(layer.past))
    if layer.drawn is not None:
        yield Entry.of(f"{layer.layer}.drawn", layer.drawn.whole(layer.longest + len(layer.pos)))


def _zone(name: str, zone: Zone, packed: bool) -> Iterator[Entry]:
    """A zone's tensors; `packed` ones go through an entropy coder."""
    pages = torch.from_numpy(zone.pages()).long()
    yield Entry.of(f"{name}.length", torch.from_numpy(zone.length.copy()))
    for field, form in zone.pool.fields.items():
        take = functools.partial(_field, zone.pool, pages, field)
        if packed:
            raw = take().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
            yield Entry.of(f"{name}.{field}", torch.frombuffer(bytearray(zlib.compress(raw)), dtype=torch.uint8))
            continue
        yield Entry(f"{name}.{field}", (len(pages), *form.shape), form.dtype, take)


def _field(pool: Pool, pages: Tensor, field: str) -> Tensor:
    return pool.get(pages, names=[field])[field]


def _restore(layer: LayerMemory, tensors: dict[str, Tensor], gone: int) -> None:
    """Fill an empty layer. Raises KeyError or ValueError where the tensors are not what the layer stores."""
    for name, zone in zip(_ZONES, layer.zones, strict=False):
        packed = name == "settled" and layer.encode.packs
        _refill(zone, packed, {key.split(".", 1)[1]: tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")})
    if layer.settled is not None:
        books.enter(layer, layer.settled.pages())
    layer.pos.append(tensors["pos"].numpy())
    layer.account()
    layer.gone = gone
    if layer.drawn is not None:
        layer.drawn.put(tensors["drawn"])
    layer.keep({key.split(".", 1)[1]: tensor.to(layer.device) for key, tensor in tensors.items() if key.startswith("index.")})
    if "past" in tensors:
        layer.remember([tensors["past"]])


def _refill(zone: Zone, packed: bool, tensors: dict[str, Tensor]) -> None:
    zone.grow(tensors["length"].numpy())
    pages = torch.from_numpy(zone.pages()).long()
    for field, form in zone.pool.fields.items():
        found, want = tensors[field], (len(pages), *form.shape)
        if packed:
            found = tensors[field] = _unpacked(found, want, form.dtype)
        if tuple(found.shape) != want or found.dtype != form.dtype:
            raise ValueError(f"{field} is {found.dtype} {list(found.shape)} where {form.dtype} {list(want)} is expected")
    zone.pool.put(pages, {field: tensors[field] for field in zone.pool.fields})


def _unpacked(packed: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What the entropy coder made of a tensor. Raises ValueError where it is none of this size."""
    try:
        raw = bytearray(zlib.decompress(packed.numpy().tobytes()))
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(raw) != prod(shape) * item(dtype):
        raise ValueError(f"{len(raw)} bytes where {dtype} {list(shape)} is expected")
    return torch.frombuffer(raw, dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)
