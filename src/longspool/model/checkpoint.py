"""Reading a Hugging Face directory: config.json and safetensors, sharded or not. Pickled weights are never opened."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ModelError

_INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies and how."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        dtype = _DTYPES.get(self.dtype)
        return prod(self.shape) * (dtype.itemsize if dtype else 1)


class Directory:
    """A model directory. `tensors` is read at once from the shards' headers; `read` loads one tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json", "the model's config")
        self.tensors: dict[str, Stored] = {}
        for shard, names in _shards(path).items():
            self._scan(shard, names)

    def read(self, name: str) -> Tensor:
        """One tensor in memory of its own. The file is opened anew each time: a handle held open keeps all that was read resident."""
        stored = self.tensors[name]
        if stored.dtype not in _DTYPES:
            raise ModelError(
                f"Tensor {name} of {stored.shard} is stored as {stored.dtype}, which is not supported; known are {', '.join(_DTYPES)}."
            )
        with safe_open(stored.shard, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def _scan(self, shard: Path, names: list[str] | None) -> None:
        """Take up a shard's tensors: those named, or all."""
        try:
            with safe_open(shard, "pt") as file:
                held = set(file.keys())
                for name in held if names is None else names:
                    if name not in held:
                        raise ModelError(f"{shard} lacks the tensor {name} that {_INDEX} places there.")
                    part = file.get_slice(name)
                    self.tensors[name] = Stored(shard, part.get_dtype(), tuple(part.get_shape()))
        except SafetensorError as error:
            raise ModelError(f"{shard} is damaged or no safetensors file: {error}.") from None


def read_json(path: Path, what: str) -> dict[str, object]:
    """A JSON object from a file."""
    if not path.is_file():
        raise ModelError(f"{path.parent} has no {path.name} ({what}).")
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is no readable JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds {type(found).__name__} where a JSON object is expected.")
    return found


def _shards(path: Path) -> Mapping[Path, list[str] | None]:
    """Each weight file and the tensors to take from it (None: all)."""
    if (path / _INDEX).is_file():
        return _indexed(path)
    files = sorted(path.glob("*.safetensors"))
    if files:
        return dict.fromkeys(files)
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLED)
    if pickled:
        raise ModelError(
            f"{path} has only pickled weights ({pickled[0]}), which are not opened because unpickling runs code; "
            "take the model's safetensors or GGUF form, or save it again with save_pretrained()."
        )
    raise ModelError(f"{path} holds no weights: a *.safetensors file is expected beside config.json.")


def _indexed(path: Path) -> Mapping[Path, list[str] | None]:
    index = read_json(path / _INDEX, "the index of the shards").get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(v, str) for v in index.values()):
        raise ModelError(f"{path / _INDEX} has no weight_map from tensors to files.")
    shards: dict[Path, list[str] | None] = {}
    for name, file in index.items():
        shard = path / file
        if shard.parent != path:
            raise ModelError(f"{path / _INDEX} names the shard {file!r}, which is not in that directory.")
        if not shard.is_file():
            raise ModelError(f"{path} lacks the shard {file} that {_INDEX} names.")
        names = shards.setdefault(shard, [])
        assert names is not None
        names.append(name)
    return shards
