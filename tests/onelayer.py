"""One layer's memory, fed with random queries, keys and values, and float64 attention over the tokens that it holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspool.memory import LayerView, Pools, attend, write
from longspool.memory.layer import LayerMemory
from longspool.memory.view import counters
from longspool.method import Method
from longspool.plan import Item, resolve
from longspool.recipe import parse
from longspool.values import Shape, Step
from longspool.values.step import Phase

SHAPE = Shape(1, 6, 2, 16, 96, 100, 4096, 0.25, (None,))


class Bench:
    """A layer that is fed random queries, keys and values, and what it was fed."""

    def __init__(self, *methods: Method, shape: Shape = SHAPE, seed: int = 0) -> None:
        self.plan = resolve(tuple(map(Item, methods)), shape, torch.float32)
        self.shape, self.pools, self.actions = shape, Pools(shape, 1 << 26), counters()
        self.memory = LayerMemory(0, self.plan.layers[0], self.pools, None, {}, self.actions)
        self.random = torch.Generator().manual_seed(seed)
        self.q = torch.zeros(0, shape.heads, shape.head_dim)
        self.k = torch.zeros(0, shape.kv_heads, shape.head_dim)
        self.v = self.k.clone()
        self.seen = 0

    def feed(
        self,
        n: int,
        phase: Phase = "prefill",
        final: bool = True,
        tree: Tensor | None = None,
        given: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What n new tokens see [n, H, D], and what float64 says they see; their keys and values are random or `given`."""
        s, pos = self.shape, torch.arange(self.seen, self.seen + n)
        q, k, v = (torch.randn(n, h, s.head_dim, generator=self.random) * 1.5 for h in (s.heads, s.kv_heads, s.kv_heads))
        k, v = given or (k, v)
        # After a rollback the positions are taken again.
        self.q, self.k, self.v = (torch.cat([old[: self.seen], new]) for old, new in ((self.q, q), (self.k, k), (self.v, v)))
        self.seen += n
        step = Step(torch.zeros(n, dtype=torch.long), pos, (0, n), (self.seen if final else 1 << 20,), phase, (final,), tree)
        write([self.memory], q, k, v, step)
        out = attend([self.memory], q, k, v, step)
        expected = self.dense(q, pos, self.memory.positions(), tree)
        self.memory.settle(LayerView(0, s, step, self.memory.rows(), (self.memory,)))
        self.memory.check()
        return out, expected

    def dense(self, q: Tensor, pos: Tensor, held: Sequence[Tensor], tree: Tensor | None = None) -> Tensor:
        s, out = self.shape, []
        for h in range(s.heads):
            at = held[h // s.group]
            logits = self.logits(q[:, h], self.k[at, h // s.group])
            hidden = at > pos[:, None] if tree is None else torch.zeros(len(pos), len(at), dtype=torch.bool)
            if s.windows[0]:
                hidden = hidden | (at <= pos[:, None] - s.windows[0])
            if tree is not None:
                hidden[:, -len(pos) :] = ~tree
            out.append(logits.masked_fill(hidden, -torch.inf).softmax(-1) @ self.v[at, h // s.group].double())
        return torch.stack(out, 1)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        logits = q.double() @ k.double().T * self.shape.scale
        return torch.tanh(logits / self.shape.softcap) * self.shape.softcap if self.shape.softcap else logits


def recipe(text: str) -> list[Method]:
    return [item.method for item in parse(text)]


def as_double(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].double(), pair[1]
