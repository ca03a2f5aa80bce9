"""Writes what is generated from the methods: docs/methods.md and the README's list. `make docs` runs it, a test holds them to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


MEASURED = (
    "What `longspool verify` found on SmolLM2-135M, from the records under benchmarks/methods. *Divergence* is the mean Kullback-Leibler "
    "divergence from dense, in nats a token, over real text that follows a prompt; the control spends the same budget blindly. *Bytes* are "
    "those that a token it keeps takes, of one layer and KV head, claimed and held, and the whole memory as a part of dense fp16's. *Step* "
    "is a decoding step at the longer of two lengths, as a part of dense's, and *faster from* the length at which the two cross. Some "
    "settings and rivals (the windows and kernels of `snapkv` and `laprox`, the budget of `knorm`, the rival of `tova`) were chosen by "
    "results on these same texts after others had failed, so their figures flatter; older records lack the lines on what is spent."
)


def table() -> str:
    """docs/methods.md."""
    return f"# Methods\n\n{HEAD}\n\n{markdown()}{_measured()}"


def _measured() -> str:
    """The table of the records, or nothing where there is none."""
    records = [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks" / "methods").glob("*.json"))]
    if not records:
        return ""
    head = "| method | its paper says | required here | control or rival | method | bar | met | bytes | step | faster from |"
    lines = [f"\n## Measured\n\n{MEASURED}\n", head, "| --- " * 10 + "|"]
    for record in records:
        for i, line in enumerate(record["lines"]):
            first = [f"`{record['slug']}`", record["headline"], *_cost(record["costs"])] if i == 0 else [""] * 5
            name, says, *costs = first
            met = "yes" if line["ok"] else "**no**"
            cells = [name, says, line["what"], line["baseline"], line["method"], line["bar"], met, *costs]
            lines.append("| " + " | ".join(str(c).replace("|", "/") for c in cells) + " |")
    return "\n".join(lines) + "\n"


def _cost(costs: Mapping[str, Any] | None) -> list[str]:
    if costs is None:
        return ["", "", ""]
    step = costs["step_ms"][1] / costs["dense_ms"][1]
    gains = "never" if costs["break_even"] is None else f"{costs['break_even']:,}"
    return [f"{costs['claimed']:.0f} / {costs['held']:.0f}, {costs['share']:.1%}", f"{step:.2f}x", gains]


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
