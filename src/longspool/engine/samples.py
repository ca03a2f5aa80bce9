"""What a method is fitted on: the model's runs over texts, and a model that can be differentiated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import PlanError
from ..kernels import rope
from ..memory import Memory, Pools, advance
from ..model.build import Model
from ..model.grad import Attend, attended, states
from ..plan import PAGE, resolve
from ..values import Shape, Step

VECTORS = ("keys", "bare", "values", "queries", "stream")
"""What a run can note of every layer."""
LENGTH = 2048  # tokens of a text at most


class Runs:
    """`Samples` of a model: every text is read from its beginning with dense attention. `wants` are the names of Needs.calibrated."""

    def __init__(
        self,
        model: Model,
        texts: Sequence[Sequence[int]],
        wants: Sequence[str],
        seed: int = 0,
        encode: Callable[[str], list[int]] | None = None,
        dtype: torch.dtype = torch.float16,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.shape: Shape = model.shape
        self.seed = seed
        self.layers = tuple(layer for layer, window in enumerate(model.shape.windows) if window is None)
        self.texts = [torch.tensor(list(ids)) for ids in texts]
        self.wants = tuple(wants)
        self._model, self._encode, self._dtype = model, encode, dtype
        self._held: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
        for i, ids in enumerate(self.texts if set(wants) & set(VECTORS) else ()):
            self._read(ids)
            if progress is not None:
                progress((i + 1) / len(self.texts))

    # ---- vectors

    @property
    def pos(self) -> Tensor:
        return torch.cat([torch.arange(len(ids)) for ids in self.texts])

    def keys(self, layer: int) -> Tensor:
        return self._of("keys", layer)

    def bare(self, layer: int) -> Tensor:
        return self._of("bare", layer)

    def values(self, layer: int) -> Tensor:
        return self._of("values", layer)

    def queries(self, layer: int) -> Tensor:
        return self._of("queries", layer)

    def stream(self, layer: int) -> Tensor:
        return self._of("stream", layer)

    def _of(self, what: str, layer: int) -> Tensor:
        self._declared(what)
        held = self._held[what, layer]
        if len(held) > 1:
            held[:] = [torch.cat(held)]
        return held[0].float()

    def _declared(self, what: str) -> None:
        if what not in self.wants:
            raise PlanError(f"A method's fit looks at {what} but does not declare Needs(calibrated=({what!r}, ...)).")

    def _read(self, ids: Tensor) -> None:
        """One text through all layers."""
        count, model = len(ids), self._model
        pools = Pools(self.shape, (count + PAGE) * self.shape.kv_heads * self.shape.head_dim * 8, model.device)
        memory = Memory(resolve((), self.shape, torch.float32), pools, [None] * self.shape.layers)
        step = Step(ids, torch.arange(count), (0, count), (count,), "prefill", (True,))
        x = model.embed(ids)
        for layer, block in enumerate(model.blocks):
            q, bare, v = (part.contiguous() for part in block.qkv(x))
            k = bare
            if block.rope is not None:
                cos, sin = (part.to(model.device) for part in block.rope.angles(step.pos, count))
                q, k = rope(q, cos, sin), rope(bare, cos, sin)
            for what, vectors in zip(VECTORS, (k, bare, v, q, x), strict=True):
                if what in self.wants and layer in self.layers:
                    self._held[what, layer].append(vectors.to("cpu", self._dtype, copy=True))
            x = block.finish(x, advance([memory[layer]], q, k, v, step))
            memory[layer].free()

    # ---- the model itself

    def encode(self, text: str) -> list[int]:
        """A text as tokens."""
        assert self._encode is not None, "whoever fits a method gives a tokenizer"
        return self._encode(text)

    def attended(self, layer: int, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
        """Causal attention of a layer that torch can differentiate."""
        return attended(self.shape, layer, q, k, v, seen)

    def states(self, ids: Tensor, attend: Attend) -> Tensor:
        """Final states [N, M] that torch can differentiate."""
        self._declared("model")
        return states(self._model, ids, attend)


def cut(ids: Sequence[int], tokens: int, context: int) -> list[list[int]]:
    """The first `tokens` of a text in pieces that a model can read."""
    length = min(LENGTH, context, tokens)
    return [list(ids[first : min(first + length, tokens)]) for first in range(0, min(tokens, len(ids)), length)]
