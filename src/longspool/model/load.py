"""From a name to a model that runs: find it, read it, pack it, and say what was done."""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..errors import ModelError
from ..values import Shape
from ..values.packed import FLOATS, Kind, Packed
from .build import Model, build
from .config import Config
from .pull import BUILTIN, Progress, place
from .sources import KINDS, DirectorySource, GGUFSource, Source
from .tokenizer import Tokenizer

_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt"]
_HUB_SKIP = ["original/*", "consolidated*"]
_SAMPLES, _SAMPLE = 256, 4096
_LOOSE = 1 << 26  # bytes read between two calls of trim


@dataclass(frozen=True)
class LoadReport:
    """What was loaded. `kinds` counts tensors by their form in memory, `bytes_packed` is what they occupy there."""

    path: Path
    architecture: str
    parameters: int
    bytes_packed: int
    kinds: dict[str, int]
    notes: tuple[str, ...]
    seconds: float
    own: int = 0
    """Matrices that the recipe's Weights method packed."""


@dataclass(frozen=True)
class Loaded:
    """A model, its tokenizer, and a `fingerprint` that ties saved memories to these weights in this form."""

    model: Model
    tokenizer: Tokenizer
    report: LoadReport
    fingerprint: str
    packer: Packer | None = None


def load(
    name: str,
    weights: str | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    choose: Callable[[Shape], Packer | None] | None = None,
) -> Loaded:
    """Load a built-in model, a GGUF file, a Hugging Face directory or a model of the Hugging Face hub.

    `weights` packs all matrices as int8, int4, f16, bf16 or f32; None keeps them as stored. `progress` hears a fraction and a text;
    `cache_dir` is where built-in models were pulled to. `choose` sees the model's shape before a weight is read, and may name a method that
    packs float matrices its own way. Raises ModelError with one sentence.
    """
    start = time.perf_counter()
    kind = _kind(weights)
    target = _device(device)
    path = locate(name, cache_dir)
    source: Source = GGUFSource(path) if path.is_file() else DirectorySource(path)
    config = Config.from_hf(source.config)
    tokenizer = source.tokenizer()
    packer = choose(config.shape) if choose else None
    shelf = Shelf(source, kind, target, progress or (lambda fraction, text: None), packer)
    model = build(config, shelf)
    trim()
    report = LoadReport(
        path=path,
        architecture=config.family,
        parameters=shelf.parameters,
        bytes_packed=shelf.nbytes,
        kinds=dict(shelf.kinds),
        notes=tuple(f"{count} matrices {text}" for text, count in sorted(source.notes.items())),
        seconds=time.perf_counter() - start,
        own=shelf.own,
    )
    form = weights if packer is None else f"{weights} + {packer}"
    return Loaded(model, tokenizer, report, fingerprint(source, form), packer)


class Packer(Protocol):
    """A recipe's Weights method: the packed form of a float matrix, or None to leave it to the loader."""

    def pack(self, name: str, w: Tensor) -> Packed | None: ...


class Shelf:
    """The weights that a model is built from: each is read, packed and counted when it is asked for."""

    def __init__(self, source: Source, kind: Kind | None, device: torch.device, progress: Progress, packer: Packer | None = None) -> None:
        self.parameters = self.nbytes = self.own = 0
        self._packer = packer
        self.kinds: Counter[str] = Counter()
        self._source, self._kind, self._device, self._progress = source, kind, device, progress
        self._done = self._loose = 0
        self._total = sum(source.sizes.values()) or 1

    def __contains__(self, name: object) -> bool:
        return name in self._source.sizes

    def __getitem__(self, name: str) -> Tensor | Packed:
        if name not in self:
            raise ModelError(f"The checkpoint {self._source.path} has no tensor {name!r}, which the model needs.")
        self._progress(self._done / self._total, f"reading {name}")
        found = self._read(name).to(self._device)
        self._done += self._source.sizes[name]
        self._loose += self._source.sizes[name]
        if self._loose > _LOOSE:
            trim()
            self._loose = 0
        self.parameters += found.numel() if isinstance(found, Tensor) else found.rows * found.cols
        self.nbytes += found.nbytes
        self.kinds["f32" if isinstance(found, Tensor) else found.kind] += 1
        return found

    def _read(self, name: str) -> Tensor | Packed:
        """A tensor in its form; a matrix of floats is offered to the recipe's method first."""
        if self._packer is not None:
            stored = self._source.read(name, None)
            floats = stored if isinstance(stored, Tensor) else stored.unpack() if stored.kind in FLOATS else None
            packed = self._packer.pack(name, floats.float()) if floats is not None and floats.dim() == 2 else None
            if packed is not None:
                self.own += 1
                return packed
        return self._source.read(name, self._form(name))

    def _form(self, name: str) -> Kind | None:
        """The embedding and the head suffer most from 4 bits, so int4 keeps them at 8, as GGUF files do."""
        edge = name.endswith(("embed_tokens.weight", "lm_head.weight"))
        return "int8" if edge and self._kind == "int4" else self._kind


def trim() -> None:
    """Give freed memory back to the system: glibc keeps blocks of up to 32 MB, a third more than the weights after a large model."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # other C libraries keep none and have no such call
            ctypes.CDLL(None).malloc_trim(0)


def fingerprint(source: Source, weights: str | None) -> str:
    """A hash of the config, the form of the weights and samples of the files: cheap, the same wherever the files lie."""
    digest = hashlib.sha256(json.dumps([source.config, weights], sort_keys=True, default=str).encode())
    for path in source.files():
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for at in range(0, size, max(size // _SAMPLES, _SAMPLE)):
                file.seek(at)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:32]


def locate(name: str, cache_dir: Path | None = None) -> Path:
    """The file or directory that a name means. Hub models are downloaded."""
    if name in BUILTIN:
        path = place(name, cache_dir)
        if not path.is_file():
            raise ModelError(f"The built-in model {name} is not here yet: run `longspool pull {name}`.")
        return path
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(file.name for file in path.glob("*.gguf"))
        if files and not (path / "config.json").is_file():
            raise ModelError(f"{path} is a directory with GGUF files; name one of them, for example {path / files[0]}.")
        return path
    if path.suffix == ".safetensors" and path.is_file():
        raise ModelError(f"{path} holds weights alone; name its directory, where config.json and the tokenizer are.")
    if path.is_file():
        return path
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and path.suffix != ".gguf" and not path.parent.exists():
        return _snapshot(name)
    raise ModelError(f"There is no model {name!r}: it is neither built in ({', '.join(BUILTIN)}) nor a file or directory.")


def _snapshot(name: str) -> Path:
    """The local copy of a hub model's safetensors form."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    other = f"a built-in model ({', '.join(BUILTIN)}), a GGUF file or a model directory works without it"
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIP))
    except LocalEntryNotFoundError:
        raise ModelError(f"{name} is no local file or directory, and the Hugging Face hub can't be reached from here; {other}.") from None
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ModelError(f"{name} could not be had from the Hugging Face hub: {reason}; {other}.") from None


def _kind(weights: str | None) -> Kind | None:
    if weights is not None and weights not in KINDS:
        raise ModelError(f"weights={weights!r} is not known; it is one of {', '.join(KINDS)}, or None to keep them as stored.")
    return weights  # type: ignore[return-value]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ModelError(f"The device {name!r} can't be used: {reason}.") from None
    return device
