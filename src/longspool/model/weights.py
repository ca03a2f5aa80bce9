"""Where a model's weights come from, by Hugging Face tensor name: a checkpoint whose shapes are checked, or noise."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import ModelError
from ..values.packed import Packed

M = TypeVar("M", bound="Tensor | Packed")


class Weights(Protocol):
    """A mapping from Hugging Face tensor names."""

    def __getitem__(self, name: str, /) -> Tensor | Packed: ...

    def __contains__(self, name: object, /) -> bool: ...


class Source(Protocol):
    """What a block is built from."""

    def matrix(self, name: str, rows: int, cols: int) -> Tensor | Packed:
        """The weight `name`.weight, [rows, cols]."""
        ...

    def vector(self, name: str, size: int) -> Tensor:
        """The tensor `name`, fp32 [size]."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        ...


class Checkpoint:
    """Weights as they were stored. A missing tensor or a wrong shape is a ModelError."""

    # Multimodal checkpoints hold the decoder under one of the longer prefixes.
    ROOTS = ("model.", "model.language_model.", "language_model.model.", "")

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.root = next((r for r in self.ROOTS if r + "embed_tokens.weight" in weights), "model.")

    def matrix(self, name: str, rows: int, cols: int) -> Tensor | Packed:
        found = self._get(name + ".weight")
        if isinstance(found, Tensor) and found.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise ModelError(f"The tensor {self._full(name + '.weight')!r} holds {found.dtype} values, where plain floats are needed.")
        shape = list(found.shape) if isinstance(found, Tensor) else [found.rows, found.cols]
        return self._checked(name + ".weight", found, shape, [rows, cols])

    def vector(self, name: str, size: int) -> Tensor:
        found = self._get(name)
        if not isinstance(found, Tensor):
            raise ModelError(f"The tensor {self._full(name)!r} is a packed matrix, where a vector of {size} is needed.")
        return self._checked(name, found, list(found.shape), [size]).detach().float()

    def has(self, name: str) -> bool:
        return self._full(name) in self.weights

    def _full(self, name: str) -> str:
        if name.startswith("lm_head"):
            return "language_model." + name if self.root == "language_model.model." else name
        return self.root + name

    def _get(self, name: str) -> Tensor | Packed:
        if not self.has(name):
            raise ModelError(f"The checkpoint has no tensor {self._full(name)!r}, which the model needs.")
        return self.weights[self._full(name)]

    def _checked(self, name: str, found: M, shape: list[int], want: list[int]) -> M:
        if shape != want:
            raise ModelError(f"The tensor {self._full(name)!r} has the shape {shape}, where the config asks for {want}.")
        return found


class Noise:
    """Random weights: activations keep their size, attention is sharp, and the output varies. `norm` is the middle of norm weights."""

    def __init__(self, seed: int, norm: float) -> None:
        self.seed = torch.Generator().manual_seed(seed)
        self.norm = norm

    def matrix(self, name: str, rows: int, cols: int) -> Tensor:
        gain = 1.0 if name == "embed_tokens" else 1.5 * cols**-0.5
        return torch.randn(rows, cols, generator=self.seed) * gain

    def vector(self, name: str, size: int) -> Tensor:
        middle = self.norm if name.endswith("norm.weight") else 0.0
        return torch.randn(size, generator=self.seed) * 0.1 + middle

    def has(self, name: str) -> bool:
        return False
