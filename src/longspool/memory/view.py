"""What a method may look at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import PlanError
from ..method import Method
from ..values import Rows, Shape, Step
from ..values.budget import Measure
from ..values.fit import Fit
from . import index

if TYPE_CHECKING:
    from .layer import LayerMemory
    from .text import Text
    from .tiles import Candidates

Counters = dict[str, dict[str, float]]


def counters() -> Counters:
    return defaultdict(lambda: defaultdict(float))


def acted(did: Mapping[str, float]) -> bool:
    """Whether a method's counters show that it made a difference: to look at something is none, nor is it to read all that is stored."""
    looked = {"seen", "candidates", "tokens_stored"}
    if did.get("tokens_read") == did.get("tokens_stored"):
        looked.add("tokens_read")
    return any(amount for name, amount in did.items() if name not in looked)


@dataclass(frozen=True)
class LayerView:
    """One layer of one step, read-only. `fresh` is this step's q [N, H, D], k and v [N, Hkv, D]."""

    layer: int
    shape: Shape
    step: Step
    rows: Rows
    memories: tuple[LayerMemory, ...]
    fresh: tuple[Tensor, Tensor, Tensor] | None = None
    candidates: Candidates | None = None
    """What an Evict is asked about."""
    text: Text | None = None

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
    def alike(self) -> bool:
        """Whether all KV heads of a request hold the same tokens."""
        return self.memories[0].plan.alike

    @property
    def index(self) -> list[dict[str, Tensor]]:
        """What the layer's Select keeps of the settled tokens, for each request."""
        return [memory.index for memory in self.memories]

    @property
    def mass(self) -> Tensor:
        """Attention mass per token in this step, [R, T]: of an Evict's candidates, else of all tokens, settled ones first."""
        if not self._own.plan.needs.mass:
            raise PlanError("A method reads view.mass but does not declare Needs(mass=True).")
        mass = self._own.mass if self.candidates is None else self.candidates.mass
        if mass is None:
            raise PlanError("A method reads view.mass in a step that it does not watch.")
        return mass

    @property
    def drawn(self) -> Tensor:
        """Attention mass per token in all steps so far, [R, T], of the same tokens as `mass`."""
        own = self._own
        if own.drawn is None:
            raise PlanError("A method reads view.drawn but does not declare Needs(drawn=True).")
        if self.candidates is not None and self.candidates.drawn is not None:
            return self.candidates.drawn
        return own.drawn.whole(own.longest + len(own.pos))

    @property
    def logweight(self) -> Tensor:
        """The log-weights of an Evict's candidates, [R, T]."""
        assert self.candidates is not None, "only an Evict has candidates"
        weight = self.candidates.weight
        return self.candidates.pos.new_zeros(self.candidates.pos.shape, dtype=self.candidates.k.dtype) if weight is None else weight

    def pieces(self, pos: Tensor) -> list[str]:
        """The text of the tokens at these positions."""
        if self.text is None:
            raise PlanError("A method reads view.pieces but does not declare Needs(text=True).")
        return self.text.pieces(pos)

    def weights(self, name: str) -> Tensor:
        """A matrix of this layer, fp32."""
        if name not in self._own.plan.needs.weights:
            raise PlanError(f"A method reads view.weights({name!r}) but does not declare Needs(weights=({name!r},)).")
        return self._own.pools.matrix(self.layer, name)

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

    def recent(self) -> Tensor:
        """Keys of the recent tokens, [R, n, D]."""
        return torch.stack([k for k, _ in self._own.read_recent()])

    def keys(self) -> list[Tensor]:
        """All keys that this layer holds, settled ones first: for each row [T, D]."""
        return self._own.keys()

    def settled(self, first: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """For each row k, v [n, D] of the settled tokens from its token first[r] on, decoded."""
        return self._own.read_settled(first)

    def scores(self, q: Tensor, dims: Tensor | None = None) -> Tensor:
        """q . k for queries [N, H, D] over all settled keys, [N, H, T]; -inf past the end of a row."""
        return index.scores(self.memories[0], self.rows, self.step, q, dims)

    def recent_scores(self, q: Tensor, dims: Tensor | None = None) -> Tensor:
        """The same over the recent keys; -inf where a query may not look."""
        return index.recent_scores(self.memories, self.step, q, dims)

    def remember(self, request: int, index: dict[str, Tensor]) -> None:
        """Replace what the Select keeps of one request."""
        self.memories[request].keep(index)

    def summary(self, name: str) -> Tensor:
        """A field that this layer's Select keeps of every settled page."""
        return self.memories[0].summaries[name]

    def fitted(self, method: Method) -> Fit:
        """What the method was fitted to this model."""
        return self.memories[0].pools.fits[method]

    def note(self, method: Method) -> dict[str, object]:
        """The request's notebook of the method, shared by all layers."""
        return self._own.notes.setdefault(method.slug, {})

    def notes(self, method: Method) -> list[dict[str, object]]:
        """The notebooks of all requests of the step."""
        return [memory.notes.setdefault(method.slug, {}) for memory in self.memories]

    def count(self, method: object, request: int = 0, /, **amounts: float) -> None:
        self.memories[request].count(method, **amounts)
