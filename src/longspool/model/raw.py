"""Typed look-ups in a Hugging Face config dict, whose errors name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ..errors import ModelError

T = TypeVar("T", int, float, str, bool)
_WORD = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


class Raw:
    """A config dict. A key that is absent or null takes the default; without one it is an error."""

    def __init__(self, values: Mapping[str, object], where: str = "config") -> None:
        self.values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        return self._get(key, int, default)

    def number(self, key: str, default: float | None = None) -> float:
        return self._get(key, float, default)

    def text(self, key: str, default: str | None = None) -> str:
        return self._get(key, str, default)

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._get(key, bool, default)

    def many(self, key: str, kind: type[T], length: int) -> tuple[T, ...]:
        """The first `length` values of a list."""
        values = self.values.get(key)
        if not isinstance(values, (list, tuple)) or len(values) < length:
            have = f"{len(values)}" if isinstance(values, (list, tuple)) else f"{values!r}"
            raise ModelError(f"The model's {self.where} needs {length} values in {key!r} but has {have}.")
        return tuple(Raw({key: v}, self.where)._get(key, kind, None) for v in values[:length])

    def over(self, defaults: Mapping[str, object]) -> Raw:
        """The same over defaults for absent keys; a null stays a null."""
        return Raw({**defaults, **self.values}, self.where)

    def inner(self, key: str) -> Raw:
        """The config nested under that key, with this one's values behind its own; or this one, where nothing is nested."""
        nested = self.values.get(key)
        return Raw({**self.values, **nested}, f"{self.where}'s {key}") if isinstance(nested, Mapping) else self

    def _get(self, key: str, kind: type[T], default: T | None) -> T:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"The model's {self.where} has no {key!r}, which is needed.")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise ModelError(f"The model's {self.where} gives {key!r} as {value!r}, where {_WORD[kind]} is needed.")
        return value
