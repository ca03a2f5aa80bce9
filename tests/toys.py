"""Small methods that show what a seat is given and does; none of them is shipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from longspool.method import LOSSLESS, Method, Needs, Paper
from longspool.roles import Admit, Evict, Ingest, Kept, Place, Prompt, Prune, Request, Reuse, Review, Skip, Stop, View, Weights
from longspool.values import Step
from longspool.values.flow import Flow
from longspool.values.packed import Packed

PAPER = Paper("", "A toy", "none")


@dataclass(frozen=True)
class Every(Method, Evict):
    """Keeps every `stride`-th candidate of row r, counted from r: rows differ in length."""

    stride: int = 3
    recent: int = 8
    when: str = "prompt"
    slug: ClassVar[str] = "every"
    paper: ClassVar[Paper] = PAPER
    identity: ClassVar[dict[str, object]] = {"stride": 1}

    def needs(self) -> Needs:
        return Needs(recent=self.recent, ragged=True)

    def due(self, step: Step) -> bool:
        return step.phase == "prefill" and (step.final[0] or self.when == "chunk")

    def keep(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Kept:
        return Kept(tuple(torch.nonzero(row >= 0)[r :: self.stride, 0] for r, row in enumerate(pos)))


@dataclass(frozen=True)
class Pairs(Method, Evict):
    """Merges neighbours into their mean, which counts twice."""

    slug: ClassVar[str] = "pairs"
    merges: ClassVar[bool] = True
    paper: ClassVar[Paper] = PAPER
    identity: ClassVar[float] = 1.0

    def needs(self) -> Needs:
        return Needs(recent=8)

    def keep(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Kept:
        index = tuple(torch.arange(0, len(row) - 1, 2) for row in pos)
        k, v = ([(x[r, i] + x[r, i + 1]) / 2 for r, i in enumerate(index)] for x in (k, v))
        return Kept(index, tuple(k), tuple(v), tuple(torch.full((len(i),), 2.0).log() for i in index))


@dataclass(frozen=True)
class Odd(Method, Admit):
    """Head r admits positions that leave the rest r % 2."""

    slug: ClassVar[str] = "odd"
    paper: ClassVar[Paper] = PAPER
    identity: ClassVar[float] = 1.0

    def needs(self) -> Needs:
        return Needs(recent=8, ragged=True)

    def admit(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        return pos % 2 == torch.arange(len(pos))[:, None] % 2


@dataclass(frozen=True)
class Heavy(Method, Evict):
    """Keeps what drew the most attention mass in this step."""

    budget: int = 20
    slug: ClassVar[str] = "heavy"
    paper: ClassVar[Paper] = PAPER
    identity: ClassVar[dict[str, object]] = {"budget": 1 << 30}

    def needs(self) -> Needs:
        return Needs(recent=8, mass=True)

    def keep(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Kept:
        mass = view.mass[:, : pos.shape[1]].masked_fill(pos < 0, -1)
        count = min(self.budget, pos.shape[1])
        return Kept(tuple(row.topk(count).indices.sort().values for row in mass))


@dataclass(frozen=True)
class Halve(Method, Prune):
    """Every second token of a chunk goes on; the engine adds the chunk's last one."""

    slug: ClassVar[str] = "halve"
    paper: ClassVar[Paper] = PAPER
    identity: ClassVar[float] = 1.0

    def survivors(self, x: Tensor, view: View) -> Tensor:
        return torch.arange(0, len(x), 2)


@dataclass(frozen=True)
class Leave(Method, Skip):
    """Leaves out layers in one phase, or in all."""

    phase: str = ""
    slug: ClassVar[str] = "leave"
    paper: ClassVar[Paper] = PAPER
    identity: ClassVar[float] = 1.0

    def skip(self, layer: int, x: Tensor, step: Step) -> bool:
        return self.phase in ("", step.phase)


@dataclass(frozen=True)
class Twice(Method, Ingest):
    """Reads the first half of the prompt, forgets it and reads everything."""

    slug: ClassVar[str] = "twice"
    paper: ClassVar[Paper] = PAPER
    identity: ClassVar[str] = LOSSLESS

    def needs(self) -> Needs:
        return Needs(recent=1 << 20)

    def flow(self, request: Request) -> Flow:
        half = request.prompt[: len(request.prompt) // 2]
        yield request.ask(half, "prefill", want="none")
        request.memory.truncate(0)
        request.count(self, halves=1)
        reply = None
        for first in range(0, len(request.prompt), 50):
            reply = yield request.ask(request.prompt[first : first + 50], "prefill")
        return reply


@dataclass(frozen=True)
class Shelf(Method, Reuse):
    """Every prompt's memory in a dict."""

    slug: ClassVar[str] = "shelf"
    paper: ClassVar[Paper] = PAPER
    identity: ClassVar[str] = LOSSLESS
    known: ClassVar[dict[tuple[int, ...], object]] = {}

    def lookup(self, ids: tuple[int, ...]) -> object | None:
        prefixes = [key for key in self.known if ids[: len(key)] == key]
        return self.known[max(prefixes, key=len)] if prefixes else None

    def store(self, ids: tuple[int, ...], memory: object) -> None:
        if ids in self.known:
            self.known[ids].free()  # type: ignore[attr-defined]
        self.known[ids] = memory


@dataclass(frozen=True)
class Five(Method, Stop):
    """Ends an answer after five tokens, or at a letter."""

    letter: str = ""
    slug: ClassVar[str] = "five"
    paper: ClassVar[Paper] = PAPER
    identity: ClassVar[dict[str, object]] = {}

    def done(self, tokens: tuple[int, ...], text: str) -> bool:
        return self.letter in text if self.letter else len(tokens) == 5


@dataclass(frozen=True)
class Cut(Method, Prompt):
    """Keeps the last `words` words of every user message."""

    words: int = 3
    slug: ClassVar[str] = "cut"
    paper: ClassVar[Paper] = PAPER
    identity: ClassVar[dict[str, object]] = {"words": 1 << 30}

    def rewrite(self, messages: list[dict[str, str]], count: Callable[[str], int]) -> list[dict[str, str]]:
        return [m | {"content": " ".join(m["content"].split()[-self.words :])} if m["role"] == "user" else m for m in messages]


@dataclass(frozen=True)
class Again(Method, Review):
    """Looks at the prompt's last `tokens` once more: on a fork that it throws away, or in place, so that the reply is a new one."""

    tokens: int = 4
    place: bool = False
    slug: ClassVar[str] = "again"
    paper: ClassVar[Paper] = PAPER
    identity: ClassVar[str] = LOSSLESS

    def needs(self) -> Needs:
        return Needs(recent=self.tokens)

    def review(self, request: Request) -> Flow:
        memory = request.memory if self.place else request.memory.fork()
        memory.truncate(len(request.prompt) - self.tokens)
        reply = yield request.ask(request.prompt[-self.tokens :], "verify", memory)
        request.count(self, passes=1)
        if self.place:
            return reply
        memory.free()
        return None


@dataclass(frozen=True)
class Rounded(Method, Weights):
    """The MLP's matrices on a grid of `step`, as fp16."""

    step: float = 0.25
    slug: ClassVar[str] = "rounded"
    paper: ClassVar[Paper] = PAPER
    identity: ClassVar[float] = 1.0

    def pack(self, name: str, w: Tensor) -> Packed | None:
        return Packed.from_float((w / self.step).round() * self.step, "f16") if ".mlp." in name else None


@dataclass(frozen=True)
class Tiers(Method, Place):
    """Old tokens on the disk, with copies of so many of each head on the device and on the host."""

    device: int = 0
    host: int = 0
    window: int = 8
    directory: str = ""
    slug: ClassVar[str] = "tiers"
    paper: ClassVar[Paper] = PAPER
    identity: ClassVar[str] = LOSSLESS
    home: ClassVar[str] = "disk"

    def needs(self) -> Needs:
        return Needs(recent=self.window)

    def folder(self) -> str:
        return self.directory

    def keeps(self) -> int:
        return self.device

    def shelves(self) -> int:
        return self.host

    def parts(self, heads: int, view: View) -> Iterator[tuple[int, int]]:
        yield 0, heads


@dataclass(frozen=True)
class Ram(Tiers):
    """The same with old tokens on the host."""

    slug: ClassVar[str] = "ram"
    home: ClassVar[str] = "host"
