"""One text under many recipes: what a recipe does only after a prompt is done to a copy of the memory that dense reading left.

Read in one piece, a prompt is the same under every recipe whose methods act on settled tokens (`Plan.late`), so it is read once a text.
Other recipes read it themselves, and so do those that are to be read in chunks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine.forward import forward
from ..llm import LLM
from ..memory import Memory, dense_bytes
from ..method import Method, Needs
from ..plan import Plan, resolve
from ..roles import Select
from ..values import Step
from ..values.flow import Ask
from ..values.step import Phase
from .texts import Text

QUERIES = 128
"""Last queries that a dense reading keeps, for methods that look at some."""


@dataclass(frozen=True)
class Run:
    """What a recipe made of a text: logits fp32 [n, V] that predict the scored tokens; when the prompt had settled, the bytes held by
    tier, those of dense fp16, and the tokens kept over all layers and KV heads, `recent` of them raw; the tokens that a row read at a
    step on average; its methods' counters; the seconds of each step decoded."""

    logits: Tensor
    bytes: Mapping[str, int]
    dense: int
    kept: int
    recent: int
    read: float
    actions: Mapping[str, Mapping[str, float]]
    steps: tuple[float, ...]

    @property
    def share(self) -> float:
        """Bytes of all tiers as a part of dense fp16's."""
        return sum(self.bytes.values()) / self.dense


class Reading:
    """A text that was read densely, once; `under` says what becomes of it under a recipe. Close it, since it holds a memory."""

    def __init__(self, llm: LLM, text: Text) -> None:
        self.llm, self.text = llm, text
        self._base: tuple[Memory, Step, Tensor] | None = None

    def under(self, recipe: str, chunk: int = 0) -> Run:
        """Run it; `chunk` 0 reads the prompt in one piece. Raises PlanError for a recipe that can't run."""
        plan = self.llm.plan_for(recipe)
        if chunk == 0 and plan.late:
            base, step, last = self._dense(plan)
            memory = base.refit(plan, step)
        else:
            memory, _, last = self._read(plan, chunk)
        try:
            held, dense = memory.tiers(), dense_bytes(self.llm.plan_for("dense"), memory.seen)
            kept = sum(int(rows.sum()) for rows in memory.tokens())
            recent = sum(len(layer.pos) for layer in memory.layers) * plan.shape.kv_heads
            rows, seconds = self._fed(memory, last)
            actions = {name: dict(did) for name, did in memory.actions.items()}
            return Run(rows, held, dense, kept, recent, _read(memory, actions), actions, seconds)
        finally:
            memory.free()

    def close(self) -> None:
        if self._base is not None:
            self._base[0].free()
            self._base = None

    def _dense(self, plan: Plan) -> tuple[Memory, Step, Tensor]:
        if self._base is None:
            self._base = self._read(resolve((), plan.shape, plan.dtype, Needs(queries=QUERIES)), 0)
        return self._base

    def _read(self, plan: Plan, chunk: int) -> tuple[Memory, Step, Tensor]:
        """The prompt read from nothing: the memory, its last step, and the last logits [1, V]."""
        memory, n = self.llm.engine.empty(plan), self.text.prompt
        size = min(chunk or n, plan.chunk or n)
        for first in range(0, n, size):
            step = _step(self.text, first, min(first + size, n))
            (last,) = forward(self.llm.model, [Ask(step, memory, "last" if step.final[0] else "none")])
        return memory, step, last

    def _fed(self, memory: Memory, last: Tensor) -> tuple[Tensor, tuple[float, ...]]:
        """Feed what follows the prompt token by token. The last token predicts nothing that is known."""
        rows, seconds = [last], []
        for at in range(self.text.prompt, len(self.text.ids) - 1):
            begun = time.perf_counter()
            rows += forward(self.llm.model, [Ask(_step(self.text, at, at + 1), memory)])
            seconds.append(time.perf_counter() - begun)
        return torch.cat(rows)[self.text.scored - self.text.prompt :].clone(), tuple(seconds)


def _read(memory: Memory, actions: Mapping[str, Mapping[str, float]]) -> float:
    """Tokens that a row reads at a step: all recent ones, and of the settled ones what a selection takes on average."""
    total = 0.0
    for layer, (own, tokens) in enumerate(zip(memory.layers, memory.tokens(), strict=True)):
        settled, select = float(own.rows().length.sum()), memory.plan.layers[layer].one(Select)
        did = actions.get(select.slug) if isinstance(select, Method) else None
        part = did["tokens_read"] / did["tokens_stored"] if did and did.get("tokens_stored") else 1.0
        total += float(tokens.sum()) - settled + part * settled
    return total / sum(len(tokens) for tokens in memory.tokens())


def _step(text: Text, first: int, end: int) -> Step:
    """Tokens first to end of the prompt, or one token after it."""
    ids = torch.tensor(text.ids[first:end])
    phase: Phase = "prefill" if first < text.prompt else "decode"
    return Step(ids, torch.arange(first, end), (0, end - first), (text.prompt,), phase, (end >= text.prompt,))
