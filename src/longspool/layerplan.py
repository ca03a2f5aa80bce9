"""One layer's part of a plan."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeVar, cast

import torch

from .method import Method, Needs
from .roles import SEATS, Admit, Decode, Encode, Evict, Pattern, Place, Prune, Role, Select
from .values import Step

PAGE = 64
SETTLED = (Admit, Evict, Encode, Place, Select)
R = TypeVar("R", bound=Role)


@dataclass(frozen=True)
class LayerPlan:
    """One layer's seats and needs. Layers with equal plans share one object."""

    methods: tuple[Method, ...]
    needs: Needs
    dtype: torch.dtype
    window: int | None
    joint: tuple[int, ...] = ()
    """The layers that the codec stores together, this one among them; none where it stands alone."""
    after: int | None = None
    """The last of the layers among whose tokens an Evict chooses together, this one among them."""

    @functools.cached_property
    def seats(self) -> dict[type[Role], tuple[Method, ...]]:
        return {seat: tuple(m for m in self.methods if isinstance(m, seat)) for seat in SEATS}

    def chain(self, seat: type[R]) -> tuple[R, ...]:
        return cast("tuple[R, ...]", self.seats[seat])

    def one(self, seat: type[R]) -> R | None:
        found = self.seats[seat]
        return cast("R", found[0]) if found else None

    @functools.cached_property
    def page(self) -> int:
        return self.needs.page or PAGE

    @functools.cached_property
    def settles(self) -> bool:
        """Whether anything happens to old tokens; if not, all stay in the recent zone."""
        return any(self.seats[seat] for seat in SETTLED)

    @functools.cached_property
    def evicts_prompts_only(self) -> bool:
        """Whether it evicts, but never while decoding."""
        evicts = self.chain(Evict)
        others = any(m.needs().queries for m in self.methods if not isinstance(m, Evict))
        return bool(evicts) and not others and not any(e.decodes() for e in evicts)

    @functools.cached_property
    def plain(self) -> bool:
        """Whether a step sees nothing but the recent zone, in the ordinary way."""
        return not (self.settles or self.bare or self.observers or self.seats[Pattern])

    @functools.cached_property
    def observers(self) -> tuple[Method, ...]:
        """The methods that look at observed attention."""
        return tuple(m for m in self.methods if m.needs().observes)

    def watches(self, step: Step) -> bool:
        """Whether one of them wants that of a request's step; what is no Evict wants it always."""
        return any(not isinstance(m, Evict) or m.watches(step) for m in self.observers)

    @functools.cached_property
    def ragged(self) -> bool:
        """Whether positions must be stored because rows don't simply hold tokens 0, 1, 2 and so on."""
        return self.needs.ragged or self.bare or any(self.seats[s] for s in (Admit, Evict, Prune))

    @functools.cached_property
    def alike(self) -> bool:
        """Whether all KV heads hold the same tokens."""
        return not (self.seats[Admit] or self.seats[Evict])

    @functools.cached_property
    def bare(self) -> bool:
        return self.needs.keys == "bare"

    @functools.cached_property
    def rollback(self) -> int:
        """Newest tokens that a decode flow may take back."""
        return max((m.needs().recent for m in self.methods if isinstance(m, Decode)), default=0)

    @functools.cached_property
    def queries(self) -> int:
        """How many of the last queries are kept: what methods want, also after a rollback."""
        return self.needs.queries and self.needs.queries + self.rollback

    @functools.cached_property
    def joins(self) -> bool:
        """Whether all KV heads share settled pages."""
        return any(codec.joins for codec in self.chain(Encode))

    @functools.cached_property
    def prompts(self) -> bool:
        """Whether only whole prompts settle."""
        return any(codec.prompts for codec in self.chain(Encode))

    def rows(self, heads: int) -> int:
        """Settled rows of a layer with so many KV heads: one for each, or one for all."""
        return 1 if self.joins else heads

    @functools.cached_property
    def weighted(self) -> bool:
        """Whether stored entries carry a log-weight."""
        return any(m.merges for m in self.chain(Evict))
