"""Recipes on the same texts, each measured once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from ..errors import LongspoolError
from ..llm import LLM
from ..memory import fitted_in
from ..recipe import parse
from .quality import Quality, quality
from .reading import Reading, Run
from .texts import Text, needles, prose, repeats

Progress = Callable[[float, str], None]
Actions = Mapping[str, Mapping[str, float]]
FORCED, NEEDLES = 32, 12
PASSAGES = {"text": prose, "repeat": repeats}
"""Kinds of texts on which divergence is measured; on the others needles are counted."""


def added(each: Iterable[Actions]) -> dict[str, dict[str, float]]:
    """Counters of several runs together."""
    total: dict[str, dict[str, float]] = {}
    for actions in each:
        for name, did in actions.items():
            own = total.setdefault(name, {})
            for what, amount in did.items():
                own[what] = own.get(what, 0.0) + amount
    return total


@dataclass(frozen=True)
class Score:
    """A recipe over all texts."""

    recipe: str
    texts: tuple[Quality, ...]
    runs: tuple[Run, ...] = field(repr=False)
    plain: tuple[Quality, ...] = field(repr=False)
    """Dense on the same texts."""

    @property
    def kl(self) -> list[float]:
        return [q.kl for q in self.texts]

    @property
    def missed(self) -> list[float]:
        return [float(not q.found) for q in self.texts]

    @property
    def top1(self) -> float:
        return fmean(q.top1 for q in self.texts)

    @property
    def surprise(self) -> float:
        """How much greater the perplexity is than dense's, as a part of it."""
        return math.exp(fmean(mine.nll - dense.nll for mine, dense in zip(self.texts, self.plain, strict=True))) - 1

    @property
    def share(self) -> float:
        """Bytes held, as a part of dense's."""
        return fmean(r.share for r in self.runs)

    @property
    def read(self) -> float:
        """Tokens that a row reads at a step."""
        return fmean(r.read for r in self.runs)

    @property
    def held(self) -> float:
        """Bytes of a kept token of one layer and KV head, in all tiers, with tables, summaries and page ends."""
        return sum(sum(r.bytes.values()) for r in self.runs) / sum(r.kept for r in self.runs)

    @property
    def recent(self) -> float:
        """The share of kept tokens that are recent, and so raw."""
        return sum(r.recent for r in self.runs) / sum(r.kept for r in self.runs)

    @property
    def away(self) -> int:
        """Bytes that are not on the device."""
        return sum(amount for r in self.runs for tier, amount in r.bytes.items() if tier != "device")

    @property
    def step(self) -> float:
        """Seconds a decoding step takes, in the middle of all."""
        return median(s for r in self.runs for s in r.steps)

    @property
    def actions(self) -> dict[str, dict[str, float]]:
        """The counters of all texts together."""
        return added(r.actions for r in self.runs)


class Bench:
    """Texts that are read once, and the recipes that were tried on them. `count` texts for a divergence; needles are twelve."""

    def __init__(self, llm: LLM, count: int = 8, seed: int = 0, progress: Progress | None = None) -> None:
        if count < 2:
            raise LongspoolError(f"texts={count} must be at least 2: one text has no spread.")
        self.llm, self.count, self.seed, self.progress = llm, count, seed, progress
        self._texts: dict[tuple[str, int, int], list[Reading]] = {}
        self._scores: dict[tuple[str, str, int, int, int], Score] = {}

    def score(self, recipe: str, on: str, length: int, chunk: int = 0, forced: int = FORCED) -> Score:
        """A recipe on all texts of a kind and length; measured once."""
        key = (recipe, on, length, chunk, forced)
        if key not in self._scores:
            self._fitted(recipe)
            dense = None if recipe == "dense" else self.score("dense", on, length, forced=forced)
            runs = []
            for i, reading in enumerate(readings := self.readings(on, length, forced)):
                self.tell(i / len(readings), f"{recipe}: {'texts' if on in PASSAGES else 'needles'} of {length:,} tokens")
                runs.append(reading.under(recipe, chunk))
            theirs = runs if dense is None else dense.runs
            made = tuple(quality(r.text, run, own) for r, run, own in zip(readings, runs, theirs, strict=True))
            if dense is not None:  # many logits, of which nothing more is wanted
                runs = [replace(run, logits=run.logits[:0]) for run in runs]
            self._scores[key] = Score(recipe, made, tuple(runs), dense.texts if dense else made)
        return self._scores[key]

    def _fitted(self, recipe: str) -> None:
        """Fit the methods that want it and were not; they see none of the texts that are measured on."""
        for method in fitted_in([item.method for item in parse(recipe)]):
            if not self.llm.owner.place(method).is_file():
                self.llm.fit(str(method), progress=functools.partial(self.tell, text=f"fitting {method.slug}"))

    def tell(self, share: float, text: str) -> None:
        """Say how far the present work has come."""
        if self.progress is not None:
            self.progress(share, text)

    def close(self) -> None:
        """Give the memories of all texts back."""
        for readings in self._texts.values():
            for reading in readings:
                reading.close()
        self._texts.clear()

    def readings(self, on: str, length: int, forced: int = FORCED) -> list[Reading]:
        """The texts of a kind and length. Each keeps its dense memory from its first use to the end."""
        if (key := (on, length, forced)) not in self._texts:
            self._texts[key] = [Reading(self.llm, text) for text in self._made(*key)]
        return self._texts[key]

    def _made(self, on: str, length: int, forced: int) -> list[Text]:
        tokenizer = self.llm.tokenizer
        if on in PASSAGES:
            return PASSAGES[on](tokenizer, self.count, length, forced, self.seed)
        return needles(tokenizer, NEEDLES, length, self.seed, on == "aware")
