"""The engines that decode at a depth: each loads the file, answers the probe, fills its memory directly and times single steps."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers import llama_cpp as driver
from benchmarks.shape_model import DIM, HEADS, KV, VOCAB

if TYPE_CHECKING:
    import numpy as np

    from longspool.memory import Memory

RECIPES = {"dense": "", "quest-int8": "quest(budget=1024) + int8"}
PROBE = [(i * 7919 + 13) % VOCAB for i in range(24)]
TOKENS, SLICE = 17, 256


@dataclass(frozen=True)
class Job:
    engine: str
    depth: int
    model: str
    threads: int
    probe: str


def longspool(job: Job) -> tuple[list[float], np.ndarray]:
    """Seconds of each decode step, and the probe's logits."""
    import torch

    from longspool.engine.engine import Engine
    from longspool.engine.forward import forward
    from longspool.model.build import build
    from longspool.model.config import Config
    from longspool.model.load import Shelf
    from longspool.model.sources import GGUFSource
    from longspool.plan import resolve
    from longspool.recipe import parse
    from longspool.values import Step
    from longspool.values.flow import Ask

    torch.set_num_threads(job.threads)
    source = GGUFSource(Path(job.model))
    model = build(Config.from_hf(source.config), Shelf(source, None, torch.device("cpu"), lambda fraction, text: None))
    engine = Engine(model, 64 << 30)
    plan = resolve(parse(RECIPES.get(name := job.engine.partition("/")[2], name)), model.shape, torch.float16)

    def step(ids: list[int], at: int, memory: Memory, phase: str) -> torch.Tensor:
        ask = Step(torch.tensor(ids), torch.arange(at, at + len(ids)), (0, len(ids)), (at + len(ids),), phase, (True,))
        return forward(engine.model, [Ask(ask, memory)])[0][-1]

    probe, memory = step(PROBE, 0, engine.empty(plan), "prefill").numpy(), engine.empty(plan)
    fill(memory, job.depth)
    times = []
    for i in range(TOKENS):
        start = time.perf_counter()
        int(step([PROBE[i]], job.depth + i, memory, "decode").argmax())
        times.append(time.perf_counter() - start)
    return times, probe


def fill(memory: Memory, tokens: int) -> None:
    """Random keys and values through the memory's own verbs, as a chunked prefill writes and settles them."""
    import torch

    from longspool.memory import LayerView, write
    from longspool.values import Step

    rng = torch.Generator().manual_seed(1)
    for first in range(0, tokens, 2048):
        n = min(2048, tokens - first)
        pos = torch.arange(first, first + n)
        step = Step(torch.zeros(n, dtype=torch.int64), pos, (0, n), (tokens,), "prefill", (first + n == tokens,))
        for own in memory.layers:
            q, k, v = (torch.randn(n, heads, DIM, generator=rng) for heads in (HEADS, KV, KV))
            write([own], q, k, v, step)
            own.settle(LayerView(own.layer, own.shape, step, own.rows(), (own,)))
        memory.seen = first + n


def llama_cpp(job: Job) -> tuple[list[float], np.ndarray]:
    """The same of llama.cpp. A small ubatch keeps the scores of plain attention from filling the memory."""
    settings = replace(driver.VARIANTS[job.engine.split("/")[1]], ubatch=64)
    peer = driver.LlamaCpp(Path(job.model), settings, job.threads, job.depth + SLICE, sequences=2)
    probe = peer.eval(PROBE).copy()
    peer.clear()
    peer.eval([PROBE[i % len(PROBE)] for i in range(SLICE)])
    repeat_state(peer, job.depth)
    times = []
    for i in range(TOKENS):
        start = time.perf_counter()
        int(peer.eval([PROBE[i]]).argmax())
        times.append(time.perf_counter() - start)
    return times, probe


def repeat_state(peer: driver.LlamaCpp, depth: int) -> None:
    """Restore sequence 0's state as sequence 1, move it on to the next positions, hand its cells to sequence 0; until full."""
    api, context = peer.api, peer.context
    memory = api.llama_get_memory(context)
    size = api.llama_state_seq_get_size(context, 0)
    blob = (ctypes.c_uint8 * size)()
    if api.llama_state_seq_get_data(context, blob, size, 0) != size:
        raise SystemExit("llama.cpp did not save its state.")
    for at in range(SLICE, depth, SLICE):
        if not api.llama_state_seq_set_data(context, blob, size, 1):
            raise SystemExit(f"llama.cpp did not restore its state at {at} tokens.")
        api.llama_memory_seq_add(memory, 1, -1, -1, at)
        api.llama_memory_seq_cp(memory, 1, 0, -1, -1)
        api.llama_memory_seq_rm(memory, 1, -1, -1)
    held = api.llama_memory_seq_pos_max(memory, 0) + 1
    if held != depth or api.llama_state_seq_get_size(context, 0) < 0.95 * size * depth / SLICE:
        raise SystemExit(f"llama.cpp holds {held} tokens where {depth} were meant.")
