"""Recipe text <-> methods: "snapkv(budget=4096) + million + quest @ 2-". Parsed by Python's own grammar, never evaluated."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import re
import types
import typing

from .errors import PlanError
from .method import Method, registry
from .plan import Item

_LAYERS = re.compile(r"@\s*(\d*)\s*-\s*(\d*)|@\s*(\d+)")
_RANGE = re.compile(r"(\d*)-(\d*)")
DENSE = ("", "dense")


def parse(text: str) -> tuple[Item, ...]:
    """The methods of a recipe, in order. Raises PlanError with what was not understood and what would be."""
    if text.strip() in DENSE:
        return ()
    quoted = _LAYERS.sub(lambda m: f"@ '{m[3]}-{m[3]}'" if m[3] else f"@ '{m[1]}-{m[2]}'", text)
    try:
        tree = ast.parse(quoted.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise PlanError(f"The recipe {text!r} is not of the form 'name(parameter=value) + name'.") from error
    return tuple(_item(part, text) for part in _terms(tree))


def _terms(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _terms(node.left) + _terms(node.right)
    return [node]


def _item(node: ast.expr, text: str) -> Item:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult) and isinstance(node.right, ast.Constant):
        if not (span := _RANGE.fullmatch(str(node.right.value))):
            raise PlanError(
                f"The layers of {ast.unparse(node.left)} must be a number or a range such as 2-5, 2- or -5, not {node.right.value!r}."
            )
        return Item(_method(node.left, text), int(span[1] or 0), int(span[2]) if span[2] else None)
    return Item(_method(node, text))


def _method(node: ast.expr, text: str) -> Method:
    if isinstance(node, ast.Name):
        return _build(_known(node.id), [], {})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        inner = [_method(term, text) for arg in node.args for term in _terms(arg)]
        names = [k.arg for k in node.keywords]
        if twice := [n for n in names if names.count(n) > 1]:
            raise PlanError(f"{node.func.id} is given the parameter {twice[0]} twice.")
        return _build(_known(node.func.id), inner, {k.arg or "**": _value(k.value, k.arg or "**") for k in node.keywords})
    raise PlanError(f"The recipe {text!r} has a part that is no method: {ast.unparse(node)!r}. Write name or name(parameter=value).")


def _known(name: str) -> type[Method]:
    known = registry()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1, 0.4)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise PlanError(f"There is no method {name!r}{hint} `longspool methods` lists all {len(known)}.")
    return known[name]


def _value(node: ast.expr, name: str) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError) as error:
        raise PlanError(f"The parameter {name} must be a number, text, tuple or dict, not {ast.unparse(node)!r}.") from error


def _build(cls: type[Method], inner: list[Method], params: dict[str, object]) -> Method:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    name = cls.__module__.rsplit(".", 1)[-1]
    wraps = [f for f in fields.values() if f.metadata.get("wraps")]
    if inner and not wraps:
        raise PlanError(f"{name} wraps no other method; give its parameters by name, for example {name}({_example(cls)}).")
    if unknown := [p for p in params if p not in fields or fields[p] in wraps]:
        own = ", ".join(f.name for f in fields.values() if f not in wraps) or "none"
        raise PlanError(f"{name} has no parameter {unknown[0]!r}; its parameters are: {own}.")
    if wraps:
        params = params | {wraps[0].name: tuple(inner) if wraps[0].metadata["wraps"] == "many" else _single(name, inner)}
    params = {p: tuple(v) if isinstance(v, list) else v for p, v in params.items()}
    hints = typing.get_type_hints(cls)
    for p, v in params.items():
        if fields[p] not in wraps and not _fits(v, hints[p]):
            raise PlanError(f"{name}: {p}={v!r} must be {_said(hints[p])}.")
    return cls(**params)


def _fits(value: object, hint: object) -> bool:
    """Whether a value is of the type that a parameter is annotated with."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, parts[0]) for v in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint) if isinstance(hint, type) else True


_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}


def _said(hint: object) -> str:
    """A parameter's type in words."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_said, parts))
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, parts))
    if origin is tuple:
        return f"a list, each of it {_said(parts[0])}"
    return _WORDS.get(hint, str(hint)) if isinstance(hint, type) else str(hint)


def _single(name: str, inner: list[Method]) -> Method:
    if len(inner) != 1:
        raise PlanError(f"{name} wraps exactly one method, for example {name}(snapkv(budget=1024)); got {len(inner)}.")
    return inner[0]


def _example(cls: type[Method]) -> str:
    return ", ".join(f"{f.name}={f.default!r}" for f in dataclasses.fields(cls)[:1])
