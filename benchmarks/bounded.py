"""Memory that does not grow: eviction between the chunks of a long prompt, and eviction while an answer is written.

python -m benchmarks.bounded [--tokens 65536] [--answer 4096]

The prompt is read by layers of Llama-3.2-1B's shape with random weights (see shape_model.py; two of its sixteen layers, since each layer's
memory is its own and all are alike); the answer is written by the real model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.shape_model import VOCAB, write_model
from longspool import LLM
from longspool.engine.engine import Engine
from longspool.engine.forward import forward
from longspool.memory import dense_bytes
from longspool.model.build import build
from longspool.model.config import Config
from longspool.model.load import Shelf
from longspool.model.sources import GGUFSource
from longspool.plan import resolve
from longspool.recipe import parse
from longspool.values import Step
from longspool.values.flow import Ask
from longspool.values.step import Phase

LAYERS, CHUNK, BUDGET = 2, 512, 2048
PROMPTS = (f"keydiff(budget={BUDGET}, when='chunk')", f"snapkv(budget={BUDGET}, when='chunk')", "streaming(window=2044)")
ANSWERS = ("longflow(budget=512)", "dense")


def step(ids: list[int], first: int, total: int, phase: Phase) -> Step:
    end = first + len(ids)
    return Step(torch.tensor(ids), torch.arange(first, end), (0, len(ids)), (total,), phase, (end >= total,))


def prompts(tokens: int, file: Path) -> None:
    """The peak of the KV memory while `tokens` are read, in tokens a row."""
    if not file.exists():
        write_model(file)
    source = GGUFSource(file)
    config = Config.from_hf({**source.config, "num_hidden_layers": LAYERS})
    model = build(config, Shelf(source, None, torch.device("cpu"), lambda fraction, text: None))
    for recipe in PROMPTS:
        engine = Engine(model, 16 << 30)
        plan = resolve(parse(recipe), model.shape, torch.float16)
        memory, begun = engine.empty(plan), time.perf_counter()
        engine.pools.ledger.mark()
        for first in range(0, tokens, CHUNK):
            ids = [(i * 7919 + 13) % VOCAB for i in range(first, min(first + CHUNK, tokens))]
            forward(model, [Ask(step(ids, first, tokens, "prefill"), memory, "none")])
        peak, one = engine.pools.ledger.total_peak, dense_bytes(replace(plan, items=()), 1)
        row = {"recipe": recipe, "tokens": tokens, "chunk": CHUNK, "peak_tokens": round(peak / one), "bar": BUDGET + 2 * CHUNK}
        print(json.dumps(row | {"ok": peak / one <= BUDGET + 2 * CHUNK, "seconds": round(time.perf_counter() - begun, 1)}), flush=True)
        memory.free()


def answers(count: int) -> None:
    """Bytes and milliseconds a step while an answer of `count` tokens is written, by eighths."""
    llm = LLM("smollm2")
    prompt = llm.tokenizer.encode("The history of the alphabet begins in the ancient Near East. " * 40)[:512]
    for recipe in ANSWERS:
        memory = llm.engine.empty(llm.plan_for(recipe))
        (logits,) = forward(llm.model, [Ask(step(prompt, 0, len(prompt), "prefill"), memory)])
        times, held = [], []
        for at in range(len(prompt), len(prompt) + count):
            begun = time.perf_counter()
            (logits,) = forward(llm.model, [Ask(step([int(logits[-1].argmax())], at, len(prompt), "decode"), memory)])
            times.append(1e3 * (time.perf_counter() - begun))
            held.append(memory.bytes)
        parts = [times[i : i + count // 8] for i in range(0, count, count // 8)][:8]
        ms = [round(statistics.median(part), 2) for part in parts]
        mb = [round(held[min((i + 1) * count // 8, count) - 1] / 1e6, 1) for i in range(8)]
        print(json.dumps({"recipe": recipe, "answer": count, "step_ms": ms, "held_mb": mb}), flush=True)
        memory.free()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--answer", type=int, default=4096)
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir()) / "longspool-shape-1b.gguf")
    args = parser.parse_args()
    prompts(args.tokens, args.model)
    answers(args.answer)


if __name__ == "__main__":
    main()
