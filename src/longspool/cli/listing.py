"""`methods`: the catalogue as a table, as JSON and as the documentation's Markdown."""

from __future__ import annotations

import io
import json

from rich.console import Console
from rich.table import Table

from ..catalogue import Entry, methods


def as_json() -> str:
    told = [
        {
            "name": e.name,
            "seat": e.seat,
            "card": e.card,
            "paper": f"{e.paper}, {e.link}",
            "identity": e.identity,
            "exact": e.exact,
            "question": e.question,
            "parameters": e.parameters,
        }
        for e in methods()
    ]
    return json.dumps(told, indent=2, default=str) + "\n"


def plain() -> str:
    """A table as wide as the terminal."""
    table = Table("name", "seat", "card", "exact", "question", "what it does", box=None, header_style="bold", pad_edge=False)
    for e in methods():
        table.add_row(e.name, e.seat, e.card, _yes(e.exact), _yes(e.question), _what(e))
    return drawn(table)


def markdown() -> str:
    lines = ["| method | seat | exact | question | what it does | parameters | paper |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for e in methods():
        parameters = ", ".join(f"`{name}={value!r}`" if value is not None else f"`{name}`" for name, value in e.parameters.items())
        lines.append(f"| `{e.name}` | {e.seat} | {_yes(e.exact)} | {_yes(e.question)} | {_what(e)} | {parameters} | {_paper(e)} |")
    return "\n".join(lines) + "\n"


def drawn(*parts: Table | str) -> str:
    """Tables and lines as text for stdout."""
    held = io.StringIO()
    out = Console(highlight=False)
    sized = Console(file=held, width=out.width, highlight=False, force_terminal=out.is_terminal, no_color=out.no_color)
    for part in parts:
        sized.print(part, markup=False)
    return "\n".join(line.rstrip() for line in held.getvalue().split("\n"))


def _yes(so: bool) -> str:
    return "yes" if so else ""


def _what(entry: Entry) -> str:
    """The docstring's first line without the method's name in front."""
    return entry.idea.partition(": ")[2] or entry.idea


def _paper(entry: Entry) -> str:
    place, _, number = entry.link.partition(":")
    return f"[{entry.paper}](https://arxiv.org/abs/{number})" if place == "arXiv" else f"{entry.paper} {entry.link}".strip()
