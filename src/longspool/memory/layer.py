"""The heart: what one request holds at one layer. Everything enters the recent zone; old tokens settle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import LongspoolError
from ..kernels import append_rows, gather_rows
from ..method import Method
from ..plan import PAGE, LayerPlan
from ..roles import Evict, Store
from ..values import Rows, Span, Step
from ..values.step import Phase
from . import books, index, near
from .drawn import Drawn
from .pool import Pool
from .pools import Pools, Summaries, encoder
from .positions import Positions
from .settle import settle
from .view import Counters, LayerView
from .zone import Zone

Rotate = Callable[[Tensor, Tensor, int], Tensor]
"""Rotates x [N, A, D] at positions int64 [N] of a sequence of so many tokens (Step.reach); the model's rotary embedding of a layer."""
Notes = dict[str, dict[str, object]]


class LayerMemory:
    """Two zones of one request at one layer: recent (raw, the same tokens for all heads) and settled (ragged, encoded, placed).

    Layers that a codec stores together share one settled zone. The last of them, which is given the `earlier` ones, fills it and keeps
    its books."""

    summaries: Store
    """Its pages' summaries, where it settles."""

    def __init__(
        self,
        layer: int,
        plan: LayerPlan,
        pools: Pools,
        rotate: Rotate | None,
        notes: Notes,
        actions: Counters,
        earlier: Sequence[LayerMemory] = (),
    ) -> None:
        self.layer, self.shape, self.plan, self.pools, self.rotate = layer, pools.shape, plan, pools, rotate
        self.notes, self.actions = notes, actions
        self.encode = encoder(plan)
        self.span = Span(plan.joint, plan.joint.index(layer)) if plan.joint else Span((layer,))
        self.recent = Zone(pools.recent(layer, plan), self.shape.kv_heads)
        self.settled: Zone | None = None
        if plan.settles:
            self.settled = earlier[0].settled if earlier else near.zone(layer, plan, pools)
            self.summaries = Summaries(self.store, plan, layer) if plan.joint or plan.joins else self.store
        self.earlier = tuple(earlier) if self.span.last else ()
        self.book = books.book(plan, pools) if self.span.last else None
        self.pos = Positions()
        self.mass: Tensor | None = None
        """What each token drew in the present step, if that was observed."""
        self.drawn = Drawn(self.shape.kv_heads, pools.ledger, self.device) if plan.needs.drawn else None
        self.held = self._side = self.reach = 0
        self.gone = 0
        """The position after the last token that has left the recent zone."""
        self.past: list[Tensor] = []
        self.index: dict[str, Tensor] = {}

    # ---- what it holds

    @property
    def store(self) -> Pool:
        """The pool of the settled zone."""
        assert self.settled is not None
        return self.settled.pool

    @property
    def zones(self) -> list[Zone]:
        """The zones whose books it keeps."""
        own = (self.recent, self.settled, self.book) if self.span.last else (self.recent,)
        return [zone for zone in own if zone is not None]

    @property
    def members(self) -> tuple[LayerMemory, ...]:
        """The layers whose tokens settle with its own."""
        return *self.earlier, self

    @property
    def device(self) -> torch.device:
        """Where it attends. Tables and positions stay on the CPU."""
        return self.recent.pool.device

    @property
    def sharers(self) -> int:
        """KV heads that lie in the same settled page."""
        return self.shape.kv_heads // self.plan.rows(self.shape.kv_heads)

    @property
    def longest(self) -> int:
        """Tokens of the longest settled row."""
        return int(self.settled.length.max()) if self.settled is not None else 0

    def queries(self) -> Tensor:
        """The last queries, [H, n, D]."""
        return torch.cat(self.past)[-self.plan.needs.queries :].transpose(0, 1)

    def remember(self, queries: list[Tensor]) -> None:
        self.pools.ledger.add("device", sum(q.nbytes for q in queries) - sum(q.nbytes for q in self.past))
        self.past = queries

    def keep(self, known: dict[str, Tensor]) -> None:
        """Know this of the settled tokens, for the layer's Select."""
        self.pools.ledger.add("device", index.weight(known) - index.weight(self.index))
        self.index = known

    def keys(self) -> list[Tensor]:
        """All keys, settled ones first, per KV head [T, D]."""
        return [torch.cat([a[0], b[0]]) for a, b in zip(self.read_settled(), self.read_recent(), strict=True)]

    def read_recent(self, first: int = 0, count: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Per KV head k, v [n, D] of the recent tokens first to first + count."""
        n = len(self.pos) - first if count is None else count
        rows, heads = self.recent.rows(), self.shape.kv_heads
        at = torch.arange(first, first + n).repeat(heads)
        k, v = gather_rows(self.recent.pool["k"], self.recent.pool["v"], rows.table, at, torch.arange(heads + 1) * n)
        return list(zip(k.view(heads, n, k.shape[-1]), v.view(heads, n, v.shape[-1]), strict=True))

    def read_settled(self, first: Sequence[int] | None = None) -> list[tuple[Tensor, Tensor]]:
        """Per KV head k, v [n, D] of the settled tokens, decoded; of row r from its token first[r] on."""
        return near.read(self, first)

    def settled_field(self, name: str) -> list[Tensor]:
        """A per-token field ("pos" or "weight") of the settled tokens, per KV head [n], on the CPU."""
        assert self.settled is not None
        rows = self.settled.rows()
        if name == "pos" and not self.plan.ragged:
            return [torch.arange(int(n)) for n in rows.length] * self.sharers
        return [self.store[name].view(-1)[rows.slots(r)].cpu() for r in range(rows.count)] * self.sharers

    def positions(self) -> list[Tensor]:
        """The positions that each KV head holds, ascending, int64."""
        recent = torch.from_numpy(self.pos.array())
        if self.settled is None:
            return [recent] * self.shape.kv_heads
        return [torch.cat([p.long(), recent]) for p in self.settled_field("pos")]

    # ---- the verbs

    def enter(self, q: Tensor, pos: Tensor, phase: Phase) -> None:
        """Make room for one request's new tokens and remember its queries; the keys are appended by `write`."""
        self.recent.grow(pos.shape[0])
        self.pos.append(pos.numpy())
        self.mass = None
        self.account()
        if (keep := self.plan.queries) and (phase == "prefill" or not self.plan.evicts_prompts_only):
            self.remember([*self.past, q[-keep:].clone()])
            if len(q) > 1 or len(self.past) > keep:
                self.remember([torch.cat(self.past)[-keep:].clone()])

    @property
    def restless(self) -> bool:
        """Whether enough tokens have grown old for a settle to be worth its price, which hardly depends on how many it moves."""
        return len(self.pos) - self.plan.needs.recent - (self.plan.window or 0) >= max(self.recent.pool.page, PAGE)

    def settle(self, view: LayerView) -> None:
        """Move old tokens out of the recent zone: admit, evict, encode, summarise, place."""
        settle(self, view)

    def due(self, step: Step) -> list[Evict]:
        """The evictors that run after this step."""
        return [e for e in self.plan.chain(Evict) if e.due(step)]

    def awaits(self, step: Step) -> bool:
        """Whether after this step it settles together with the other layers among whose tokens an Evict chooses."""
        return self.plan.after is not None and any(e.together for e in self.due(step))

    def drop(self, n: int) -> None:
        """The n oldest tokens, whole pages, leave the recent zone."""
        self.gone = int(self.pos.array(n)[-1]) + 1
        self.recent.drop_front(n // self.recent.pool.page)
        self.pos.drop(n)
        self.account()

    def account(self) -> None:
        """Book the bytes that the positions take."""
        if (size := self.pos.nbytes) != self._side:
            self.pools.ledger.add("device", size - self._side)
            self._side = size

    def count(self, method: object, **amounts: float) -> None:
        """Add to the counters that prove what a method did; what is no method (the raw codec, say) counts nothing."""
        if isinstance(method, Method):
            for name, amount in amounts.items():
                self.actions[method.slug][name] += amount

    # ---- life

    def rows(self) -> Rows:
        """The settled rows of all KV heads, or none."""
        if self.settled is None:
            return Rows.empty(self.shape.kv_heads, self.recent.pool.page)
        return self.settled.rows() if self.sharers == 1 else self.settled.shared(self.sharers)

    def truncate(self, upto: int) -> None:
        """Forget the tokens at position `upto` and later. Reaches only into the recent zone."""
        taken = len(self.pos) - (n := int(self.pos.below(upto)))
        if not taken and upto >= self.gone:
            return
        if self.gone and upto < self.gone + (self.plan.window or 1) - 1:
            raise LongspoolError(
                f"Layer {self.layer} can't be rolled back to position {upto}: tokens up to {self.gone - 1} have left its recent zone; "
                "whoever rolls back must declare Needs(recent=...)."
            )
        self.recent.truncate(n)
        self.pos.keep(n)
        self.account()
        if self.drawn is not None:
            held = self.longest + n
            self.drawn.put(self.drawn.whole(held + taken)[:, :held])
        if self.past:
            self.remember([torch.cat(self.past)[:-taken].clone()])

    def share(self, other: LayerMemory) -> None:
        """Hold the same tokens as another memory of this layer; pages are shared until one side writes. It must be empty."""
        for mine, theirs in zip(self.zones, other.zones, strict=True):
            mine.take_over(theirs)
        self.pos, self.gone = other.pos.copy(), other.gone
        self.account()
        if self.drawn is not None and other.drawn is not None:
            self.drawn.put(other.drawn.whole(other.longest + len(other.pos)))
        self.remember(list(other.past))
        self.keep(other.index)

    def take_over(self, other: LayerMemory, since: int = 0) -> None:
        """Append the other memory's tokens from position `since` on to the recent zone, and know its queries and what they drew."""
        first = int(other.pos.below(since))
        rows = other.read_recent(first)
        pos = other.pos.array()[first:]
        if since == 0:
            settled = other.read_settled()
            pos = np.concatenate([other.positions()[0].numpy()[: len(settled[0][0])], pos])
            rows = [(torch.cat([a, c]), torch.cat([b, d])) for (a, b), (c, d) in zip(settled, rows, strict=True)]
        if self.drawn is not None and other.drawn is not None:
            theirs = other.drawn.whole(other.longest + len(other.pos))[:, 0 if since == 0 else other.longest + first :]
            self.drawn.put(torch.cat([self.drawn.whole(self.longest + len(self.pos)), theirs], 1))
        self.mass = other.mass if since == 0 else None
        start = self.recent.length.copy()
        self.recent.grow(len(pos))
        self.pos.append(pos)
        self.account()
        table, heads = self.recent.rows().table, self.shape.kv_heads
        k, v = torch.cat([k for k, _ in rows]), torch.cat([v for _, v in rows])
        append_rows(self.recent.pool["k"], self.recent.pool["v"], table, torch.from_numpy(start), k, v, torch.arange(heads + 1) * len(pos))
        if other.past and self.plan.queries and (since == 0 or not self.plan.evicts_prompts_only):
            self.remember([torch.cat(other.past)[-self.plan.queries :].clone()])

    def free(self) -> None:
        """Give every page back."""
        self.remember([])
        if self.drawn is not None:
            self.drawn.put(torch.zeros(self.shape.kv_heads, 0))
        self.keep({})
        self.pos.keep(0)
        self.account()
        for zone in self.zones:
            zone.free()

    @property
    def tiers(self) -> dict[str, int]:
        """Live bytes by tier: pages in full, their copies, tables, positions, kept queries, what tokens have drawn, and the index."""
        side = index.weight(self.index) + (self.drawn.nbytes if self.drawn is not None else 0)
        held = {"device": self.pos.nbytes + sum(q.nbytes for q in self.past) + side, "host": 0, "disk": 0}
        for zone in self.zones:
            for tier, amount in zone.tiers.items():
                held[tier] += amount
        return held

    @property
    def bytes(self) -> int:
        return sum(self.tiers.values())

    def check(self) -> None:
        """Raise AssertionError where tables, lengths and positions don't fit together."""
        assert (self.recent.length == len(self.pos)).all(), f"layer {self.layer}: {self.recent.length} tokens, {len(self.pos)} positions"
        for zone in self.zones:
            zone.check()
        for held in self.positions():
            assert (held.diff() > 0).all(), f"layer {self.layer}: positions don't ascend"
