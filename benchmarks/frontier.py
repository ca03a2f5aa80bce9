"""Quality for bytes, of every method: divergence from dense, top-1 agreement and perplexity of recipes against what they hold and read.

python -m benchmarks.frontier [--length 6k] [--texts 8] [--forced 64] [--seed 0] [RECIPE ...]

Without recipes it takes those of the trials that all methods declare, and the stacks below. A recipe is on the frontier where no other one
holds as few bytes (or reads as few tokens a step) with a lower divergence.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from statistics import fmean

from benchmarks import store
from longspool import LLM
from longspool.bench.quality import Mean
from longspool.bench.trial import Bench, Score
from longspool.errors import PlanError
from longspool.method import registry

RESULT = store.RESULTS / "frontier.json"
LENGTHS = {"2k": 2048, "4k": 4096, "6k": 6000}
STACKS = (
    "streaming(window=1496)",
    "snapkv(budget='25%')",
    "adakv(snapkv(budget='25%'))",
    "snapkv(budget='25%') + int4",
    "quest(budget=1024) + int4",
)


def recipes() -> list[str]:
    """What all methods show that they do on texts, their controls, and some stacks."""
    trials = [t for cls in registry().values() for t in cls.trials if t.on == "text" and not t.chunk]
    return list(dict.fromkeys(r for t in trials for r in (t.recipe, t.control, *t.beats) if r)) + list(STACKS)


def row(score: Score, dense: Score, llm: LLM) -> dict[str, object]:
    """One recipe's numbers."""
    shape, steps = llm.model.shape, sum(len(r.steps) for r in score.runs)
    read = sum(did.get("tokens_read", 0.0) for did in score.actions.values())
    kept = fmean(r.kept for r in score.runs)
    rows = shape.layers * shape.kv_heads
    worse = fmean(q.nll for q in score.texts) - fmean(q.nll for q in dense.texts)
    return {
        "recipe": score.recipe,
        "bytes": round(score.share, 4),
        "read": round((read / steps if read else kept) / rows),
        "kl": round(fmean(score.kl), 5),
        "kl_error": round(Mean.of(score.kl).error, 5),
        "top1": round(score.top1, 4),
        "perplexity": round(math.exp(worse), 4),
        "step_ms": round(score.step * 1e3, 2),
    }


def marked(rows: list[dict[str, object]]) -> None:
    """Say of each row whether it is on a frontier."""
    for one in rows:
        for name in ("bytes", "read"):
            better = [o for o in rows if o[name] <= one[name] and o["kl"] < one["kl"]]  # type: ignore[operator]
            one[f"best_for_{name}"] = not better


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--length", choices=LENGTHS, default="6k")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--forced", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    llm, length, rows = LLM("smollm2"), LENGTHS[args.length], []
    bench = Bench(llm, args.texts, args.seed, forced=args.forced)
    dense = bench.score("dense", "text", length)
    for recipe in ["dense", *(args.recipes or recipes())]:
        try:
            rows.append(row(bench.score(recipe, "text", length), dense, llm))
        except PlanError as error:
            print(f"{recipe}: {error}", file=sys.stderr)
            continue
        print(json.dumps(rows[-1]), flush=True)
    bench.close()
    marked(rows)
    about = {"length": length, "texts": args.texts, "forced": args.forced, "seed": args.seed}
    RESULT.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    print("\n| recipe | bytes | tokens read | divergence | top-1 | perplexity | step |\n| --- | --- | --- | --- | --- | --- | --- |")
    for one in sorted(rows, key=lambda r: r["kl"]):  # type: ignore[arg-type,return-value]
        best = " *" if one["best_for_bytes"] or one["best_for_read"] else ""
        print(
            f"| `{one['recipe']}`{best} | {one['bytes']:.1%} | {one['read']:,} | {one['kl']} ± {one['kl_error']} | {one['top1']:.1%} | "
            f"{one['perplexity']:.3f}x | {one['step_ms']} ms |"
        )


if __name__ == "__main__":
    main()
