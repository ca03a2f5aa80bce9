"""The methods that are here, as data: for `longspool methods`, the docs and whoever chooses."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass

from .method import LOSSLESS, Method, registry
from .roles import SEATS


@dataclass(frozen=True)
class Entry:
    """One method. `identity` is the setting at which it changes nothing, `exact` whether it never changes the answer, `question` whether
    what it drops depends on the question."""

    name: str
    seat: str
    card: str
    paper: str
    link: str
    identity: str
    exact: bool
    question: bool
    parameters: dict[str, object]
    idea: str


def methods() -> list[Entry]:
    """Every method found, by name."""
    return [_entry(name, cls) for name, cls in registry().items()]


def _entry(name: str, cls: type[Method]) -> Entry:
    doc = _idea(cls).strip().split("\n")[0]
    seats = ", ".join(s.__name__ for s in SEATS if issubclass(cls, s))
    given = {f.name: None if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(cls)}
    identity = (
        cls.identity
        if isinstance(cls.identity, str)
        else f"within {cls.identity:g}"
        if isinstance(cls.identity, float)
        else _setting(name, cls)
    )
    return Entry(name, seats, cls.paper.card, cls.paper.title, cls.paper.link, identity, cls.identity == LOSSLESS, cls.question, given, doc)


def _setting(name: str, cls: type[Method]) -> str:
    assert isinstance(cls.identity, dict)
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in cls.identity.items())})"


def _idea(cls: type[Method]) -> str:
    """The docstring of the file that defines a method."""
    return sys.modules[cls.__module__].__doc__ or ""
