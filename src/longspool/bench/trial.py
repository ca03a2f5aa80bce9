"""What a method has to show, shown: each trial against dense, against its blind control and against the recipes of its paper."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from ..errors import LongspoolError
from ..llm import LLM
from ..memory import fitted_in
from ..method import Trial
from ..recipe import parse
from .quality import Mean, Quality, gain, quality
from .reading import Reading, Run
from .texts import Text, needles, prose

Progress = Callable[[float, str], None]
FORCED, ANSWERS, NEEDLES = 32, 32, 12


@dataclass(frozen=True)
class Line:
    """One requirement: what was compared, the baseline's value, the method's, the bar, and whether it is met."""

    what: str
    baseline: str
    method: str
    bar: str
    ok: bool


@dataclass(frozen=True)
class Score:
    """A recipe over all texts."""

    recipe: str
    texts: tuple[Quality, ...]
    runs: tuple[Run, ...] = field(repr=False)

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
    def share(self) -> float:
        """Bytes held, as a part of dense's."""
        return fmean(r.share for r in self.runs)

    @property
    def step(self) -> float:
        """Seconds a decoding step takes, in the middle of all."""
        return median(s for r in self.runs for s in r.steps)

    @property
    def actions(self) -> dict[str, dict[str, float]]:
        """The counters of all texts together."""
        total: dict[str, dict[str, float]] = {}
        for run in self.runs:
            for name, did in run.actions.items():
                own = total.setdefault(name, {})
                for what, amount in did.items():
                    own[what] = own.get(what, 0.0) + amount
        return total


class Bench:
    """Texts that are read once, and the recipes that were tried on them. `count` texts for a divergence; needles are twelve."""

    def __init__(self, llm: LLM, count: int = 8, seed: int = 0, progress: Progress | None = None, forced: int = FORCED) -> None:
        if count < 2:
            raise LongspoolError(f"texts={count} must be at least 2: one text has no spread.")
        self.llm, self.count, self.seed, self.progress, self.forced = llm, count, seed, progress, forced
        self._texts: dict[tuple[str, int], list[Reading]] = {}
        self._scores: dict[tuple[str, str, int, int], Score] = {}

    def score(self, recipe: str, on: str, length: int, chunk: int = 0) -> Score:
        """A recipe on all texts of a kind and length; measured once."""
        key = (recipe, on, length, chunk)
        if key not in self._scores:
            self._fitted(recipe)
            dense = None if recipe == "dense" else self.score("dense", on, length)
            runs = []
            for i, reading in enumerate(readings := self.readings(on, length)):
                self.tell(i / len(readings), f"{recipe}: {'needles' if on != 'text' else 'texts'} of {length:,} tokens")
                runs.append(reading.under(recipe, chunk))
            theirs = runs if dense is None else dense.runs
            made = tuple(quality(r.text, run, own) for r, run, own in zip(readings, runs, theirs, strict=True))
            self._scores[key] = Score(recipe, made, tuple(runs))
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

    def readings(self, on: str, length: int) -> list[Reading]:
        """The texts of a kind and length. Each keeps its dense memory from its first use to the end."""
        if (on, length) not in self._texts:
            self._texts[on, length] = [Reading(self.llm, text) for text in self._made(on, length)]
        return self._texts[on, length]

    def _made(self, on: str, length: int) -> list[Text]:
        tokenizer = self.llm.tokenizer
        if on == "text":
            return prose(tokenizer, self.count, length, self.forced, self.seed)
        return needles(tokenizer, NEEDLES, length, self.seed, on == "aware")


def tried(bench: Bench, trial: Trial) -> Iterator[Line]:
    """The lines of one trial."""
    if trial.on == "exact":
        yield _exact(bench, trial)
        return
    dense = bench.score("dense", trial.on, trial.length)
    mine = bench.score(trial.recipe, trial.on, trial.length, trial.chunk)
    yield _acted(mine)
    if trial.on == "text":
        yield from _closer(bench, trial, dense, mine)
    else:
        yield from _finds(bench, trial, dense, mine)


def _acted(mine: Score) -> Line:
    """A method that did nothing is as good as dense for no merit of its own."""
    did = "; ".join(
        f"{name}: " + ", ".join(f"{what} {n:,.0f}" for what, n in c.items()) for name, c in mine.actions.items() if any(c.values())
    )
    return Line("did something", "", did, "counters above zero", bool(did))


def _closer(bench: Bench, trial: Trial, dense: Score, mine: Score) -> Iterator[Line]:
    own = f"{Mean.of(mine.kl)} (top-1 {mine.top1:.1%}, {mine.share:.1%} of the bytes)"
    for rival in filter(None, (trial.control, *trial.beats)):
        theirs = bench.score(rival, trial.on, trial.length, trial.chunk)
        lead = gain(theirs.kl, mine.kl)
        blind = rival == trial.control
        bar = "lower by more than 2 standard errors" if blind else "not higher"
        yield Line(
            f"divergence from dense, nats a token, against {rival}",
            f"{Mean.of(theirs.kl)} (top-1 {theirs.top1:.1%}, {theirs.share:.1%} of the bytes)",
            own,
            f"{bar}: {lead}",
            lead.clear if blind else lead.mean >= 0,
        )
    if trial.within is not None:
        yield Line(f"divergence of {trial.recipe}", "", own, f"at most {trial.within:g}", Mean.of(mine.kl).mean <= trial.within)


def _finds(bench: Bench, trial: Trial, dense: Score, mine: Score) -> Iterator[Line]:
    """Needles count where dense finds them."""
    known = [i for i, q in enumerate(dense.texts) if q.found]
    if len(known) < 2:
        yield Line("needles that dense finds", str(len(known)), "", "at least 2", False)
        return
    missed = [mine.missed[i] for i in known]
    own = f"{len(known) - sum(missed):.0f} of {len(known)}"
    for rival in filter(None, (trial.control, *trial.beats)):
        score = bench.score(rival, trial.on, trial.length, trial.chunk)
        theirs = [score.missed[i] for i in known]
        lead, blind = gain(theirs, missed), rival == trial.control
        yield Line(
            f"needles found ({'the question known' if trial.on == 'aware' else 'the question unknown'}), against {rival}",
            f"{len(known) - sum(theirs):.0f} of {len(known)}",
            own,
            f"{'more by over 2 standard errors' if blind else 'not fewer'}: {lead}",
            lead.clear if blind else lead.mean >= 0,
        )


def _exact(bench: Bench, trial: Trial) -> Line:
    """Greedy answers are dense's, token for token."""
    texts = prose(bench.llm.tokenizer, bench.count, trial.length, 0, bench.seed)
    same = 0
    for i, text in enumerate(texts):
        bench.tell(i / len(texts), f"{trial.recipe}: answers to {trial.length:,} tokens")
        plain, other = (_answer(bench.llm, text.ids, recipe) for recipe in ("dense", trial.recipe))
        same += plain == other
    return Line(f"answers of {ANSWERS} tokens equal to dense's", f"{len(texts)}", f"{same}", "all", same == len(texts))


def _answer(llm: LLM, ids: Sequence[int], recipe: str) -> tuple[int, ...]:
    return llm.generate(list(ids), max_tokens=ANSWERS, ignore_eos=True, recipe=recipe)[0].tokens
