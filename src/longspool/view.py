"""What methods see of the memory and of requests: protocols that the engine's own classes fulfil."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from .method import Method
from .values import Rows, Shape, Step
from .values.budget import Measure
from .values.fit import Fit
from .values.flow import Ask, Choice, Want
from .values.step import Phase


class Store(Protocol):
    """Where pages live, as a method sees it: `store[name]` is the tensor [pages, *field shape]."""

    page: int

    def __getitem__(self, name: str) -> Tensor: ...

    def fitted(self, method: Method) -> Fit:
        """What the method was fitted to this model."""
        ...

    def learnt(self, name: str, pages: Tensor) -> Tensor:
        """What the codec has learnt of the row of each of these pages, [S, ...]; see Encode.learns."""
        ...

    def booked(self, pages: Tensor) -> Tensor:
        """Where the codec learns, for each of these pages the entry of its row among all that was learnt, and the how-many-th of its row
        it is: int32 [S, 2]."""
        ...


class View(Protocol):
    """What a method may look at, read-only. A need that was not declared raises an error that names it."""

    @property
    def layer(self) -> int: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def step(self) -> Step: ...
    @property
    def rows(self) -> Rows:
        """The settled rows: of one request, or of all requests of the step for a selection."""
        ...

    @property
    def fresh(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """This step's q [N, H, D], k and v [N, Hkv, D] while the layer attends."""
        ...

    @property
    def queries(self) -> Tensor:
        """The last `Needs.queries` query vectors of one request, [H, n, D]."""
        ...

    @property
    def measure(self) -> Measure:
        """What turns a budget into tokens per row."""
        ...

    @property
    def held(self) -> int:
        """Newest tokens of one request that stay in the recent zone whatever is evicted now."""
        ...

    @property
    def stored(self) -> int:
        """Tokens that the longest row of one request holds, this step's included."""
        ...

    @property
    def alike(self) -> bool:
        """Whether all KV heads of a request hold the same tokens."""
        ...

    @property
    def index(self) -> list[dict[str, Tensor]]:
        """What the layer's Select keeps of the settled tokens, for each request of the step; see `Select.index`."""
        ...

    @property
    def mass(self) -> Tensor:
        """Attention mass that each token of one request drew in this step, [R, T]: of the candidates where an Evict is asked, else of all
        tokens, settled ones first."""
        ...

    @property
    def drawn(self) -> Tensor:
        """Attention mass that each token has drawn in all steps so far, [R, T], of the same tokens as `mass`."""
        ...

    @property
    def logweight(self) -> Tensor:
        """The log-weights of an Evict's candidates, [R, T]: 0 where an entry stands for itself alone."""
        ...

    def pieces(self, pos: Tensor) -> list[str]:
        """The text of one request's tokens at these positions, int64 [n]."""
        ...

    def weights(self, name: str) -> Tensor:
        """A matrix of this layer, fp32 as the model multiplies by it: "o" is [M, H * D]."""
        ...

    def recent(self) -> Tensor:
        """Keys of one request's recent tokens, [R, n, D]."""
        ...

    def keys(self) -> list[Tensor]:
        """All keys of one request that this layer holds, settled ones first: for each row [T, D], as rows differ in length."""
        ...

    def settled(self, first: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of one request's settled tokens, decoded: for each row k, v [n, D] from its token first[r] on."""
        ...

    def scores(self, q: Tensor, dims: Tensor | None = None) -> Tensor:
        """q . k for queries [N, H, D] over all settled keys, [N, H, T]: neither scaled nor bent, -inf past the end of a row. With dims
        int32 [R, r] only these components are read and count."""
        ...

    def recent_scores(self, q: Tensor, dims: Tensor | None = None) -> Tensor:
        """The same over the recent keys, which are read whatever is selected; -inf where a query may not look."""
        ...

    def remember(self, request: int, index: dict[str, Tensor]) -> None:
        """Replace what the Select keeps of one request, from within `select`; see `Select.index`."""
        ...

    def summary(self, name: str) -> Tensor:
        """A settled page's summary field, [pages, ...]."""
        ...

    def fitted(self, method: Method) -> Fit:
        """What the method was fitted to this model."""
        ...

    def note(self, method: Method) -> dict[str, object]:
        """The notebook of one request that belongs to the method; it lives as long as the request."""
        ...

    def notes(self, method: Method) -> list[dict[str, object]]:
        """The notebooks of all requests of the step, where a verb serves them together."""
        ...

    def count(self, method: object, request: int = 0, /, **amounts: float) -> None:
        """Add to the counters that prove what the method did, of one request of the step."""
        ...


class RequestMemory(Protocol):
    """What a flow may do with a request's memory."""

    seen: int

    def truncate(self, upto: int) -> None: ...
    def fork(self) -> RequestMemory: ...
    def adopt(self, other: RequestMemory, since: int) -> None: ...
    def free(self) -> None: ...


class Draws(Protocol):
    """A request's sampler: what it draws depends on its seed and on how many tokens were committed."""

    def pick(self, logits: Tensor) -> Choice: ...
    def commit(self, token: int) -> None: ...
    def fork(self) -> Draws: ...


class Request(Protocol):
    """What a flow may touch of its request."""

    @property
    def prompt(self) -> list[int]: ...
    @property
    def chunk(self) -> int: ...
    @property
    def memory(self) -> RequestMemory: ...
    @property
    def sampler(self) -> Draws: ...

    @property
    def want(self) -> Want: ...
    def ask(self, ids: list[int], phase: Phase, memory: RequestMemory | None = None, want: Want = "last") -> Ask[RequestMemory]: ...
    def pick(self, reply: object) -> Choice: ...
    def draft(self, methods: tuple[Method, ...], recent: int) -> RequestMemory: ...
    def fitted(self, method: Method) -> Fit: ...
    def count(self, method: object, **amounts: float) -> None: ...


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""A layer's attention, (layer, q [N, H, D], k and v [N, Hkv, D]) -> [N, H, D], of operations that torch can differentiate."""


class Samples(Protocol):
    """What a method's `fit` may look at: the real model's runs over real texts. Vectors of a layer are fp32, those of all texts one
    after another. What Needs.calibrated does not name raises an error that names it."""

    @property
    def shape(self) -> Shape: ...
    @property
    def seed(self) -> int: ...

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that methods serve: all but sliding windows."""
        ...

    @property
    def texts(self) -> Sequence[Tensor]:
        """The texts as tokens, int64 [n] each."""
        ...

    @property
    def pos(self) -> Tensor:
        """The position of each token in its own text, int64 [T]."""
        ...

    def keys(self, layer: int) -> Tensor:
        """Rotated keys [T, Hkv, D]."""
        ...

    def bare(self, layer: int) -> Tensor:
        """Keys before rotation [T, Hkv, D]."""
        ...

    def values(self, layer: int) -> Tensor:
        """Values [T, Hkv, D]."""
        ...

    def queries(self, layer: int) -> Tensor:
        """Rotated queries [T, H, D]."""
        ...

    def stream(self, layer: int) -> Tensor:
        """What enters the layer, [T, M]."""
        ...

    def encode(self, text: str) -> list[int]:
        """A text as tokens."""
        ...

    def attended(self, layer: int, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
        """Causal attention of a layer, an `Attend`, which sees bool [N, N] only where that is given."""
        ...

    def states(self, ids: Tensor, attend: Attend) -> Tensor:
        """The model's final states [N, M] over tokens int64 [N] where its layers attend like this; torch can differentiate it."""
        ...
