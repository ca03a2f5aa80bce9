"""What it costs to select: decode with every Select method beside dense, and how much of the attention's time its selection takes.

python benchmarks/selection.py [--length 4k] [--recipes "topk(budget=256),quest"]     SmolLM2 over real text
python benchmarks/selection.py --shape 1b --length 32k                                Llama-3.2-1B's shape, random weights, keys and values

A step of dense and a step of the method take turns in one process; times are medians, in brackets the quartiles. A step that is played
from a tape (docs/one.md) is measured as it is played, call by call: what was written down within `select` is selection, what was within
the layer's attention is attention. The random memory has the same keys in all layers, so that one index serves them all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
if __package__ in (None, ""):
    sys.path[0] = str(HERE.parent)

from benchmarks.shape_model import write_model  # noqa: E402

if TYPE_CHECKING:
    from longspool.engine.engine import Engine
    from longspool.memory import Memory

RECIPES = ("quest", "topk", "tokenselect", "sparq", "clusterkv", "retroinfer", "self_index_kv", "leoam")
LENGTHS = {"1k": 1024, "4k": 4096, "7k": 7168, "16k": 16384, "32k": 32768, "64k": 65536, "128k": 131072}
STEPS, CHUNK = 25, 512


@dataclass
class Spent:
    """Seconds within the attention of one step, and of these within selections; and which calls of a tape belong to either."""

    attention: float = 0.0
    selection: float = 0.0
    marks: dict[str, set[int]] = field(default_factory=lambda: {"attention": set(), "selection": set()})


@contextmanager
def watched(spent: Spent, select: type) -> Iterator[None]:
    """Take the times of the layers' attention and of the method's selections."""
    from longspool.engine import forward
    from longspool.kernels.record import now

    def timed(run: Callable, name: str) -> Callable:
        def wrapper(*args: object) -> object:
            first, start = len(now.tape.calls) if now.tape else 0, time.perf_counter()
            out = run(*args)
            setattr(spent, name, getattr(spent, name) + time.perf_counter() - start)
            if now.tape:
                spent.marks[name] |= set(range(first, len(now.tape.calls)))
            return out

        return wrapper

    advance, own = forward.advance, select.__dict__.get("select")
    forward.advance, select.select = timed(advance, "attention"), timed(select.select, "selection")
    try:
        yield
    finally:
        forward.advance = advance
        if own is None:
            del select.select
        else:
            select.select = own


def play(tape: object, spent: Spent) -> None:
    """A tape's calls, timed one by one."""
    for i, (kernel, numbers) in enumerate(tape.calls):
        start = time.perf_counter()
        kernel(*numbers)
        took = time.perf_counter() - start
        for name in ("attention", "selection"):
            if i in spent.marks[name]:
                setattr(spent, name, getattr(spent, name) + took)


@dataclass
class Run:
    """One recipe's memory, and what comes next."""

    engine: Engine
    memory: Memory
    token: int
    at: int

    def step(self) -> float:
        import torch

        from longspool.engine.forward import forward
        from longspool.values import Step
        from longspool.values.flow import Ask

        start = time.perf_counter()
        step = Step(torch.tensor([self.token]), torch.tensor([self.at]), (0, 1), (self.at + 1,), "decode", (True,))
        self.token = int(forward(self.engine.model, [Ask(step, self.memory)])[0][-1].argmax())
        self.at += 1
        return time.perf_counter() - start

    def shares(self, steps: int) -> tuple[float, float, bool]:
        """Median seconds of attention and selection in a step, and whether its steps are played."""
        from longspool.roles import Select

        found, select, played = [], self.memory.plan.one(Select), False
        spent = Spent()
        with watched(spent, type(select)):
            self.memory.replay = None
            for _ in range(3):  # the second is written down
                self.step()
            for _ in range(steps):
                tape = self.memory.replay.tape
                played = bool(tape and self.memory.replay.fits(self.memory))
                if not tape:
                    spent.marks = {"attention": set(), "selection": set()}
                elif "play" not in vars(tape):
                    tape.play = lambda tape=tape: play(tape, spent)
                spent.attention = spent.selection = 0.0
                self.step()
                found.append((spent.attention, spent.selection))
        return statistics.median(a for a, _ in found), statistics.median(s for _, s in found), played


def real(name: str, length: int) -> tuple[Engine, Callable[[str], Run]]:
    """A model over the text that Python carries."""
    import torch

    from longspool import LLM
    from longspool.bench.texts import english
    from longspool.engine.forward import forward
    from longspool.values import Step
    from longspool.values.flow import Ask

    llm = LLM(name)
    ids = llm.tokenizer.encode(english())[: length + 1]

    def read(recipe: str) -> Run:
        memory = llm.engine.empty(llm.plan_for(recipe))
        for a in range(0, length, CHUNK):
            b = min(a + CHUNK, length)
            step = Step(torch.tensor(ids[a:b]), torch.arange(a, b), (0, b - a), (length,), "prefill", (b == length,))
            forward(llm.model, [Ask(step, memory, "none")])
        return Run(llm.engine, memory, ids[length], length)

    return llm.engine, read


def shaped(path: Path, length: int) -> tuple[Engine, Callable[[str], Run]]:
    """The random model of 1B, whose memory is filled directly."""
    import torch

    from longspool.engine.engine import Engine
    from longspool.model.build import build
    from longspool.model.config import Config
    from longspool.model.load import Shelf
    from longspool.model.sources import GGUFSource
    from longspool.plan import resolve
    from longspool.recipe import parse

    if not path.exists():
        write_model(path)
    source = GGUFSource(path)
    model = build(Config.from_hf(source.config), Shelf(source, None, torch.device("cpu"), lambda fraction, text: None))
    engine = Engine(model, 64 << 30)

    def read(recipe: str) -> Run:
        memory = engine.empty(resolve(parse(recipe), model.shape, torch.float16))
        fill(memory, length)
        return Run(engine, memory, 13, length)

    return engine, read


def fill(memory: Memory, tokens: int) -> None:
    """The same random keys and values for all layers, as a chunked prefill writes and settles them; the last layer's index for all."""
    import torch

    from longspool.memory import LayerView, learn, write
    from longspool.values import Step

    rng, s = torch.Generator().manual_seed(1), memory.plan.shape
    for first in range(0, tokens, 2048):
        n = min(2048, tokens - first)
        q, k, v = (torch.randn(n, heads, s.head_dim, generator=rng) for heads in (s.heads, s.kv_heads, s.kv_heads))
        step = Step(torch.zeros(n, dtype=torch.int64), torch.arange(first, first + n), (0, n), (tokens,), "prefill", (False,))
        for own in memory.layers:
            write([own], q, k, v, step)
            own.settle(LayerView(own.layer, own.shape, step, own.rows(), (own,)))
        memory.seen = first + n
    last = memory.layers[-1]
    learn(last, Step(step.ids, step.pos, step.spans, step.total, "prefill", (True,)))
    for own in memory.layers[:-1]:
        own.keep(last.index)


def spread(times: list[float]) -> str:
    low, middle, high = (1e3 * x for x in statistics.quantiles(times, n=4))
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def compare(read: Callable[[str], Run], recipe: str, dense: Run, steps: int) -> str:
    run = read(recipe)
    for _ in range(3):
        dense.step()
        run.step()
    ours, theirs = [], []
    for _ in range(steps):
        theirs.append(dense.step())
        ours.append(run.step())
    attention, selection, played = run.shares(max(steps // 2, 3))
    _, other = dense_share(dense, max(steps // 2, 3))
    run.memory.free()
    ratio = statistics.median(theirs) / statistics.median(ours)
    return (
        f"{recipe:28} {spread(ours):>24} {spread(theirs):>24} {ratio:6.2f}x  {1e3 * attention:7.1f} {other / attention:6.2f}x "
        f"{1e3 * selection:7.1f} {selection / attention:5.0%}  {'played' if played else ''}"
    )


def dense_share(dense: Run, steps: int) -> tuple[float, float]:
    """Median seconds of a dense step and of its attention, as played."""
    spent, found = Spent(), []
    with watched(spent, type("Nobody", (), {"select": lambda: None})):
        dense.memory.replay = None
        for _ in range(3):
            dense.step()
        for _ in range(steps):
            tape = dense.memory.replay.tape
            if tape and "play" not in vars(tape):
                tape.play = lambda tape=tape: play(tape, spent)
            elif not tape:
                spent.marks = {"attention": set(), "selection": set()}
            spent.attention = 0.0
            took = dense.step()
            found.append((took, spent.attention))
    dense.memory.replay = None
    return statistics.median(t for t, _ in found), statistics.median(a for _, a in found)


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="benchmarks/selection.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", choices=["smollm2", "1b"], default="smollm2")
    p.add_argument("--length", choices=list(LENGTHS), default="4k")
    p.add_argument("--recipes", default=";".join(RECIPES), help="separated by ;")
    p.add_argument("--steps", type=int, default=STEPS)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--model", type=Path, default=Path(tempfile.gettempdir()) / "longspool-shape-1b.gguf", help="where the 1.3 GB file is")
    args = p.parse_args(argv)
    import torch

    torch.set_num_threads(args.threads)
    length = LENGTHS[args.length]
    _, read = real("smollm2", length) if args.shape == "smollm2" else shaped(args.model, length)
    dense = read("")
    print(f"{args.shape} at {args.length}, {args.threads} thread{'s' * (args.threads > 1)}; milliseconds a token")
    print(f"{'':28} {'step':>24} {'dense, same run':>24} {'':>7} {'attention':>9} {'':>7} {'select':>7}")
    for recipe in args.recipes.split(";"):
        print(compare(read, recipe, dense, args.steps), flush=True)


if __name__ == "__main__":
    main()
