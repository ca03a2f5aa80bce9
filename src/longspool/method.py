"""What every method is: a frozen dataclass with parameters, a paper, an identity, its needs and its cost."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import pkgutil
from dataclasses import dataclass
from typing import ClassVar, Literal

from .errors import PlanError
from .values import Shape

Keys = Literal["rotated", "bare"]
LOSSLESS = "lossless"
MATRICES = ("o",)
"""A layer's matrices that a method may ask for: "o" leads from the heads' outputs back to the stream."""


@dataclass(frozen=True)
class Paper:
    """Where a method comes from: the card's number ("" for a baseline), title, link and headline result."""

    card: str
    title: str
    link: str
    headline: str = ""


@dataclass(frozen=True)
class Needs:
    """What a method wants from the memory. The plan takes the maximum of counts and demands equality of `page` and `keys`.

    recent: newest tokens that must stay raw, counted from the end. queries: last query vectors kept for `View.queries`.
    page: tokens a page; None takes any. mass: observed attention mass for `View.mass`. ragged: rows of one layer may
    differ in length. whole: no token may be dropped from the memory. calibrated: what a fitted method's `fit` looks at, of "keys", "bare",
    "values", "queries", "stream" (every layer's, over text) and "model"; see roles.Fitted.
    drawn: the mass that each token has drawn in all steps so far, for `View.drawn`. weights: names of MATRICES for
    `View.weights`. chunk: the most tokens of a prompt that are read at once; the plan takes the minimum. text: the memory
    knows its tokens, for `View.pieces`.
    """

    recent: int = 0
    queries: int = 0
    page: int | None = None
    keys: Keys | None = None
    mass: bool = False
    ragged: bool = False
    whole: bool = False
    calibrated: tuple[str, ...] = ()
    drawn: bool = False
    weights: tuple[str, ...] = ()
    chunk: int | None = None
    text: bool = False

    @property
    def observes(self) -> bool:
        """Whether attention must be observed for it."""
        return self.mass or self.drawn

    def merge(self, other: Needs) -> Needs:
        """Both at once. Raises PlanError where two methods demand different pages or keys."""
        clashes = [
            f"one method needs {name}={a!r} and another {name}={b!r}."
            for name, a, b in (("page", self.page, other.page), ("keys", self.keys, other.keys))
            if a is not None and b is not None and a != b
        ]
        if clashes:
            raise PlanError(*clashes)
        return Needs(
            max(self.recent, other.recent),
            max(self.queries, other.queries),
            self.page if self.page is not None else other.page,
            self.keys or other.keys,
            self.mass or other.mass,
            self.ragged or other.ragged,
            self.whole or other.whole,
            tuple(dict.fromkeys(self.calibrated + other.calibrated)),
            self.drawn or other.drawn,
            tuple(dict.fromkeys(self.weights + other.weights)),
            min((n for n in (self.chunk, other.chunk) if n is not None), default=None),
            self.text or other.text,
        )


NOTHING = Needs()


@dataclass(frozen=True)
class Cost:
    """Per token kept of one layer and KV head: bytes on the device and on the host, bytes moved a decode step, flops a step."""

    device: float = 0.0
    host: float = 0.0
    moved: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True)
class Trial:
    """What shows on a real model that a method works; `longspool verify` runs it.

    `recipe` is the method with the settings of its paper, made small enough for the model at hand. `control` is the same budget spent
    blindly, which `recipe` must beat by more than two standard errors; `beats` are recipes that its paper compares with, which must not
    be better. `on` says what is measured: the divergence from dense over real text that follows the prompt ("text") or repeats a passage
    of it, whose beginning ends the prompt ("repeat"); needles under a question that is part of the prompt ("aware") or comes after it
    ("agnostic"); or that the answer is dense's, token for token ("exact"). Prose is predicted from what is near, so that a window of
    recent tokens is hard to beat there; a passage from far back and a needle want what is far.
    """

    recipe: str
    control: str = ""
    beats: tuple[str, ...] = ()
    on: Literal["text", "repeat", "aware", "agnostic", "exact"] = "text"
    length: int = 4096
    chunk: int = 0
    """Tokens that are read at once; 0 reads the whole prompt before anything settles."""
    forced: int = 32
    """Tokens of text that follow the prompt one by one."""
    within: float | None = None
    """The divergence that it must not exceed, in nats a token."""
    claim: str = ""
    """What the card asks for, in one sentence."""


@dataclass(frozen=True)
class Method:
    """A value: parameters only. What it must remember lives in the memory and dies with the request."""

    paper: ClassVar[Paper]
    identity: ClassVar[dict[str, object] | str | float]
    question: ClassVar[bool] = False
    """Whether what it drops depends on the question at the prompt's end, so that a second question may miss what the first one dropped."""

    trials: ClassVar[tuple[Trial, ...]] = ()
    """What it must show on the real model."""

    example: ClassVar[str] = ""
    """A recipe that makes one, where the bare name does not (wrappers)."""

    def needs(self) -> Needs:
        return Needs()

    def cost(self, shape: Shape) -> Cost:
        return Cost()

    def check(self, shape: Shape) -> list[str]:
        """Sentences that say why these parameters can't run on this model."""
        return []

    def aware(self) -> bool:
        """Whether it is question-aware as it is set up; a wrapper whose choices are those of a method inside is what that one is."""
        return self.question

    @property
    def slug(self) -> str:
        return slug(type(self))

    def wrapped(self) -> tuple[Method, ...]:
        """The methods that this one wraps."""
        found: list[Method] = []
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            found += (
                [value] if isinstance(value, Method) else [m for m in value if isinstance(m, Method)] if isinstance(value, tuple) else []
            )
        return tuple(found)

    def __str__(self) -> str:
        """The recipe text that makes this method again; only parameters that differ from their defaults are named."""
        parts = []
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Method):
                parts.append(str(value))
            elif isinstance(value, tuple) and value and all(isinstance(m, Method) for m in value):
                parts.append(" + ".join(map(str, value)))
            elif value != f.default and not (f.metadata.get("wraps") and not value):
                parts.append(f"{f.name}={value!r}")
        return f"{self.slug}({', '.join(parts)})" if parts else self.slug


def slug(cls: type[Method]) -> str:
    """A method's name in recipes: the name of its file."""
    return cls.__module__.rsplit(".", 1)[-1]


@functools.cache
def registry() -> dict[str, type[Method]]:
    """Every method by name: the files of the rooms under methods/, then the entry points "longspool.methods"."""
    found: dict[str, type[Method]] = {}
    root = importlib.import_module("longspool.methods")
    for info in pkgutil.walk_packages(root.__path__, "longspool.methods."):
        name = info.name.rsplit(".", 1)[-1]
        if not info.ispkg and name != "base" and not name.startswith("_"):
            found[name] = _method_of(importlib.import_module(info.name))
    for entry in importlib.metadata.entry_points(group="longspool.methods"):
        found[entry.name] = entry.load()
    return dict(sorted(found.items()))


def _method_of(module: object) -> type[Method]:
    """The one method class that a method file defines."""
    own = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Method) and c.__module__ == module.__name__]  # type: ignore[attr-defined]
    if len(own) != 1:
        raise ImportError(f"{module.__name__} must define exactly one method class, found {len(own)}")  # type: ignore[attr-defined]
    return own[0]
