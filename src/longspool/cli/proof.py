"""`verify`: each method's trials under a progress bar, a table of what was required and found, and the records."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from . import answer, show
from .listing import drawn

if TYPE_CHECKING:
    from ..bench.verify import Costs, Verdict


def verified(slugs: list[str], every: bool, model: str, texts: int, seed: int, out: Path | None, as_json: bool) -> bool:
    """Verify the methods one after another, printing as they come. Whether all of them passed."""
    from ..bench.bench import Bench
    from ..bench.verify import known, record, verify

    names = known(slugs, every)
    bench, passed = Bench(answer.opened(model, "", None, "f16", None), texts, seed), True
    try:
        for name in names:
            with show.Bar(name) as bar:
                bench.progress = bar.fraction
                verdict = verify(bench, name, model)
            if out is not None:
                record(verdict, out)
            sys.stdout.write(json.dumps(asdict(verdict)) + "\n" if as_json else plain(verdict))
            sys.stdout.flush()
            passed = passed and verdict.ok
    finally:
        bench.close()
    return passed


def plain(verdict: Verdict) -> str:
    """A verdict for people."""
    table = Table("", "what", "baseline", "method", "bar", box=None, header_style="bold", pad_edge=False)
    for line in verdict.lines:
        table.add_row("pass" if line.ok else "FAIL", line.what, line.baseline, line.method, line.bar)
    head = f"{verdict.slug}: {'passed' if verdict.ok else 'FAILED'} ({verdict.paper})"
    return drawn(head, table, *([_cost(verdict.costs)] if verdict.costs else []), f"Again: {verdict.command}\n")


def _cost(costs: Costs) -> str:
    (short, long), (a, b), (c, d) = costs.lengths, costs.step_ms, costs.dense_ms
    gains = "never, as far as two lengths tell" if costs.break_even is None else f"from {costs.break_even:,} tokens on"
    return (
        f"{costs.recipe}: {costs.held:.0f} bytes a kept token, layer and KV head ({costs.claimed:.0f} claimed, {costs.dense:.0f} dense), "
        f"{costs.share:.1%} of dense; a step takes {a:.1f} ms at {short:,} tokens and {b:.1f} at {long:,} (dense {c:.1f} and {d:.1f}): "
        f"faster {gains}."
    )
