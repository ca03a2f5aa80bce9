"""Writes what is generated from the methods: docs/methods.md and the README's list. `make docs` runs it, a test holds them to it."""

from __future__ import annotations

from pathlib import Path

from longspool.catalogue import Entry, methods
from longspool.cli.listing import markdown
from longspool.roles import SEATS, Admit, Decode, Encode, Evict, Head, Pattern, Place, Position, Role, Select

ROOT = Path(__file__).resolve().parent.parent
HEAD = (
    "Written by `make docs` from the methods themselves. Exact ones never change the answer; those marked under *question* choose what "
    "they drop by the question at the prompt's end, so that a later one may miss it; a parameter shows its default."
)
SAID: dict[type[Role], str] = {
    Position: "at which positions old keys are read",
    Pattern: "which blocks of keys the prompt's tokens read",
    Admit: "which tokens are remembered once they are no longer recent",
    Evict: "which remembered tokens are dropped or merged",
    Encode: "in what form remembered tokens are stored",
    Place: "where stored tokens lie, and when they are fetched",
    Select: "which stored tokens the next token reads",
    Head: "how the last state becomes a token",
    Decode: "in which steps an answer is drawn",
}
"""What a seat decides, for those that some method takes."""
START, END = "<!-- methods:start -->\n", "<!-- methods:end -->"


def table() -> str:
    """docs/methods.md."""
    return f"# Methods\n\n{HEAD}\n\n{markdown()}"


def readme() -> str:
    """The README with its list of methods as it should be."""
    text = (ROOT / "README.md").read_text()
    before, rest = text.split(START)
    return before + START + "\n".join(_seats(methods())) + "\n" + END + rest.split(END)[1]


def _seats(found: list[Entry]) -> list[str]:
    """A line for each seat, in the order in which a request meets them."""
    lines = []
    for seat in SEATS:
        names = [f"`{e.name}`" for e in found if seat.__name__ in e.seat.split(", ")]
        if names:
            said = f", {SAID[seat]}" if seat in SAID else ""
            lines.append(f"- **{seat.__name__}**{said}: {', '.join(names)}")
    return lines


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme())
    (ROOT / "docs" / "methods.md").write_text(table())
