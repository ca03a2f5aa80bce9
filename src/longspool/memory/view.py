"""What a method may look at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import PlanError
from ..method import Method
from ..values import Rows, Shape, Step
from ..values.budget import Measure

if TYPE_CHECKING:
    from .layer import LayerMemory

Counters = dict[str, dict[str, float]]


def counters() -> Counters:
    return defaultdict(lambda: defaultdict(float))


@dataclass(frozen=True)
class LayerView:
    """One layer of one step, read-only. `fresh` is this step's q [N, H, D], k and v [N, Hkv, D]."""

    layer: int
    shape: Shape
    step: Step
    rows: Rows
    memories: tuple[LayerMemory, ...]
    fresh: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def _own(self) -> LayerMemory:
        assert len(self.memories) == 1, "this part of a view belongs to one request"
        return self.memories[0]

    @property
    def queries(self) -> Tensor:
        """The last `Needs.queries` query vectors, [H, n, D]."""
        if not self._own.plan.needs.queries:
            raise PlanError("A method reads view.queries but does not declare Needs(queries=...).")
        return self._own.queries()

    @property
    def mass(self) -> Tensor:
        """Attention mass per stored token in this step, settled ones first, [R, T]."""
        if not self._own.plan.needs.mass:
            raise PlanError("A method reads view.mass but does not declare Needs(mass=True).")
        assert self._own.mass is not None
        return self._own.mass

    @property
    def measure(self) -> Measure:
        """What turns a budget into tokens."""
        s, raw = self.shape, self._own.recent.pool
        return Measure(self.step.total[0], raw.page_bytes / raw.page * s.kv_heads * s.layers)

    @property
    def held(self) -> int:
        """Newest tokens that stay in the recent zone whatever is evicted now."""
        return self._own.held

    @property
    def stored(self) -> int:
        """Tokens that the longest row holds, this step's included."""
        settled = self._own.settled
        return len(self._own.pos) + (int(settled.length.max()) if settled is not None else 0)

    @property
    def index(self) -> list[dict[str, Tensor]]:
        """What the layer's Select keeps of the settled tokens, for each request."""
        return [memory.index for memory in self.memories]

    def settled(self, first: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """For each row k, v [n, D] of the settled tokens from its token first[r] on, decoded."""
        return self._own.read_settled(first)

    def recent(self) -> Tensor:
        """Keys of the recent tokens, [R, n, D]."""
        return torch.stack([k for k, _ in self._own.read_recent()])

    def keys(self) -> list[Tensor]:
        """All keys that this layer holds, settled ones first: for each row [T, D]."""
        return self._own.keys()

    def summary(self, name: str) -> Tensor:
        """A field that this layer's Select keeps of every settled page."""
        return self.memories[0].summaries[name]

    def note(self, method: Method) -> dict[str, object]:
        """The request's notebook of the method, shared by all layers."""
        return self._own.notes.setdefault(method.slug, {})

    def count(self, method: object, request: int = 0, **amounts: float) -> None:
        self.memories[request].count(method, **amounts)
