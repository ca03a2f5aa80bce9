"""What selections of single tokens share: a budget, small pages, and the ways between queries, rows and what is known of each request."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ...method import Method, Needs
from ...roles import Select, View
from ...values import Shape

PAGES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Picks(Method, Select):
    """Reads `budget` settled tokens of each row; the recent ones, `window` at least, are read besides. A token lies across the lines of its
    page's keys, so that small pages make it cheap to take out."""

    budget: int = 1024
    window: int = 64
    page: int = 16

    def needs(self) -> Needs:
        return Needs(recent=self.window, page=self.page, keys="rotated")

    def check(self, shape: Shape) -> list[str]:
        return low(self, budget=1, window=0) + paged(self.page)


def low(method: object, **least: float) -> list[str]:
    """Sentences about parameters that are less than they may be."""
    return [f"{name}={getattr(method, name)} must be at least {low}." for name, low in least.items() if getattr(method, name) < low]


def paged(page: int) -> list[str]:
    return [] if page in PAGES else [f"page={page} must be 16, 32, 64 or 128 tokens."]


@functools.lru_cache(maxsize=64)
def as_many(rows: int, count: int) -> Tensor:
    return torch.full((rows,), count, dtype=torch.int32)


def per_request(x: Tensor, view: View, reduce: Callable[..., Tensor] = torch.mean) -> Tensor:
    """[N, ...] of all tokens as one for each request, [B, ...]: a decode step has one token a request."""
    spans = view.step.spans
    if len(x) == len(spans) - 1:
        return x
    return torch.stack([reduce(x[a:b], 0) for a, b in pairwise(spans)])


def by_row(x: Tensor, view: View) -> Tensor:
    """[N, H, ...] as [R, n, G, ...], n the most tokens of a request; one with fewer repeats its last."""
    spans, heads = view.step.spans, view.shape.kv_heads
    most = max(b - a for a, b in pairwise(spans))
    if most * (len(spans) - 1) != len(x):
        x = x[torch.tensor([min(i, b - 1) for a, b in pairwise(spans) for i in range(a, a + most)])]
    x = x.reshape(-1, most, heads, view.shape.group, *x.shape[2:])
    return x.transpose(1, 2).flatten(0, 1)


def by_token(x: Tensor, view: View) -> Tensor:
    """[R, n, G, ...] as [N, H, ...]; the way back."""
    spans = view.step.spans
    x = x.reshape(-1, view.shape.kv_heads, *x.shape[1:]).transpose(1, 2).flatten(2, 3)  # [B, n, H, ...]
    return torch.cat([x[i, : b - a] for i, (a, b) in enumerate(pairwise(spans))])


def bent(logits: Tensor, shape: Shape) -> Tensor:
    """The model's soft-cap; what is -inf stays so."""
    if not shape.softcap:
        return logits
    return torch.where(logits == -torch.inf, logits, torch.tanh(logits / shape.softcap) * shape.softcap)


def clustered(old: dict[str, Tensor], first: list[int], found: list[tuple[dict[str, Tensor], Tensor]]) -> dict[str, Tensor]:
    """An index by clusters, behind what `old` holds: for each row the facts [C, ...] of its new clusters and the cluster of each of its
    tokens from in-row index first[r] on. Beside the facts it has "size" and "order", the clusters' members one after another, and "done",
    the tokens of each row that are in clusters or before them."""
    rows = []
    for r, (facts, label) in enumerate(found):
        size = torch.bincount(label, minlength=max(len(x) for x in facts.values()))
        row = {**facts, "size": size.to(torch.int32), "order": (label.argsort(stable=True) + first[r]).to(torch.int32)}
        held = {name: x[r, : int(old["size"][r].sum())] if name == "order" else x[r] for name, x in old.items() if name in row}
        rows.append({name: torch.cat([held[name], x]) if held else x for name, x in row.items()})
    done = torch.tensor([n + len(label) for n, (_, label) in zip(first, found, strict=True)], dtype=torch.int32)
    packed = {name: pad_sequence([row[name] for row in rows], batch_first=True) for name in rows[0]}
    return {**packed, "done": done.to(packed["order"].device)}


def known(view: View, name: str, none: Tensor) -> Tensor:
    """An entry of the index for all rows of the step, [R, ...], filled up in its second dimension with zeros; `none` for a request that has
    no index yet."""
    parts = [index.get(name, none) for index in view.index]
    if parts[0].dim() == 1:
        return torch.cat(parts)
    wide, rest = max(p.shape[1] for p in parts), (0, 0) * (parts[0].dim() - 2)
    return torch.cat([pad(p, (*rest, 0, wide - p.shape[1])) for p in parts])


def span(first: Tensor, end: Tensor) -> Tensor:
    """The in-row indices first[r] to end[r], int64 [R, most], -1 past the end."""
    j = first[:, None] + torch.arange(max(int((end - first).max()), 0))
    return torch.where(j < end[:, None], j, -1)


def together(*parts: Tensor) -> Tensor:
    """In-row indices of several sets without common members as one, -1 past the end, on the CPU."""
    return torch.cat([p.cpu() for p in parts], 1).sort(1, descending=True).values
