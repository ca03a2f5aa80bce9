"""Do lossless recipes give exactly the dense greedy tokens? On real prompts, one after another.

python -m benchmarks.lossless [--prompts 20] [--tokens 1500] [--answer 64] [--recipe "vericache(snapkv(budget=1024) + int4)"]
"""

from __future__ import annotations

import argparse
import json

from longspool import LLM
from longspool.bench.texts import english


def prompts(llm: LLM, count: int, tokens: int) -> list[list[int]]:
    """Real English texts of so many tokens, each from another place."""
    ids = llm.tokenizer.encode(english())
    gap = (len(ids) - tokens) // count
    return [ids[i * gap : i * gap + tokens] for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--recipe", default="vericache(snapkv(budget=1024) + int4)")
    args = parser.parse_args()
    llm, equal, drafted, accepted, dense_s, recipe_s = LLM("smollm2"), 0, 0.0, 0.0, 0.0, 0.0
    for number, ids in enumerate(prompts(llm, args.prompts, args.tokens)):
        plain = llm.generate(ids, max_tokens=args.answer, ignore_eos=True)[0]
        drawn = llm.generate(ids, max_tokens=args.answer, ignore_eos=True, recipe=args.recipe)[0]
        actions = next(iter(drawn.report.actions.values()), {})
        drafted, accepted = drafted + actions.get("drafted", 0), accepted + actions.get("accepted", 0)
        equal += plain.tokens == drawn.tokens
        first = next((i for i, (a, b) in enumerate(zip(plain.tokens, drawn.tokens, strict=False)) if a != b), None)
        dense_s += (len(plain.tokens) - 1) / plain.report.decode_tok_s
        recipe_s += (len(drawn.tokens) - 1) / drawn.report.decode_tok_s
        print(
            json.dumps({"prompt": number, "equal": plain.tokens == drawn.tokens, "first_difference": first, "actions": actions}), flush=True
        )
    share = round(accepted / drafted, 4) if drafted else None
    print(
        json.dumps(
            {
                "recipe": args.recipe,
                "equal": equal,
                "of": args.prompts,
                "accepted_share": share,
                "decode_time_ratio": round(recipe_s / dense_s, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
