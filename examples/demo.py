"""The main job: read 7,000 tokens of real English with one sentence hidden in them, and answer a question about it.

`make demo` runs this under three recipes: everything kept (dense), what snapkv and int4 leave of it, and what quest reads of int8 codes.
"""

from __future__ import annotations

import time
from pydoc_data.topics import topics

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from longspool import LLM, Result

TOKENS = 7000
HIDDEN = "The lighthouse keeper's secret password is 'marmalade'."
QUESTION = "What is the lighthouse keeper's secret password?"
RECIPES = ("dense", "snapkv(budget=1024) + int4", "quest(budget=1024) + int8")


def text(llm: LLM) -> str:
    """Paragraphs of Python's own language reference, with the sentence in their middle."""
    found: list[str] = []
    room = TOKENS
    for paragraph in "\n\n".join(topics[name].strip() for name in ("compound", "types", "execmodel", "exceptions")).split("\n\n"):
        room -= len(llm.tokenizer.encode(paragraph + "\n\n"))
        if room < 0:
            break
        found.append(paragraph)
    middle = len(found) // 2
    return "\n\n".join([*found[:middle], HIDDEN, *found[middle:]])


def answer(llm: LLM, prompt: list[int], recipe: str) -> Result:
    """The answer under a recipe, with a bar for the reading."""
    with Progress(transient=True) as bar:
        task = bar.add_task(f"reading under {recipe}", total=len(prompt))
        pieces = llm.stream(prompt, recipe=recipe, max_tokens=48, watch=lambda done, total: bar.update(task, completed=done))
        result = [piece.result for piece in pieces][-1]
    assert result is not None
    return result


def row(recipe: str, result: Result) -> list[str]:
    facts, memory = result.report, result.report.memory
    return [
        recipe,
        result.text.strip(),
        f"{facts.ttft_s:.1f} s",
        f"{facts.prefill_tok_s:,.0f}",
        f"{facts.decode_tok_s:.1f}",
        f"{memory.kv_bytes / 1e6:.1f} MB",
        f"{memory.kv_peak_bytes / 1e6:.1f} MB",
    ]


def main() -> None:
    out, start = Console(), time.perf_counter()
    llm = LLM("smollm2")
    prompt = llm.chat_ids([{"role": "user", "content": f"{text(llm)}\n\n{QUESTION}"}])
    out.print(f"SmolLM2-135M reads {len(prompt):,} tokens of Python's reference. In their middle: [bold]{HIDDEN}[/bold] Asked: {QUESTION}")
    table = Table("recipe", "answer", "first token", "prefill tok/s", "decode tok/s", "KV now", "KV peak", caption="KV: keys and values")
    results = []
    for recipe in RECIPES:
        llm.generate(prompt[:2100], recipe=recipe, max_tokens=4)  # compiles the kernels, once for each machine
        results.append(answer(llm, prompt, recipe))
        table.add_row(*row(recipe, results[-1]))
    out.print(table)
    for note in dict.fromkeys(note for result in results for note in result.report.notes):
        out.print(f"Note: {note}")
    out.print(
        f"Done in {time.perf_counter() - start:.0f} s. Another text, another question: longspool run -f FILE -p QUESTION --recipe ..."
    )


if __name__ == "__main__":
    main()
