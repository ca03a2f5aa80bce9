"""The result files: one a peer, each row with its run, so that a peer can be measured again without the others."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
Fact = float | int | str | list[float] | list[int] | list[str] | None


@dataclass
class Row:
    """One (peer, variant, task, length) of one run; `repeats` holds the raw facts of each repeat."""

    run: str
    peer: str
    variant: str
    task: str
    length: str
    repeats: list[dict] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.variant, self.task, self.length

    @property
    def missing(self) -> str:
        """The line that installs the peer, if it was not there."""
        return next((r["missing"] for r in self.repeats if "missing" in r), "")

    @property
    def failed(self) -> str:
        return next((r["failed"] for r in self.repeats if "failed" in r), "")

    def values(self, name: str) -> list[float]:
        """One number a repeat; of a list its median."""
        found = [r[name] for r in self.repeats if r.get(name) is not None]
        return [statistics.median(v) if isinstance(v, list) else v for v in found]


@dataclass(frozen=True)
class Run:
    """Where and how the rows of one run were measured."""

    name: str
    command: str
    source: str
    machine: dict
    ceiling: dict
    text: str


def save(run: Run, row: Row) -> None:
    """Put a row in its peer's file in place of the older one; runs that no row belongs to any more are dropped."""
    runs, rows = load(row.peer)
    rows = [r for r in rows if r.key != row.key] + [row]
    runs[run.name] = run
    alive = {r.run for r in rows}
    content = {
        "runs": [asdict(r) for r in runs.values() if r.name in alive],
        "rows": [asdict(r) for r in sorted(rows, key=lambda r: r.key)],
    }
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"peer-{row.peer}.json"
    partial = target.with_suffix(".part")
    partial.write_text(dump(content) + "\n")
    partial.replace(target)


def load(peer: str) -> tuple[dict[str, Run], list[Row]]:
    path = RESULTS / f"peer-{peer}.json"
    if not path.exists():
        return {}, []
    raw = json.loads(path.read_text())
    return {r["name"]: Run(**r) for r in raw["runs"]}, [Row(**r) for r in raw["rows"]]


def dump(content: object) -> str:
    """JSON with short lists on one line: these files are read in diffs."""
    return _text(content, 0)


def _text(value: object, depth: int) -> str:
    flat = json.dumps(value, ensure_ascii=False)
    if len(flat) + depth <= 138 or not isinstance(value, (dict, list)) or not value:
        return flat
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        body = [f"{pad}{json.dumps(k)}: {_text(v, depth + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(body) + "\n" + " " * depth + "}"
    if all(isinstance(v, (int, float)) for v in value):
        return flat
    return "[\n" + ",\n".join(pad + _text(v, depth + 1) for v in value) + "\n" + " " * depth + "]"
