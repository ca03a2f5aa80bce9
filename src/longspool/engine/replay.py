"""The layers of a decoding request, run again as they ran for its last token.

From token to token a request's step differs in its numbers alone until a page is full or old tokens settle: the same kernels over the
same tables. On a CPU, calling them from Python takes as long as a small model's arithmetic. So a step is written down
(kernels/record.py) and played until the memory's tables change; then the layers run as ever, and are written down anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ..kernels.record import Tape, recording
from ..kernels.threads import chunks
from ..memory import Memory
from ..memory.view import Counters
from ..plan import Plan
from ..roles import Select, Skip
from ..values import Step
from .angles import Angles

TRIES = 3  # failures in a row after which a request's steps aren't written down any more


@dataclass
class Replay:
    """What one memory's steps have shown so far, and the tape of the last one that was written down."""

    failures: int = 0
    begun: bool = False
    tape: Tape | None = None
    x: Tensor | None = None
    out: Tensor | None = None
    angles: Angles | None = None
    tables: list[object] = field(default_factory=list)
    lengths: list[np.ndarray] = field(default_factory=list)
    counted: list[tuple[str, str, float]] = field(default_factory=list)
    threads: int = 0

    def fits(self, memory: Memory) -> bool:
        """Whether the tape is still right for the memory, and the next token finds room in its pages."""
        return (
            self.tape is not None
            and self.threads == chunks()
            and roomy(memory)
            and all(a is b for a, b in zip(self.tables, _tables(memory), strict=True))
        )

    def play(self, memory: Memory, x: Tensor, step: Step) -> Tensor:
        """The stream after all layers. It is overwritten by the next token's."""
        assert self.tape is not None and self.x is not None and self.out is not None and self.angles is not None
        for layer, length in zip(memory.layers, self.lengths, strict=True):
            layer.enter(x, step.pos, step.phase)
            length[:] = layer.recent.length
        self.x.copy_(x)
        self.angles.renew(step.pos, step.reach)
        self.tape.play()
        for slug, name, amount in self.counted:
            memory.actions[slug][name] += amount
        return self.out

    def record(self, memory: Memory, x: Tensor, angles: Angles, layers: Callable[[], Tensor]) -> Tensor:
        """Run the layers and write them down; what can't be played again is dropped."""
        before, counted = _tables(memory), {slug: dict(names) for slug, names in memory.actions.items()}
        with recording() as tape:
            out = layers()
        same = all(a is b for a, b in zip(before, _tables(memory), strict=True))
        if tape.why or not same:
            self.failures += bool(tape.why) and same
            self.tape = None
            return out
        self.failures, self.threads = 0, chunks()
        self.tape, self.x, self.out, self.angles, self.tables = tape, x, out, angles, before
        self.lengths = [layer.recent.rows().length.numpy() for layer in memory.layers]
        self.counted = _difference(counted, memory.actions)
        return out


def roomy(memory: Memory) -> bool:
    """Whether the next token finds room in the pages as they are."""
    return all(layer.recent.spare for layer in memory.layers)


def repeats(plan: Plan) -> bool:
    """Whether a step's kernels depend on nothing but what tensors hold: no window moves and no method decides anew in Python."""
    return all(
        layer.window is None and not layer.chain(Skip) and all(select.steady for select in layer.chain(Select)) for layer in plan.layers
    )


def _tables(memory: Memory) -> list[object]:
    """What changes its identity when a memory's pages change."""
    recent = [layer.recent.pages_in_order() for layer in memory.layers]
    return [*recent, *(layer.settled.rows() for layer in memory.layers if layer.settled is not None)]


def _difference(before: dict[str, dict[str, float]], after: Counters) -> list[tuple[str, str, float]]:
    return [(slug, name, n - before.get(slug, {}).get(name, 0)) for slug, names in after.items() for name, n in names.items()]
