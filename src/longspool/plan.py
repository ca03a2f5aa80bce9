"""Methods -> Plan: seats filled for every layer, needs merged, every conflict reported at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from .errors import PlanError
from .layerplan import PAGE as PAGE
from .layerplan import LayerPlan as LayerPlan
from .layerplan import R
from .method import MATRICES, NOTHING, Method, Needs
from .roles import SEATS, Admit, Decode, Encode, Evict, Head, Ingest, Pattern, Place, Position, Prompt, Prune, Review, Select, Skip
from .values import Shape, Step

LAYERED = (Pattern, Prune, Skip, Admit, Evict, Encode, Place, Select)
WINDOWLESS = (*LAYERED, Position)
"""Seats that leave a model's sliding-window layers alone: those never see farther than the model was trained for."""


@dataclass(frozen=True)
class Item:
    """A method and the layers it serves: `first` to `last`, both included; None is the last layer."""

    method: Method
    first: int = 0
    last: int | None = None

    @property
    def everywhere(self) -> bool:
        return self.first == 0 and self.last is None

    def serves(self, layer: int) -> bool:
        return self.first <= layer and (self.last is None or layer <= self.last)

    def __str__(self) -> str:
        return str(self.method) if self.everywhere else f"{self.method} @ {self.first}-{'' if self.last is None else self.last}"


@dataclass(frozen=True)
class Plan:
    """A recipe resolved for a model. Hashable; two requests with equal plans share attention calls."""

    items: tuple[Item, ...]
    shape: Shape
    dtype: torch.dtype = torch.float16
    base: Needs = NOTHING
    """What every layer keeps whatever the methods need."""

    @functools.cached_property
    def layers(self) -> tuple[LayerPlan, ...]:
        out: list[LayerPlan] = []
        for layer, window in enumerate(self.shape.windows):
            on = tuple(i.method for i in self.items if i.serves(layer) and not (window and isinstance(i.method, WINDOWLESS)))
            # What an earlier layer pruned is missing in all later ones, whether they prune or not.
            pruned = any(plan.chain(Prune) for plan in out)
            needs = functools.reduce(Needs.merge, (m.needs() for m in on), self.base.merge(Needs(ragged=pruned)))
            out.append(LayerPlan(on, needs, self.dtype, window))
        made: dict[LayerPlan, LayerPlan] = {}
        return tuple(made.setdefault(plan, plan) for plan in _chosen_together(_joined(out)))

    @functools.cached_property
    def chunk(self) -> int | None:
        """The most tokens of a prompt that are read at once."""
        return min((n for m in self.methods if (n := m.needs().chunk) is not None), default=None)

    @functools.cached_property
    def text(self) -> bool:
        """Whether memories know their tokens."""
        return any(m.needs().text for m in self.methods)

    @functools.cached_property
    def _observing(self) -> tuple[LayerPlan, ...]:
        return tuple(dict.fromkeys(layer for layer in self.layers if layer.observers))

    def watches(self, step: Step) -> bool:
        """Whether the attention of a request's step is observed in some layer."""
        return any(layer.watches(step) for layer in self._observing)

    @functools.cached_property
    def away(self) -> bool:
        """Whether settled pages live elsewhere and are fetched to the device."""
        return any(place.home != "device" for place in self.chain(Place))

    @functools.cached_property
    def uniform(self) -> bool:
        """Whether tokens leave the same memory and logits when they are read as a prompt and when they are decoded."""
        seats = tuple(seat for seat in (*LAYERED, Ingest, Review) if seat is not Place)  # a Place may sit on one of these as well
        return not any(isinstance(m, seats) for m in self.methods)

    @functools.cached_property
    def late(self) -> bool:
        """Whether a prompt that is read in one piece is read as without any method, which come to their turn after it."""
        early = (Prompt, Position, Ingest, Pattern, Prune, Skip, Review)
        wants = [m.needs() for m in self.methods]
        looks = any(n.mass or n.drawn or n.text or n.chunk is not None or n.keys == "bare" for n in wants)
        return not (looks or any(isinstance(m, early) for m in self.methods))

    def one(self, seat: type[R]) -> R | None:
        """The method on a seat that is not layered."""
        found = [i.method for i in self.items if isinstance(i.method, seat)]
        return cast("R", found[0]) if found else None

    def chain(self, seat: type[R]) -> tuple[R, ...]:
        return tuple(cast("R", i.method) for i in self.items if isinstance(i.method, seat))

    @property
    def methods(self) -> tuple[Method, ...]:
        return tuple(i.method for i in self.items)

    @functools.cached_property
    def context(self) -> int:
        """The longest sequence, prompt and answer together."""
        position = self.one(Position)
        return position.reach(self.shape.context) if position else self.shape.context

    def __str__(self) -> str:
        return " + ".join(map(str, self.items)) or "dense"

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.items, self.shape, self.dtype, self.base))


def _joined(plans: Sequence[LayerPlan]) -> list[LayerPlan]:
    """Layers that one codec stores together are told of each other: neighbours under the same methods, of which none prunes tokens.
    Sliding-window layers, which no codec serves, may lie between them."""
    runs: list[list[int]] = [[]]
    for layer, plan in enumerate(plans):
        if plan.window is not None:
            continue
        codec, run = plan.one(Encode), runs[-1]
        if run and codec and len(run) < codec.across() and plans[run[-1]] == plan and not plan.chain(Prune):
            run.append(layer)
        else:
            runs.append([layer])
    out = list(plans)
    for run in runs:
        if len(run) > 1:
            for layer in run:
                out[layer] = replace(out[layer], joint=tuple(run))
    return out


def _chosen_together(plans: Sequence[LayerPlan]) -> list[LayerPlan]:
    """Layers among whose tokens one Evict chooses together are told after which of them they settle."""
    last = {e: layer for layer, plan in enumerate(plans) for e in plan.chain(Evict) if e.together}
    return [
        replace(plan, after=after) if (after := next((last[e] for e in plan.chain(Evict) if e in last), None)) is not None else plan
        for plan in plans
    ]


def resolve(items: tuple[Item, ...], shape: Shape, dtype: torch.dtype = torch.float16, base: Needs = NOTHING) -> Plan:
    """Check a recipe against a model. Raises one PlanError with every problem and the nearest sound recipe."""
    reasons = _problems(items, shape)
    if not reasons:
        return Plan(items, shape, dtype, base)
    sound: tuple[Item, ...] = ()
    for item in items:
        if not _problems((*sound, item), shape):
            sound += (item,)
    raise PlanError(*reasons, nearest=" + ".join(map(str, sound)) or "dense")


def _problems(items: tuple[Item, ...], shape: Shape) -> list[str]:
    reasons = [why for item in items for why in _alone(item, shape)]
    for i, a in enumerate(items):
        reasons += [why for b in items[i + 1 :] for why in _together(a, b, shape)]
    return list(dict.fromkeys(reasons))


def _alone(item: Item, shape: Shape) -> list[str]:
    m = item.method
    reasons = [f"{m.slug}: {why}" for why in m.check(shape)]
    if item.first >= shape.layers or (item.last is not None and item.last >= shape.layers):
        reasons.append(f"{item} names layers that this model of {shape.layers} layers does not have.")
    elif item.last is not None and item.last < item.first:
        reasons.append(f"{item} ends before it begins.")
    if not item.everywhere and not isinstance(m, LAYERED):
        reasons.append(f"{m.slug} serves the whole model and can't be limited to some layers.")
    reasons += [
        f"{m.slug} asks for a matrix {name!r}; there are {', '.join(MATRICES)}." for name in m.needs().weights if name not in MATRICES
    ]
    if isinstance(m, WINDOWLESS) and all(shape.windows):
        reasons.append(f"{m.slug} has nothing to serve: every layer of this model is a sliding window.")
    return reasons + [f"{m.slug}: {why}" for why in _problems(tuple(map(Item, m.wrapped())), shape)]


def _together(a: Item, b: Item, shape: Shape) -> list[str]:
    if not any(a.serves(layer) and b.serves(layer) for layer in range(shape.layers)):
        return []
    reasons = [
        f"{seat.__name__} takes one method, got {a.method.slug} and {b.method.slug}."
        for seat in SEATS
        if not seat.many and isinstance(a.method, seat) and isinstance(b.method, seat)
    ]
    try:
        a.method.needs().merge(b.method.needs())
    except PlanError as error:
        reasons += [f"{a.method.slug} and {b.method.slug} don't fit: {why}" for why in error.reasons]
    return reasons + _unsound(a.method, b.method) + _unsound(b.method, a.method)


def _unsound(a: Method, b: Method) -> list[str]:
    """What goes wrong between two seats whatever methods sit on them."""
    reasons = []
    if isinstance(a, Decode) and isinstance(b, Head):
        reasons.append(f"{a.slug} draws from whole logits, which {b.slug} never makes.")
    if isinstance(a, Position) and isinstance(b, Select):
        reasons.append(f"{b.slug} selects by keys where they are, and {a.slug} has queries see them elsewhere.")
    if isinstance(a, Evict) and a.merges and isinstance(b, Pattern):
        reasons.append(f"{b.slug} reads blocks without the weights of the entries that {a.slug} merges.")
    if isinstance(a, Evict) and a.together and isinstance(b, Evict):
        reasons.append(
            f"{a.slug} chooses among the tokens of all its layers together, and {b.slug} layer by layer; give the two different layers."
        )
    if a.needs().observes and (isinstance(b, Pattern) or b.needs().keys == "bare"):
        what = "reads blocks of them" if isinstance(b, Pattern) else "keeps keys bare"
        reasons.append(f"{a.slug} counts the attention that tokens draw, which is not observed where {b.slug} {what}.")
    if isinstance(a, Encode) and (a.across() > 1 or a.joins) and isinstance(b, (Admit, Evict)):
        many = f"{count} layers" if (count := a.across()) < 1000 else "all layers"
        what, by = (many, "layer by layer") if count > 1 else ("all heads of a layer", "head by head")
        reasons.append(
            f"{a.slug} stores {what} in the same pages, so they must hold the same tokens, and {b.slug} chooses {by}; give the two "
            "different layers."
        )
    if a.needs().whole and isinstance(b, (Admit, Evict)):
        reasons.append(f"{a.slug} needs every token in its memory, and {b.slug} drops some; put {b.slug} inside: {a.slug}({b.slug}).")
    return reasons
