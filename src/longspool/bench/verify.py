"""`longspool verify`: a method's trials on the real model, what it costs there, and the record of both."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import torch

from .. import __version__
from ..errors import LongspoolError
from ..method import registry
from ..recipe import parse
from .bench import FORCED, Bench
from .trial import Line, claimed, tried

LENGTHS = (1024, 4096)


@dataclass(frozen=True)
class Costs:
    """What a method costs on this machine. Bytes are those of a token that it keeps, of one layer and KV head: claimed by its methods, held
    in all tiers with page ends and tables, held by dense; `share` is what it holds at the longer length as a part of dense. Steps are
    milliseconds a token at two lengths, and `break_even` is the length in tokens from which the method is faster (None: it is not, as far
    as a line through both tells)."""

    recipe: str
    claimed: float
    held: float
    dense: float
    share: float
    lengths: tuple[int, int]
    step_ms: tuple[float, float]
    dense_ms: tuple[float, float]
    break_even: int | None


@dataclass(frozen=True)
class Verdict:
    """Everything that a verification found, and the command that finds it again."""

    slug: str
    card: str
    paper: str
    headline: str
    model: str
    seed: int
    texts: int
    command: str
    lines: tuple[Line, ...]
    claims: tuple[str, ...]
    costs: Costs | None

    @property
    def ok(self) -> bool:
        return all(line.ok for line in self.lines)


def known(slugs: Sequence[str], everything: bool) -> list[str]:
    """The methods that are to be verified. Raises LongspoolError for one that does not exist or has nothing to show."""
    found = registry()
    if everything:
        return [name for name, cls in found.items() if cls.trials]
    if not slugs:
        raise LongspoolError("Name the methods to verify, or --all.")
    for slug in slugs:
        if slug not in found:
            parse(slug)  # says which name is nearest
        elif not found[slug].trials:
            raise LongspoolError(f"{slug} declares no trials yet, so there is nothing to verify.")
    return list(dict.fromkeys(slugs))


def verify(bench: Bench, slug: str, model: str) -> Verdict:
    """Run the trials of a method."""
    cls = registry()[slug]
    lines = tuple(line for trial in cls.trials for line in tried(bench, trial))
    paper, recipe = cls.paper, cls.trials[0].recipe
    command = f"longspool verify {slug} -m {model} --texts {bench.count} --seed {bench.seed}"
    claims = tuple(t.claim for t in cls.trials if t.claim)
    about = (slug, paper.card, f"{paper.title}, {paper.link}", paper.headline, model, bench.seed, bench.count, command)
    return Verdict(*about, lines, claims, costs(bench, recipe))


def costs(bench: Bench, recipe: str, lengths: tuple[int, int] = LENGTHS) -> Costs | None:
    """Bytes and times of a recipe at two lengths of one text; None where the model's context is too short for them."""
    llm = bench.llm
    if llm.model.shape.context < lengths[1] + FORCED:
        return None
    times: dict[str, list[float]] = {"dense": [], recipe: []}
    for length in lengths:
        reading = bench.readings("text", length)[0]
        for name in times:
            run = reading.under(name)
            times[name].append(1e3 * median(run.steps))
    shape, crossing = llm.model.shape, crossing_of(times["dense"], times[recipe], lengths)
    held, dense = sum(run.bytes.values()) / run.kept, run.dense / (shape.layers * shape.kv_heads * lengths[1])
    steps = lengths, _pair(times[recipe]), _pair(times["dense"])
    return Costs(recipe, claimed(recipe, shape), held, dense, run.share, *steps, crossing)


def _pair(values: list[float]) -> tuple[float, float]:
    return round(values[0], 3), round(values[1], 3)


def crossing_of(dense: list[float], own: list[float], lengths: tuple[int, int]) -> int | None:
    """The length at which two straight lines through times at two lengths cross, where the method's is the flatter one."""
    rise = ((dense[1] - dense[0]) - (own[1] - own[0])) / (lengths[1] - lengths[0])
    if rise <= 0:
        return 0 if own[0] < dense[0] and own[1] < dense[1] else None
    return max(round(lengths[0] + (own[0] - dense[0]) / rise), 0)


def record(verdict: Verdict, folder: Path) -> Path:
    """Write a verdict as JSON, with where and when it was found."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{verdict.slug}.json"
    machine = {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    about = {"date": datetime.now(timezone.utc).date().isoformat(), "longspool": __version__, "machine": machine, "ok": verdict.ok}
    path.write_text(json.dumps(asdict(verdict) | about, indent=1) + "\n")
    return path
