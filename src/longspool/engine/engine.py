"""Continuous batching: every step takes one Ask from each running request, within a byte budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from torch import Tensor

from ..errors import LongspoolError, OutOfMemory
from ..kernels import rope
from ..memory import DamagedPage, Fits, Memory, Pools, give_back_large_blocks
from ..memory.layer import Rotate
from ..memory.pools import Spell
from ..model.build import Model
from ..model.rope import Rope
from ..plan import Plan
from ..values.packed import Packed
from .estimate import disk_need, need, token_bound
from .forward import StepError, forward
from .request import HeadDraw, Request

ALONE, SHARED = 2048, 256  # tokens of a prefill chunk: alone, and beside running decodes (their floor)
RENEWALS = 3  # how often a request is computed again because a page on the disk was damaged


class Engine:
    """Runs requests over one model. `budget` bounds the live KV bytes on the device; `fits` is what methods were fitted to it, `spell` says
    what a token's text is, for methods that look at it."""

    def __init__(self, model: Model, budget: int, chunk: int = ALONE, fits: Fits | None = None, spell: Spell | None = None) -> None:
        self.model, self.budget, self.chunk = model, budget, chunk
        give_back_large_blocks()
        self.pools = Pools(model.shape, budget, model.device, fits, model.matrix, spell)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._rotates = [_rotate(block.rope) for block in model.blocks]
        weight = model.head.weight
        self._head = HeadDraw(Packed.from_float(weight, "f32") if isinstance(weight, Tensor) else weight, model.config.logit_cap or 0.0)

    # ---- requests

    def submit(self, request: Request) -> None:
        """Queue a request. Raises OutOfMemory where the budget, or the disk of its Place, could never hold it."""
        if (least := self._need(request)) > self.budget:
            raise OutOfMemory(
                f"This request needs about {least:,} bytes of KV memory and the budget is {self.budget:,}; raise the memory budget, "
                f"shorten the prompt of {len(request.prompt)} tokens, or use a recipe that keeps less, for example 'int4' or 'streaming'."
            )
        self.pools.open(request.plan, disk_need(request.plan, request.asked + request.sampling.max_tokens))
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """End a request and give its memory back at once."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if not request.done:
            request.end("cancelled")

    def empty(self, plan: Plan) -> Memory:
        """An empty memory under a plan."""
        return Memory(plan, self.pools, self._rotates)

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    # ---- a step

    def step(self) -> list[Request]:
        """One pass over what runs; returns the requests that ended in it."""
        self._admit()
        done = self._swept()
        if batch := self._batch():
            for request in self.running:
                request.chunk = self._chunk(request)
            self._pass(batch)
        return done + self._swept()

    def run(self, requests: Iterable[Request]) -> None:
        """Submit all and step until they are done; what is still alive when an error or Ctrl-C comes is cancelled."""
        asked = list(requests)
        mine = [r for request in asked for r in (request, *request.siblings)]
        try:
            for request in asked:
                self.submit(request)
            while any(not r.done for r in mine):
                self.step()
        finally:
            for request in mine:
                self.cancel(request)

    def _admit(self) -> None:
        """Start waiting requests, oldest first, while the budget has room for them."""
        while self.waiting:
            request = self.waiting[0]
            if self.running and sum(map(self._need, self.running)) + self._need(request) > self.budget:
                return
            self.waiting.popleft()
            request.begin(self.empty(request.plan), self._head)
            request.chunk = self._chunk(request)
            self.running.append(request)
            self._advance(request, None)

    def _need(self, request: Request) -> int:
        return need(request.plan, request.asked, self.chunk, request.sampling.max_tokens)

    def _swept(self) -> list[Request]:
        """The requests that have ended, which run no more."""
        done = [r for r in self.running if r.done]
        self.running = [r for r in self.running if not r.done]
        return done

    def _chunk(self, request: Request) -> int:
        decoding = any(r is not request and r.pending and r.pending.step.phase != "prefill" for r in self.running)
        chunk = self.chunk_of(request.plan)
        return min(chunk, SHARED) if decoding else chunk

    def chunk_of(self, plan: Plan) -> int:
        """The most tokens of a prompt that a plan reads at once."""
        return min(self.chunk, plan.chunk or self.chunk)

    def _batch(self) -> list[Request]:
        """All decodes, and as many prefill chunks as one chunk's tokens allow; the youngest give way when bytes are short."""
        batch, room = [], self.chunk
        for request in [r for r in self.running if r.pending]:
            assert request.pending is not None
            if request.pending.step.phase == "prefill":
                if room <= 0:
                    continue
                room -= len(request.pending.step.ids)
            batch.append(request)
        return self._within_budget(batch)

    def _within_budget(self, batch: list[Request]) -> list[Request]:
        """Preempt the youngest until this step's growth fits; a request that can't fit alone ends with OutOfMemory."""
        if all(r.pending and r.pending.step.phase == "decode" and not r.pending.memory.plan.away for r in batch):
            # Settling at most doubles what is held; where even that fits there is nothing to count.
            most = 2 * self.pools.ledger.now["device"] + sum(token_bound(r.pending.memory.plan) for r in batch if r.pending)
            if most <= self.budget:
                return batch
        while batch:
            want = self.pools.ledger.now["device"] + sum(r.pending.memory.growth(r.pending.step) for r in batch if r.pending)
            if want <= self.budget:
                return batch
            youngest = self.running[-1]
            if len(self.running) == 1:
                youngest.end("error", OutOfMemory(f"The KV memory needs {want:,} bytes and the budget is {self.budget:,}."))
                return []
            self._preempt(youngest)
            batch = [r for r in batch if r is not youngest]
        return batch

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        request.pause()
        self.waiting.appendleft(request)

    def _pass(self, batch: list[Request]) -> None:
        """One pass of the model. Where a method fails in it, the requests under its plan end with its error and the others start again;
        where a page on the disk is damaged, all do."""
        try:
            replies = forward(self.model, [r.pending for r in batch if r.pending])
        except StepError as error:
            for request in reversed(batch):
                if isinstance(error.cause, DamagedPage):
                    self._renew(request, error.cause)
                elif request.pending and request.pending.memory.plan == error.plan:
                    request.end("error", error.cause)
                else:
                    self._preempt(request)
        else:
            for request, reply in zip(batch, replies, strict=True):
                self._advance(request, reply)

    def _renew(self, request: Request, damage: DamagedPage) -> None:
        """Drop a request's memory and have it computed again, unless its own pages have been damaged too often."""
        request.damaged += request.memory.holds(damage.file, damage.record)
        if request.damaged > RENEWALS:
            request.end("error", damage)
        else:
            self._preempt(request)

    def _advance(self, request: Request, reply: object) -> None:
        """Give a request its reply; a user's mistake that surfaces in it ends this request alone."""
        if request.pending and request.pending.step.phase == "prefill":
            request.clock.prefilled += len(request.pending.step.ids)
        try:
            request.pending = request.advance(reply)
            self._start_siblings(request)
        except DamagedPage as damage:
            self._renew(request, damage)
        except LongspoolError as error:
            request.end("error", error)
        else:
            if request.pending is None:
                request.end("stop")

    def _start_siblings(self, request: Request) -> None:
        """Samples of one prompt fork its memory when it has been read."""
        reply = request.prompt_reply
        if reply is None or not request.siblings:
            return
        twins, request.siblings = request.siblings, []
        for twin in twins:
            twin.branch(request, self._head, reply)
            self.running.append(twin)
            self._advance(twin, None)


def _rotate(embedding: Rope | None) -> Rotate | None:
    """x [N, A, D] turned at positions [N], with `total` as in Rope.angles, by a layer's rotary embedding; None for a layer without one."""
    if embedding is None:
        return None

    def turn(x: Tensor, pos: Tensor, total: int) -> Tensor:
        cos, sin = embedding.angles(pos, total)
        return rope(x, cos.to(x.device), sin.to(x.device))

    return turn
