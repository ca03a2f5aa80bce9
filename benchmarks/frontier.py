"""Quality for bytes, of every method: divergence from dense, top-1 agreement and perplexity of recipes against what they hold and read.

python -m benchmarks.frontier [--length 6k] [--texts 8] [--forced 64] [--seed 0] [RECIPE ...]

Without recipes it takes those of the trials that all methods declare, and the stacks below. A recipe is on the frontier where no other one
holds as few bytes (or reads as few tokens a step) with a lower divergence.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass

from benchmarks import store
from longspool import LLM
from longspool.bench.bench import Bench, Score
from longspool.bench.quality import Mean
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


@dataclass(frozen=True)
class Row:
    """One recipe's numbers: bytes held as a part of dense fp16's, tokens that a row reads at a step, divergence from dense in nats a token
    with its standard error, agreement with dense's most likely token, perplexity as a multiple of dense's."""

    recipe: str
    bytes: float
    read: int
    kl: float
    kl_error: float
    top1: float
    perplexity: float
    step_ms: float

    @staticmethod
    def of(score: Score) -> Row:
        kl = Mean.of(score.kl)
        quality = round(kl.mean, 5), round(kl.error, 5), round(score.top1, 4), round(1 + score.surprise, 4)
        return Row(score.recipe, round(score.share, 4), round(score.read), *quality, round(score.step * 1e3, 2))

    def best(self, rows: list[Row]) -> str:
        """On which frontiers it is."""
        cheaper = {"bytes": [r for r in rows if r.bytes <= self.bytes], "read": [r for r in rows if r.read <= self.read]}
        return " and ".join(name for name, others in cheaper.items() if all(r.kl >= self.kl for r in others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--length", choices=LENGTHS, default="6k")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--forced", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    llm, length = LLM("smollm2"), LENGTHS[args.length]
    rows: list[Row] = []
    bench = Bench(llm, args.texts, args.seed)
    for recipe in ["dense", *(args.recipes or recipes())]:
        try:
            rows.append(Row.of(bench.score(recipe, "text", length, forced=args.forced)))
        except PlanError as error:
            print(f"{recipe}: {error}", file=sys.stderr)
            continue
        print(json.dumps(asdict(rows[-1])), flush=True)
    bench.close()
    about = {"length": length, "texts": args.texts, "forced": args.forced, "seed": args.seed}
    RESULT.write_text(json.dumps(about | {"rows": [asdict(r) | {"best_for": r.best(rows)} for r in rows]}, indent=1) + "\n")
    print("\n| recipe | bytes | tokens read | divergence | top-1 | perplexity | step | best for |\n" + "| --- " * 8 + "|")
    for r in sorted(rows, key=lambda r: r.kl):
        print(
            f"| `{r.recipe}` | {r.bytes:.1%} | {r.read:,} | {r.kl} ± {r.kl_error} | {r.top1:.1%} | {r.perplexity:.3f}x | {r.step_ms} ms | "
            f"{r.best(rows)} |"
        )


if __name__ == "__main__":
    main()
