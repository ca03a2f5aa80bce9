"""What methods see of the memory and of requests: protocols that the engine's own classes fulfil."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .method import Method
from .values import Rows, Shape, Step
from .values.budget import Measure
from .values.flow import Ask, Choice, Want
from .values.step import Phase


class Store(Protocol):
    """Where pages live, as a method sees it: `store[name]` is the tensor [pages, *field shape]."""

    page: int

    def __getitem__(self, name: str) -> Tensor: ...

    def learnt(self, name: str, pages: Tensor) -> Tensor:
        """What the codec has learnt of the row of each of these pages, [S, ...]; see Encode.learns."""
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
    def mass(self) -> Tensor:
        """Attention mass that each settled token of one request drew in this step, [R, T]."""
        ...

    @property
    def index(self) -> list[dict[str, Tensor]]:
        """What the layer's Select keeps of the settled tokens, for each request of the step; see `Select.index`."""
        ...

    def settled(self, first: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of one request's settled tokens, decoded: for each row k, v [n, D] from its token first[r] on."""
        ...

    def recent(self) -> Tensor:
        """Keys of one request's recent tokens, [R, n, D]."""
        ...

    def keys(self) -> list[Tensor]:
        """All keys of one request that this layer holds, settled ones first: for each row [T, D], as rows differ in length."""
        ...

    def summary(self, name: str) -> Tensor:
        """A settled page's summary field, [pages, ...]."""
        ...

    def note(self, method: Method) -> dict[str, object]:
        """The notebook of one request that belongs to the method; it lives as long as the request."""
        ...

    def count(self, method: object, request: int = 0, **amounts: float) -> None:
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
    def count(self, method: object, **amounts: float) -> None: ...
