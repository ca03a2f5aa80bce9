"""What seats answer: which entries stay, which are read, and from where they are seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .rows import Rows


@dataclass(frozen=True)
class Frame:
    """Keys at distance near <= pos_q - pos_k < far are seen with the query at position `query` and the key at `key`."""

    near: int
    far: int | None
    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Kept:
    """What stays: per row ascending indices into the candidates. Merged entries replace k and v there and carry a log-weight."""

    index: tuple[Tensor, ...]
    k: tuple[Tensor, ...] | None = None
    v: tuple[Tensor, ...] | None = None
    weight: tuple[Tensor, ...] | None = None


@dataclass(frozen=True)
class Reach:
    """Which stored tokens the queries of a step see: request b has queries spans[b]:spans[b+1]; query n sees the in-row
    indices lo[n] to hi[n] (int32 [N]; None: from the row's start, to its end)."""

    spans: tuple[int, ...]
    lo: Tensor | None = None
    hi: Tensor | None = None


@dataclass(frozen=True)
class Seen:
    """What a selection reads: `rows` exactly, whole pages, pieces of them or single tokens, and estimates of what it does not read.

    Each of `parts` is attention over estimated entries, (out [N, H, D], lse [N, H]), and is merged with all else. `rest`
    (out [N, H, D], odds [N, H]) comes last: something whose mass is known only in proportion to all else, exp(odds) times as much.
    """

    rows: Rows
    parts: tuple[tuple[Tensor, Tensor], ...] = ()
    rest: tuple[Tensor, Tensor] | None = None
