"""All layers of one request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ..errors import LongspoolError
from ..plan import Plan
from ..roles import RequestMemory
from ..values import Step
from . import near
from .disk import PageFile
from .growth import growth
from .layer import LayerMemory, Rotate
from .pools import Pools
from .settle import weigh
from .text import Text
from .view import LayerView, counters


class Memory:
    """What a request remembers. `seen` counts the tokens that the model has processed, not those that are stored."""

    def __init__(self, plan: Plan, pools: Pools, rotates: Sequence[Rotate | None]) -> None:
        self.plan, self.pools, self.rotates = plan, pools, tuple(rotates)
        self.seen = 0
        self.replay: object = None  # the engine's, to run the next token as it ran the last
        self.notes: dict[str, dict[str, object]] = {}
        self.actions = counters()
        self.text = Text(pools) if plan.text else None
        self.layers: list[LayerMemory] = []
        for layer, (own, rotate) in enumerate(zip(plan.layers, self.rotates, strict=True)):
            earlier = [self.layers[i] for i in own.joint if i < layer]
            self.layers.append(LayerMemory(layer, own, pools, rotate, self.notes, self.actions, earlier))

    def __getitem__(self, layer: int) -> LayerMemory:
        return self.layers[layer]

    @property
    def on_cpu(self) -> bool:
        """Whether it attends on the CPU."""
        return self.layers[0].device.type == "cpu"

    def positions(self, layer: int) -> list[Tensor]:
        """The positions that each KV head of a layer still holds, ascending int64."""
        return self.layers[layer].positions()

    def read(self, step: Step) -> None:
        """Know the tokens of a step that is about to run."""
        if self.text is not None:
            self.text.read(step.ids, int(step.pos[0]))

    def know(self, other: Memory) -> None:
        """Have seen what another memory has."""
        self.seen = other.seen
        if self.text is not None and other.text is not None:
            self.text.put(other.text.ids)

    def truncate(self, upto: int) -> None:
        """Forget the tokens at position `upto` and later. Only the recent zone can be rolled back."""
        for layer in self.layers:
            layer.truncate(upto)
        self.seen = min(self.seen, upto)

    def fork(self) -> Memory:
        """The same tokens under the same plan; pages are shared and copied when one side writes."""
        twin = Memory(self.plan, self.pools, self.rotates)
        twin.know(self)
        twin.notes.update({name: dict(note) for name, note in self.notes.items()})
        for mine, theirs in zip(twin.layers, self.layers, strict=True):
            mine.share(theirs)
        return twin

    def refit(self, plan: Plan, step: Step) -> Memory:
        """The same tokens under another plan, settled as after a prompt. `step` is the last one that this memory saw."""
        twin = Memory(plan, self.pools, self.rotates)
        twin.know(self)
        try:
            for layer, (old, new) in enumerate(zip(self.layers, twin.layers, strict=True)):
                new.take_over(old)
                twin.settle(layer, step)
        except LongspoolError:
            twin.free()
            raise
        return twin

    def growth(self, step: Step) -> int:
        """Bytes on the device that this request's step adds at most, at its peak: one layer after another, while those among whose tokens
        an Evict chooses together settle after the last of them."""
        now = peak = 0 if self.text is None else 4 * len(step.ids)
        late: dict[int | None, list[tuple[int, int]]] = {}
        for layer in self.layers:
            enter, fetched, *settles = growth(layer, step)
            kept = near.growth(layer, step)
            peak, now = max(peak, now + enter + max(fetched, kept)), now + enter + kept
            after = layer.plan.after if layer.awaits(step) else layer.layer
            late.setdefault(after, []).append((settles[0], settles[1]))
            for settled, freed in late.pop(layer.layer, []):
                peak, now = max(peak, now + settled), now + settled - freed
        return peak

    def settle(self, layer: int, step: Step) -> None:
        """Let old tokens settle after a layer: its own, or those of all layers among which an Evict chooses, after the last of them."""
        members = [self.layers[layer]]
        if members[0].awaits(step):
            if members[0].plan.after != layer:
                return
            members = [m for m in self.layers if m.plan.after == layer]
            for m in members:
                weigh(m, LayerView(m.layer, m.shape, step, m.rows(), (m,), text=self.text))
        for m in members:
            m.settle(LayerView(m.layer, m.shape, step, m.rows(), (m,), text=self.text))

    def adopt(self, other: RequestMemory, since: int) -> None:
        """Replace the tokens from position `since` on by the other memory's; both hold them in their recent zones."""
        assert isinstance(other, Memory)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.truncate(since)
            mine.take_over(theirs, since)
        self.know(other)

    def free(self) -> None:
        """Give every page back."""
        if self.text is not None:
            self.text.put(self.text.ids[:0])
        for layer in self.layers:
            layer.free()

    def tokens(self) -> list[Tensor]:
        """Tokens held per layer and KV head."""
        return [layer.rows().length + len(layer.pos) for layer in self.layers]

    @property
    def bytes(self) -> int:
        """Live bytes of the pages, tables, positions, kept queries, indexes and tokens of this request; a shared page counts in full."""
        return sum(layer.bytes for layer in self.layers) + (0 if self.text is None else self.text.nbytes)

    def tiers(self) -> dict[str, int]:
        """Live bytes by tier."""
        held = {"device": 0 if self.text is None else self.text.nbytes, "host": 0, "disk": 0}
        for layer in self.layers:
            for tier, amount in layer.tiers.items():
                held[tier] += amount
        return held

    def holds(self, file: PageFile, record: int) -> bool:
        """Whether a record of a file on the disk belongs to one of its pages."""
        zones = (zone for layer in self.layers for zone in layer.zones if zone.pool.disk is file)
        return any(record // (zone.pool.page // zone.pool.piece) in zone.pages() for zone in zones)

    def check(self) -> None:
        """Raise AssertionError where tables, lengths, positions and owners don't fit together."""
        for layer in self.layers:
            layer.check()
        self.pools.check()


def dense_bytes(plan: Plan, tokens: int) -> int:
    """What keys and values of this many tokens take in fp16 without any method."""
    s = plan.shape
    kept = [tokens if w is None else min(tokens, w) for w in s.windows]
    return int(np.sum(kept)) * s.kv_heads * s.head_dim * 2 * 2
