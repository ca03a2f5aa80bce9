"""One request: what was asked, where it stands, what came out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

from ..errors import LongspoolError
from ..memory import Memory
from ..memory.view import Counters
from ..method import Method, Needs
from ..plan import Item, Plan, resolve
from ..roles import Decode, Head, Ingest, Position, RequestMemory, Reuse, Review, Stop
from ..values.fit import Fit
from ..values.flow import Ask, Choice, Emit, Flow, Want
from ..values.packed import Packed
from ..values.step import Phase, Step
from .answer import Answer
from .flow import chunked, sampled
from .sampler import Sampler, Sampling

Finish = Literal["stop", "length", "cancelled", "error"]


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


@dataclass
class Clock:
    """Moments of a request in seconds since it was submitted, and the time spent in its prefill and decode steps."""

    born: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    last_token: float | None = None
    prefilled: int = 0

    def now(self) -> float:
        return time.perf_counter() - self.born


class Request:
    """A prompt on its way to an answer. The engine drives `flow`; tokens land in `choices`."""

    def __init__(
        self,
        prompt: list[int],
        plan: Plan,
        sampling: Sampling,
        stops: frozenset[int],
        vocab: int,
        index: int = 0,
        answer: Answer | None = None,
        before: Counters | None = None,
    ) -> None:
        self.prompt, self.plan, self.sampling, self.index, self.answer = list(prompt), plan, sampling, index, answer
        self.asked = len(prompt)
        self.stops = frozenset(sampling.stop_tokens) | (frozenset() if sampling.ignore_eos else stops)
        self.sampler = Sampler(sampling, prompt, vocab, index)
        self.choices: list[Choice] = []
        self.state = State.WAITING
        self.finish: Finish | None = None
        self.error: Exception | None = None
        self.clock = Clock()
        self.siblings: list[Request] = []
        self.preempted = self.reused = self.damaged = 0
        self.chunk = 2048
        self.memory: Memory
        self.actions: Counters = before or {}
        """What each method did: before the request began, and when it has ended in all."""
        self.held: dict[str, int] = {}
        self.pending: Ask[Memory] | None = None
        self._reply: Tensor | None = None
        self._again: list[int] = []
        self.flow: Flow | None = None

    @property
    def want(self) -> Want:
        """What the default flows ask for: a fused head draws from the final state where only the temperature matters."""
        return "state" if self.plan.one(Head) is not None and self.sampling.plain else "last"

    @property
    def done(self) -> bool:
        return self.state is State.DONE

    def begin(self, memory: Memory, head: HeadDraw) -> None:
        """Start on an empty memory, or start again: tokens that are already out are read as part of the prompt where that gives the
        same memory as decoding them, else they are decoded again."""
        self._head, out = head, [c.token for c in self.choices]
        self.prompt = self.prompt[: self.asked] + (out if self.plan.uniform else [])
        self._again = [] if self.plan.uniform else out
        self.memory = memory
        self._reuse()
        self.flow, self.state = self._life(None), State.RUNNING

    def _reuse(self) -> None:
        """Go on from what is known of the prompt; its last token is always read, since its logits are wanted."""
        method = self.plan.one(Reuse)
        known = method.lookup(tuple(self.prompt)) if method else None
        if not isinstance(known, Memory) or known.plan != self.plan:
            return
        twin = known.fork()
        try:
            if twin.seen >= len(self.prompt):
                twin.truncate(len(self.prompt) - 1)
        except LongspoolError:  # it has settled
            twin.free()
            return
        self.memory.free()
        self.memory, self.reused = twin, twin.seen
        self.count(method, reused=twin.seen)

    def branch(self, sibling: Request, head: HeadDraw, reply: Tensor) -> None:
        """Start on a fork of a sibling's memory, after its prompt."""
        self.memory, self._head = sibling.memory.fork(), head
        for name, amounts in sibling.memory.actions.items():
            self.memory.actions[name].update(amounts)
        self.flow, self.state = self._life(reply), State.RUNNING

    def _life(self, reply: Tensor | None) -> Flow:
        """Ingest, review, decode."""
        if reply is None:
            ingest = self.plan.one(Ingest)
            said = yield from ingest.flow(self) if ingest else chunked(self)
            for review in self.plan.chain(Review):
                again = yield from review.review(self)
                said = said if again is None else again
            assert isinstance(said, Tensor)
            self._reply = said
            if reuse := self.plan.one(Reuse):
                reuse.store(tuple(self.prompt), self.memory.fork())
            for token in self._again:
                said = yield self.ask([token], "decode", want=self.want)
            assert isinstance(said, Tensor)
            reply = said
        decode = self.plan.one(Decode)
        return (yield from decode.flow(self, reply) if decode else sampled(self, reply))

    @property
    def last_step(self) -> Step:
        """The prompt's last token as a final prefill step."""
        last = self.memory.seen - 1
        return Step(torch.tensor(self.prompt[-1:]), torch.tensor([last]), (0, 1), (self.memory.seen,), "prefill", (True,))

    @property
    def prompt_reply(self) -> Tensor | None:
        """The reply to the prompt's last chunk, once there is one."""
        return self._reply

    def pick(self, reply: object) -> Choice:
        """Draw the next token from the last row of logits, or from the final state under a fused head."""
        assert isinstance(reply, Tensor)
        choice = self._head(self, reply) if self.want == "state" else self.sampler.pick(reply[-1])
        self.sampler.commit(choice.token)
        return choice

    def advance(self, reply: object) -> Ask[Memory] | None:
        """Send a reply to the flow and run it to its next Ask; None when the answer is complete."""
        assert self.flow is not None
        try:
            said = self.flow.send(reply)
            while isinstance(said, Emit):
                said = self.flow.send(self._take(said.choices))
        except StopIteration:
            return None
        assert isinstance(said, Ask)
        return None if self.finish else said

    def _take(self, choices: tuple[Choice, ...]) -> bool:
        """Note tokens that are out; False when one of them ends the answer."""
        for choice in choices:
            self.clock.last_token = self.clock.now()
            if self.clock.first_token is None:
                self.clock.first_token = self.clock.last_token
            if choice.token in self.stops:
                self.finish = "stop"
            else:
                self.choices.append(choice)
                if self._complete(choice.token):
                    self.finish = "stop"
                elif len(self.choices) >= self.sampling.max_tokens:
                    self.finish = "length"
            if self.finish:
                return False
        return True

    def _complete(self, token: int) -> bool:
        """Whether a stop string or a Stop method ends the answer with this token."""
        if self.answer is not None and self.answer.push(token):
            return True
        stops = self.plan.chain(Stop)
        if not stops:
            return False
        tokens, text = tuple(c.token for c in self.choices), self.answer.text if self.answer else ""
        ending = next((method for method in stops if method.done(tokens, text)), None)
        if ending is not None:
            self.count(ending, stopped=1)
        return ending is not None

    def ask(self, ids: list[int], phase: Phase, memory: RequestMemory | None = None, want: Want = "last") -> Ask[RequestMemory]:
        """An Ask for tokens that follow what the memory (by default the request's) has seen."""
        over = self.memory if memory is None else memory
        end = over.seen + len(ids)
        step = Step(torch.tensor(ids), torch.arange(over.seen, end), (0, len(ids)), (max(len(self.prompt), end),), phase, (True,))
        return Ask(step, over, want)

    def draft(self, methods: tuple[Method, ...], recent: int) -> Memory:
        """A memory of the same tokens under other methods, `recent` of them raw; whoever asks for it frees it."""
        position = tuple(i for i in self.plan.items if isinstance(i.method, Position))
        plan = resolve((*position, *map(Item, methods)), self.plan.shape, self.plan.dtype, Needs(recent=recent))
        return self.memory.refit(plan, self.last_step)

    def fitted(self, method: Method) -> Fit:
        """What a method was fitted to the model."""
        return self.memory.pools.fits[method]

    def count(self, method: object, **amounts: float) -> None:
        """Counters of a flow."""
        self.memory[0].count(method, **amounts)

    def end(self, finish: Finish, error: Exception | None = None) -> None:
        """Close the flow and give the memory back."""
        if self.flow is not None:
            self.flow.close()
            self.flow = None
            self.actions = self.actions | {name: self.actions.get(name, {}) | c for name, c in self.memory.actions.items()}
            self.held = self.memory.tiers()
            self.memory.free()
        if self.answer is not None:
            self.answer.close()
        for twin in self.siblings:
            twin.end(finish, error)
        self.siblings = []
        self.finish, self.error, self.pending = self.finish or finish, error, None
        self.state = State.DONE

    def pause(self) -> None:
        """Give the memory back to start again later from the tokens that are out."""
        assert self.flow is not None
        self.flow.close()
        self.flow, self.pending = None, None
        self.memory.free()
        self.preempted += 1
        self.state = State.WAITING


class HeadDraw:
    """Draws from final states through the plan's Head."""

    def __init__(self, weights: Packed, cap: float) -> None:
        self.weights, self.cap = weights, cap

    def __call__(self, request: Request, state: Tensor) -> Choice:
        head, sampler = request.plan.one(Head), request.sampler
        assert head is not None
        temperature = torch.tensor([request.sampling.temperature], dtype=torch.float32)
        request.count(head, draws=1)
        token, logprob = head.sample(
            state[-1:], self.weights, temperature, torch.tensor([sampler.stream]), torch.tensor([sampler.drawn]), self.cap
        )
        return Choice(int(token[0]), float(logprob[0]))
