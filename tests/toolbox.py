"""What the tests of memory, engine and methods share: tiny models, a byte tokenizer, small settings of methods, and a rig that
runs plans step by step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from longspool.engine.engine import Engine
from longspool.engine.forward import forward
from longspool.engine.request import Request
from longspool.engine.sampler import Sampling
from longspool.engine.samples import Runs
from longspool.memory import Fits, Memory
from longspool.method import Method, registry
from longspool.model.build import Model
from longspool.model.load import Loaded, LoadReport
from longspool.model.tiny import tiny
from longspool.plan import Item, Plan, resolve
from longspool.recipe import parse
from longspool.roles import Fitted
from longspool.values import Packed, Shape, Step
from longspool.values.chain import Chain
from longspool.values.fit import Fit
from longspool.values.flow import Ask
from longspool.values.step import Phase
from reference import rotate

KINDS: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "gemma3": {},
    "mistral": {"sliding_window": 32},
}
"""Grouped queries; QK-norm; soft-caps and a window on every other layer; windows on two layers of three; windows everywhere."""

SMALL = {
    "budget": 96, "window": 16, "page": 16, "block": 16, "last": 8, "sinks": 4, "horizon": 4, "dense": 1, "theta": 0.3, "length": 128,
    "steps": 2,
}  # fmt: skip
"""Parameters by name at which a method acts on a few hundred tokens, and is fitted to a model in no time."""

TRITON = "cuda" if torch.cuda.is_available() else "cpu"
"""Where Triton's kernels are tested: on a GPU, or by its interpreter."""


def send(value: object, device: torch.device | str) -> object:
    """A value with all its tensors on a device."""
    if isinstance(value, Tensor | Packed):
        return value.to(device)
    if isinstance(value, Chain):
        return Chain(value.widths, value.given, value.wanted, send(value.moves, device))  # type: ignore[arg-type]
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **{f.name: send(getattr(value, f.name), device) for f in dataclasses.fields(value)})
    if isinstance(value, tuple | list):
        return type(value)(send(part, device) for part in value)
    return {k: send(v, device) for k, v in value.items()} if isinstance(value, dict) else value


@functools.cache
def model(kind: str = "llama") -> Model:
    """The tiny random model of a kind: 3 layers, 4 heads over 2 KV heads of 16 dimensions, 256 tokens."""
    return tiny(kind, **KINDS[kind])


def words(count: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def example(name: str) -> Method:
    """A method as its name, or the recipe it gives, makes it."""
    ((item),) = parse(registry()[name].example or name)
    return item.method


def small(method: Method) -> Method:
    """The method with every parameter that has its default and a name in SMALL made small, in the methods it wraps too."""
    changes: dict[str, object] = {}
    for f in dataclasses.fields(method):
        value = getattr(method, f.name)
        if isinstance(value, Method):
            changes[f.name] = small(value)
        elif isinstance(value, tuple) and any(isinstance(m, Method) for m in value):
            changes[f.name] = tuple(small(m) for m in value)
        elif f.name in SMALL and value == f.default:
            changes[f.name] = SMALL[f.name]
    return dataclasses.replace(method, **changes)


def idle(name: str) -> Method:
    """A method at its identity; small where it has a tolerance, or none to set."""
    identity = registry()[name].identity
    if isinstance(identity, dict):
        return dataclasses.replace(small(example(name)), **identity)
    if isinstance(identity, str) and identity != "lossless":
        return small(parse(identity)[0].method)
    return small(example(name))


class Bytes:
    """A tokenizer whose tokens are bytes. Token 0 ends an answer."""

    vocab_size = 256
    bos = None
    eos = (0,)

    def encode(self, text: str, special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")


def loaded(of: Model | None = None) -> Loaded:
    """A tiny model as `LLM` takes it."""
    of = of or model()
    report = LoadReport(Path("tiny"), of.config.family, 0, 0, {}, (), 0.0)
    return Loaded(of, Bytes(), report, "tiny")  # type: ignore[arg-type]


@functools.cache
def fitted(of: Model, method: Fitted) -> Fit:
    """A method fitted to a model over random tokens."""
    runs = Runs(of, [words(400, 91), words(300, 92)], method.needs().calibrated, 5, Bytes().encode, torch.float32)
    return Fit(method.fit(runs))


class Fitting(Fits):
    """Fits a method to a model when it is first asked for."""

    def __init__(self, of: Model, device: torch.device | None = None) -> None:
        super().__init__()
        self.model, self.device = of, device

    def __missing__(self, method: Method) -> Fit:
        assert isinstance(method, Fitted), f"{method} is not fitted to a model"
        fit = self.like(method) or fitted(self.model, method)
        self[method] = Fit({name: t.to(self.device) for name, t in fit.tensors.items()})
        return self[method]


@dataclasses.dataclass
class Job:
    """A text under a plan: `prefill` tokens in chunks, the others one by one."""

    plan: Plan
    ids: list[int]
    prefill: int
    chunk: int = 1 << 20

    def steps(self) -> Iterator[tuple[int, int, Phase]]:
        for first in range(0, self.prefill, self.chunk):
            yield first, min(first + self.chunk, self.prefill), "prefill"
        for at in range(self.prefill, len(self.ids)):
            yield at, at + 1, "decode"


class Rig:
    """An engine over one tiny model whose memories a test may hold."""

    def __init__(self, of: Model | str = "llama", budget: int = 1 << 26, chunk: int = 1 << 20, fits: Fits | None = None) -> None:
        self.model = model(of) if isinstance(of, str) else of
        self.engine = Engine(self.model, budget, chunk, Fitting(self.model) if fits is None else fits, chr)
        self.pools = self.engine.pools

    def plan(self, recipe: str | Method | Sequence[Method] = "", dtype: torch.dtype = torch.float32) -> Plan:
        if isinstance(recipe, str):
            return resolve(parse(recipe), self.model.shape, dtype)
        methods = [recipe] if isinstance(recipe, Method) else recipe
        return resolve(tuple(map(Item, methods)), self.model.shape, dtype)

    def ask(self, memory: Memory, ids: Sequence[int], phase: Phase = "decode", total: int | None = None, want: str = "all") -> Ask[Memory]:
        """An Ask for the tokens after those that the memory has seen; the last of a prompt where `total` ends with them."""
        end = memory.seen + len(ids)
        step = Step(torch.tensor(ids), torch.arange(memory.seen, end), (0, len(ids)), (total or end,), phase, (end >= (total or end),))
        return Ask(step, memory, want)  # type: ignore[arg-type]

    def feed(self, memory: Memory, ids: Sequence[int], phase: Phase = "decode", total: int | None = None) -> Tensor:
        """Logits [N, V] of tokens that enter the memory in one step."""
        return forward(self.model, [self.ask(memory, ids, phase, total)])[0]

    def drip(self, memory: Memory, ids: Sequence[int]) -> Tensor:
        """Logits [N, V] of tokens that enter the memory one by one."""
        return torch.cat([self.feed(memory, [token]) for token in ids])

    def read(self, plan: Plan, ids: Sequence[int], chunk: int = 1 << 20) -> Memory:
        """A memory that has read a prompt."""
        return self.run(Job(plan, list(ids), len(ids), chunk))[1]

    def run(self, job: Job) -> tuple[Tensor, Memory]:
        """Logits [N, V] and the memory of a job alone."""
        return self.together([job])[0]

    def together(self, jobs: Sequence[Job]) -> list[tuple[Tensor, Memory]]:
        """Logits and memories of jobs that share every step."""
        memories = [self.engine.empty(job.plan) for job in jobs]
        out: list[list[Tensor]] = [[] for _ in jobs]
        queues = [list(job.steps()) for job in jobs]
        while any(queues):
            live = [i for i, queue in enumerate(queues) if queue]
            asks = []
            for i in live:
                a, b, phase = queues[i].pop(0)
                asks.append(self.ask(memories[i], jobs[i].ids[a:b], phase, jobs[i].prefill if phase == "prefill" else None))
            for i, reply in zip(live, forward(self.model, asks), strict=True):
                out[i].append(reply)
        return [(torch.cat(o), m) for o, m in zip(out, memories, strict=True)]

    def request(self, plan: Plan, ids: Sequence[int], index: int = 0, stops: Sequence[int] = (), **wishes: object) -> Request:
        return Request(list(ids), plan, Sampling(**wishes), frozenset(stops), self.model.shape.vocab, index)  # type: ignore[arg-type]

    def answer(self, plan: Plan, ids: Sequence[int], **wishes: object) -> Request:
        """A request that has run to its end."""
        request = self.request(plan, ids, **wishes)
        self.engine.run([request])
        return request


def tokens(request: Request) -> list[int]:
    return [c.token for c in request.choices]


@dataclasses.dataclass
class Trace:
    """A run's rotated queries [N, H, D], keys and values [N, Hkv, D], float64, of one layer."""

    q: Tensor
    k: Tensor
    v: Tensor

    def logits(self, shape: Shape, queries: slice, head: int) -> Tensor:
        """Scaled and capped logits of some tokens of a query head over all keys, float64 [n, N]."""
        logits = self.q[queries, head] @ self.k[:, head // shape.group].T * shape.scale
        return torch.tanh(logits / shape.softcap) * shape.softcap if shape.softcap else logits


@torch.no_grad()
def masked_logits(of: Model, ids: Sequence[int], seen: Callable[[int, Trace], Tensor]) -> tuple[Tensor, list[Trace]]:
    """A plain float64 attention runner in which `seen` says what is visible in a layer: bool [N, N] or [H, N, N], causal already."""
    x, pos, traces = of.embed(torch.tensor(list(ids))), torch.arange(len(ids)), []
    for layer, block in enumerate(of.blocks):
        q, k, v = block.qkv(x)
        if block.rope is not None:
            angles = block.rope.angles(pos, len(ids))
            q, k = rotate(q, *angles), rotate(k, *angles)
        trace = Trace(q.double(), k.double(), v.double())
        traces.append(trace)
        mask = seen(layer, trace).expand(of.shape.heads, len(ids), len(ids))
        out = [
            trace.logits(of.shape, slice(None), h).masked_fill(~mask[h], -torch.inf).softmax(-1) @ v[:, h // of.shape.group].double()
            for h in range(of.shape.heads)
        ]
        x = block.finish(x, torch.stack(out, 1).float())
    return of.logits(of.final(x)), traces


@torch.no_grad()
def attended_logits(of: Model, ids: Sequence[int], attention: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """A plain runner in which attention gives what `attention` makes of a layer's rotated q [N, H, D], k and v [N, Hkv, D] in float64."""
    x, pos = of.embed(torch.tensor(list(ids))), torch.arange(len(ids))
    for layer, block in enumerate(of.blocks):
        q, k, v = block.qkv(x)
        if block.rope is not None:
            angles = block.rope.angles(pos, len(ids))
            q, k = rotate(q, *angles), rotate(k, *angles)
        x = block.finish(x, attention(layer, q.double(), k.double(), v.double()).float())
    return of.logits(of.final(x))


def causal(count: int, window: int | None = None) -> Tensor:
    """bool [N, N]: each token sees itself and the older ones, or only `window` tokens."""
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    return mask if window is None else mask.triu(1 - window)
