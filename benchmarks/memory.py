"""Live KV bytes of recipes on a real text against fp16 arithmetic, as the report says and as the pools hold them.

python -m benchmarks.memory [--tokens 7500]
"""

from __future__ import annotations

import argparse
import json

import torch

from longspool import LLM
from longspool.bench.texts import english
from longspool.engine.forward import forward
from longspool.memory import dense_bytes
from longspool.values import Step
from longspool.values.flow import Ask

RECIPES = {"dense": None, "int8": 0.54, "int4": 0.31, "snapkv(budget=1024)": 0.16}


def held(llm: LLM, ids: list[int], recipe: str) -> tuple[int, int]:
    """Bytes that the memory claims after reading ids, and bytes of the storage that is really live."""
    plan = llm.plan_for(recipe)
    memory = llm.engine.empty(plan)
    for first in range(0, len(ids), 2048):
        part = ids[first : first + 2048]
        end = first + len(part)
        step = Step(torch.tensor(part), torch.arange(first, end), (0, len(part)), (len(ids),), "prefill", (end == len(ids),))
        forward(llm.model, [Ask(step, memory, "none")])
    live = sum(llm.engine.pools.ledger.now.values())
    claimed = sum(memory.tiers().values())
    memory.free()
    return claimed, live


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=7500)
    count = parser.parse_args().tokens
    llm = LLM("smollm2")
    ids = llm.tokenizer.encode(english())[:count]
    dense = dense_bytes(llm.plan, count)
    for recipe, bar in RECIPES.items():
        claimed, live = held(llm, ids, recipe)
        row = {"recipe": recipe, "tokens": count, "claimed": claimed, "live": live, "share_of_fp16": round(claimed / dense, 4), "bar": bar}
        print(json.dumps(row | {"ok": claimed == live and (bar is None or claimed / dense <= bar)}), flush=True)


if __name__ == "__main__":
    main()
