"""xKV: neighbouring layers' keys and values on one low-rank basis of tokens, found for each prompt.

The layers of a group differ in what they make of a token, but their leading left singular vectors agree. When the prompt has been read, the
keys before rotation of `layers` layers and all their heads are put side by side and factored; values likewise, with a rank of their own:

    X [T, layers * Hkv * D] = U S V^T,   A = U_r S_r [T, r] for all layers,   B = V_r^T [r, layers * Hkv * D],   X_l = A B_l

`keys` and `values` are the ranks' shares of the width. A is stored by pages, B once for a request, both in fp16 (fp32 where the
rank is whole). Tokens of the answer stay raw, and so do the prompt's newest `window`. The singular vectors come from the smaller Gram
matrix in float64. The paper multiplies weights with A before B for the values; ours are made again page by page for each layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...method import Cost, Method, Needs, Paper, Trial
from ...roles import Encode, Field, Store
from ...values import Shape, Span


@dataclass(frozen=True)
class XKV(Method, Encode):
    layers: int = 4
    keys: float = 0.125
    values: float = 0.1875
    window: int = 64

    paper: ClassVar[Paper] = Paper(
        "S078", "xKV: Cross-Layer SVD for KV-Cache Compression", "arXiv:2503.18893", "6.8x smaller than MiniCache's with 2.7% more accuracy"
    )
    identity: ClassVar[dict[str, object]] = {"keys": 1.0, "values": 1.0}
    joins: ClassVar[bool] = True
    prompts: ClassVar[bool] = True
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "xkv(layers=5, keys=0.2, values=0.3)",
            beats=("xkv(layers=1, keys=0.2, values=0.3)",),
            claim="Five layers on one basis lose less than five bases of the same rank's share.",
        ),
    )

    def needs(self) -> Needs:
        return Needs(recent=self.window, keys="bare")

    def check(self, shape: Shape) -> list[str]:
        shares = [f"{n}={getattr(self, n)} must be above 0 and at most 1." for n in ("keys", "values") if not 0 < getattr(self, n) <= 1]
        counts = (("layers", self.layers, 1), ("window", self.window, 0))
        return shares + [f"{n}={x} must be at least {least}." for n, x, least in counts if x < least]

    def across(self) -> int:
        return self.layers

    def _rank(self, name: str, shape: Shape, layers: int) -> tuple[int, int, torch.dtype]:
        """Rank, width and storage."""
        width = layers * shape.kv_heads * shape.head_dim
        rank = max(round((self.keys if name == "k" else self.values) * width), 1)
        return rank, width, torch.float32 if rank == width else torch.float16

    def fields(self, shape: Shape, page: int, layers: int) -> dict[str, Field]:
        ranks = {name: self._rank(name, shape, layers) for name in ("k", "v")}
        return {name: Field((page, rank), dtype) for name, (rank, _, dtype) in ranks.items()}

    def learns(self, shape: Shape, layers: int) -> dict[str, Field]:
        ranks = {name: self._rank(name, shape, layers) for name in ("k", "v")}
        return {name: Field((rank, width), dtype) for name, (rank, width, dtype) in ranks.items()}

    def learn(self, k: list[Tensor], v: list[Tensor], span: Span) -> dict[str, Tensor]:
        """The basis of each row; a later prompt on the same memory takes the one that is there."""
        shares = {"k": (k, self.keys), "v": (v, self.values)}
        return {
            name: torch.stack([principal(x, max(round(share * x.shape[1]), 1)).T.float() for x in rows])
            for name, (rows, share) in shares.items()
        }

    def write(self, store: Store, pages: Tensor, fill: Tensor, k: Tensor, v: Tensor, span: Span) -> None:
        for name, x in (("k", k.transpose(1, 2)), ("v", v)):
            for own, basis in _bases(store, name, pages):
                store[name][pages[own]] = (x[own] @ basis.T.to(x)).to(store[name].dtype)

    def read(self, store: Store, pages: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        k, v = (self._decoded(store, name, pages, span) for name in ("k", "v"))
        return k.transpose(1, 2).contiguous(), v

    def _decoded(self, store: Store, name: str, pages: Tensor, span: Span) -> Tensor:
        a = store[name][pages].float()
        parts = [(own, a[own] @ span.own(basis, 1).float()) for own, basis in _bases(store, name, pages)]
        if len(parts) == 1:
            return parts[0][1]
        order = torch.cat([own for own, _ in parts]).argsort()
        return torch.cat([x for _, x in parts])[order]

    def cost(self, shape: Shape) -> Cost:
        return Cost(device=2 * shape.head_dim * (self.keys + self.values), moved=2 * shape.head_dim * (self.keys + self.values))


def _bases(store: Store, name: str, pages: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The pages of each row, as places among `pages`, and the row's basis [r, P]."""
    entry = store.booked(pages)[:, 0]
    for one in torch.unique(entry):
        own = (entry == one).nonzero()[:, 0]
        yield own, store.learnt(name, pages[own[:1]])[0]


def principal(x: Tensor, rank: int) -> Tensor:
    """The `rank` leading right singular vectors of x [T, P], float64 [P, rank]; zeros where there are fewer tokens than that."""
    x = x.double()
    tall = len(x) >= x.shape[1]
    vectors: Tensor = torch.linalg.eigh(x.T @ x)[1].flip(1) if tall else torch.linalg.svd(x, full_matrices=False)[2].T
    vectors = vectors[:, :rank]
    return torch.nn.functional.pad(vectors, (0, rank - vectors.shape[1]))
