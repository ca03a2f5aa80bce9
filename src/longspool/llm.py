"""LLM: text in, text out. The one class that a user must know."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor

from .engine.answer import Answer
from .engine.engine import ALONE, Engine
from .engine.fitting import Fitting, Owner, complete, fit
from .engine.request import Request
from .engine.sampler import Sampling
from .engine.score import teacher_forced
from .errors import LongspoolError, PlanError, PromptTooLong
from .memory import DTYPES, Fits
from .memory.view import Counters
from .method import registry
from .model.load import Loaded, load
from .model.pull import Progress
from .plan import Plan, resolve
from .recipe import parse
from .report import Report, Result, result
from .roles import Position, Prompt, Weights
from .values import Shape
from .values.budget import parse_bytes

Text = str | Sequence[int]
Message = dict[str, str]
Watch = Callable[[int, int], None]
"""Hears after every step how many of the prompt's tokens have been read, and how many there are."""


@dataclass(frozen=True)
class Piece:
    """A bit of a streamed answer; the last one carries the whole result."""

    text: str
    result: Result | None = None


class Prepared(list[int]):
    """A prompt's tokens, and what the recipe's Prompt methods did to it."""

    def __init__(self, ids: Iterable[int], actions: Counters | None = None) -> None:
        super().__init__(ids)
        self.actions: Counters = actions or {}


class LLM:
    """A model ready to answer. `recipe` says how its KV memory is treated, `memory` bounds the live KV bytes ("8GiB"; default: half of
    what is free), `kv` is the raw storage (f16, bf16 or f32), `weights` packs a float checkpoint ("int8", "int4").

    Raises ModelError where the model can't be loaded and PlanError where the recipe can't run on it.
    """

    def __init__(
        self,
        model: str | Loaded,
        recipe: str = "",
        *,
        memory: str | int | None = None,
        kv: str = "f16",
        weights: str | None = None,
        chunk: int = ALONE,
        progress: Progress | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        if kv not in DTYPES:
            raise LongspoolError(f"kv={kv!r} is none of {', '.join(DTYPES)}.")
        if chunk < 1:
            raise LongspoolError(f"chunk={chunk} must be at least one token.")
        items, self.dtype = parse(recipe), DTYPES[kv]
        budget = psutil.virtual_memory().available // 2 if memory is None else parse_bytes(memory)
        name = str(model.report.path) if isinstance(model, Loaded) else model
        if not isinstance(model, Loaded):

            def choose(shape: Shape) -> Weights | None:
                return resolve(items, shape, self.dtype).one(Weights)

            model = load(model, weights, progress=progress, cache_dir=cache_dir, choose=choose)
        self.loaded, self.model, self.tokenizer = model, model.model, model.tokenizer
        self.fits = Fits()
        self.owner = Owner(model.fingerprint, name, cache_dir, self.model.device)
        self.plan = self.plan_for(recipe)
        self.engine = Engine(self.model, budget, chunk, self.fits, functools.cache(lambda token: self.tokenizer.decode([token])))

    def plan_for(self, recipe: str | None) -> Plan:
        """A recipe resolved for this model, with what its methods were fitted to; None is the default one. Raises PlanError with every
        reason, ModelError where a fitted file is damaged."""
        if recipe is None:
            return self.plan
        plan = resolve(parse(recipe), self.model.shape, self.dtype)
        for method in plan.methods:
            if isinstance(method, Weights) and method != self.loaded.packer:
                raise PlanError(f"{method.slug} packs weights while a model is loaded: name it where the model is, in LLM(model, recipe).")
        complete(plan.methods, self.fits, self.owner)
        return plan

    def fit(
        self, recipe: str, *, text: str = "", tokens: int = 8192, seed: int = 0, progress: Callable[[float], None] | None = None
    ) -> Fitting:
        """Fit the recipe's one method that wants it to this model, over so many tokens of a text (of Python's documentation where none
        is given), and keep the result where recipes find it. Raises PlanError for a method that is not fitted, ModelError where the
        result can't be kept."""
        return fit(self.model, self.tokenizer, parse(recipe), self.owner, self.fits, text, tokens, seed, progress)

    def generate(
        self, prompts: Text | Sequence[Text], sampling: Sampling | None = None, *, recipe: str | None = None, **wishes: object
    ) -> list[Result]:
        """Complete each prompt (text or token ids); `n` samples of one prompt follow each other. Wishes are those of Sampling."""
        requests = [r for p in _many(prompts) for r in self.requests(p, sampling, recipe, **wishes)]
        self.engine.pools.ledger.mark()
        self.engine.run([r for r in requests if r.index == 0])
        return [self._result(r) for r in requests]

    def stream(
        self, prompt: Text, sampling: Sampling | None = None, *, recipe: str | None = None, watch: Watch | None = None, **wishes: object
    ) -> Iterator[Piece]:
        """Complete one prompt, text as it comes. Leaving the loop early cancels the request and frees its memory, and so does an
        error raised by `watch`."""
        (request,) = self.requests(prompt, replace(_sampling(sampling, wishes), n=1), recipe)
        self.engine.pools.ledger.mark()
        return self._pieces(request, watch)

    def chat(self, messages: Sequence[Message], sampling: Sampling | None = None, *, recipe: str | None = None, **wishes: object) -> Result:
        """The model's answer to a conversation of {"role", "content"} messages, in its own chat format."""
        return self.generate(self.chat_ids(messages, recipe), sampling, recipe=recipe, **wishes)[0]

    def chat_ids(self, messages: Sequence[Message], recipe: str | None = None) -> list[int]:
        """A conversation as tokens, after the recipe's Prompt methods have rewritten it."""
        rewritten, actions = self._rewritten([dict(m) for m in messages], self.plan_for(recipe))
        return Prepared(self.tokenizer.chat(rewritten), actions)

    def logits(self, ids: Sequence[int], prefill: int | None = None, *, recipe: str | None = None) -> Tensor:
        """Teacher-forced logits fp32 [N, V] under the recipe: the first `prefill` tokens (default: half) are read as a prompt, the
        others one by one. Row i predicts token i + 1."""
        return torch.cat(list(self._forced(ids, prefill, recipe)))

    def score(self, ids: Sequence[int], prefill: int | None = None, *, recipe: str | None = None) -> Tensor:
        """Log-probability fp32 [N] of each token given those before it, as in `logits`; the first token, which nothing predicts, has 0."""
        given, out, at = torch.tensor(list(ids)), [torch.zeros(1)], 1
        for rows in self._forced(ids, prefill, recipe):
            target = given[at : at + len(rows)]
            out.append(rows[: len(target)].log_softmax(-1).gather(1, target[:, None])[:, 0])
            at += len(rows)
        return torch.cat(out)

    def requests(self, prompt: Text, sampling: Sampling | None, recipe: str | None, **wishes: object) -> list[Request]:
        """The checked requests of one prompt, one for each of its n samples; the first carries the others.

        Raises PromptTooLong, PlanError, or LongspoolError for an empty prompt."""
        wish, plan = _sampling(sampling, wishes), self.plan_for(recipe)
        ids = self._ids(prompt, plan)
        wish = replace(wish, max_tokens=min(wish.max_tokens, plan.context - len(ids)))
        packed = {m.slug: {"matrices": float(self.loaded.report.own)} for m in plan.methods if isinstance(m, Weights)}
        made = [
            Request(
                ids,
                plan,
                wish,
                frozenset(self.tokenizer.eos),
                self.model.shape.vocab,
                i,
                Answer(self.tokenizer, wish.stop),
                ids.actions | packed,
            )
            for i in range(wish.n)
        ]
        made[0].siblings = made[1:]
        return made

    def _ids(self, prompt: Text, plan: Plan) -> Prepared:
        """A prompt's tokens, checked."""
        if isinstance(prompt, str):
            (message,), actions = self._rewritten([{"role": "user", "content": prompt}], plan)
            ids = Prepared(self.tokenizer.encode(message["content"], special=True), actions)
        else:
            ids = prompt if isinstance(prompt, Prepared) else Prepared(int(i) for i in prompt)
        if not ids or (isinstance(prompt, str) and not prompt.strip()):
            raise LongspoolError("The prompt is empty; give at least one word.")
        if bad := [i for i in ids if not 0 <= i < self.model.shape.vocab]:
            raise LongspoolError(f"Token {bad[0]} is not in the model's vocabulary of {self.model.shape.vocab}.")
        if len(ids) >= plan.context:
            raise PromptTooLong(_too_long(len(ids), plan))
        return ids

    def _rewritten(self, messages: list[Message], plan: Plan) -> tuple[list[Message], Counters]:
        """Messages after the recipe's Prompt methods, and how many tokens each took away."""

        def count(text: str) -> int:
            return len(self.tokenizer.encode(text))

        actions: Counters = {}
        for method in (m for m in plan.methods if isinstance(m, Prompt)):
            before = sum(count(m["content"]) for m in messages)
            messages = method.rewrite(messages, count)
            after = sum(count(m["content"]) for m in messages)
            actions[method.slug] = {"tokens_before": before, "tokens_after": after} if after != before else {}
        return messages, actions

    def _forced(self, ids: Sequence[int], prefill: int | None, recipe: str | None) -> Iterator[Tensor]:
        plan = self.plan_for(recipe)
        checked = self._ids(list(ids), plan)
        first = max(len(checked) // 2, 1) if prefill is None else prefill
        if not 1 <= first <= len(checked):
            raise LongspoolError(f"prefill={first} must be between 1 and the {len(checked)} tokens that are given.")
        return teacher_forced(self.engine, checked, first, plan)

    def _pieces(self, request: Request, watch: Watch | None) -> Iterator[Piece]:
        shown, answer = 0, request.answer
        assert answer is not None
        try:
            self.engine.submit(request)
            while not request.done:
                self.engine.step()
                if watch is not None:
                    watch(request.reused + request.clock.prefilled, request.asked)
                if len(answer.text) > shown and not request.done:
                    fresh = answer.text[shown:]
                    shown += len(fresh)  # other streams may go on with this request before the next line runs
                    yield Piece(fresh)
            yield Piece(answer.text[shown:], self._result(request))
        finally:
            self.engine.cancel(request)

    def _result(self, request: Request) -> Result:
        if request.error is not None:
            raise request.error
        return result(request, self.engine.pools)


def _sampling(sampling: Sampling | None, wishes: dict[str, object]) -> Sampling:
    base = sampling or Sampling()
    known = set(Sampling.__dataclass_fields__)
    if unknown := [w for w in wishes if w not in known]:
        raise LongspoolError(f"There is no sampling wish {unknown[0]!r}; known are {', '.join(sorted(known))}.")
    return replace(base, **{k: tuple(v) if isinstance(v, list) else v for k, v in wishes.items()})  # type: ignore[arg-type]


def _many(prompts: Text | Sequence[Text]) -> list[Text]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _too_long(tokens: int, plan: Plan) -> str:
    extend = ", ".join(name for name, cls in registry().items() if issubclass(cls, Position))
    return (
        f"The prompt has {tokens} tokens and with this recipe the model reads at most {plan.context - 1} and answers with one more; "
        f"shorten it, or extend the model's reach with: {extend}."
    )


__all__ = ["LLM", "Piece", "Report", "Result"]
