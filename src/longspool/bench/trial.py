"""What a method has to show, shown: each trial against dense, against its blind control and against the recipes of its paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..memory.view import acted
from ..method import Method, Trial
from ..recipe import parse
from ..report import Report
from ..roles import Admit, Encode, Evict, Place, Role, Select
from ..values import Shape
from .bench import PASSAGES, Actions, Bench, Score, added
from .quality import Mean, gain
from .texts import prose

ANSWERS = 32
SLACK = 1.1  # what page ends and windows may add to a budget


@dataclass(frozen=True)
class Line:
    """One requirement: what was compared, the baseline's value, the method's, the bar, and whether it is met."""

    what: str
    baseline: str
    method: str
    bar: str
    ok: bool


def tried(bench: Bench, trial: Trial) -> Iterator[Line]:
    """The lines of one trial."""
    if trial.on == "exact":
        yield from _exact(bench, trial)
        return
    dense, mine = _score(bench, trial, "dense"), _score(bench, trial, trial.recipe)
    yield _acts(trial, mine.actions)
    yield from _budgets(bench, trial, mine)
    if trial.on in PASSAGES:
        yield from _closer(bench, trial, mine)
    else:
        yield from _finds(bench, trial, dense, mine)


def _score(bench: Bench, trial: Trial, recipe: str) -> Score:
    return bench.score(recipe, trial.on, trial.length, 0 if recipe == "dense" else trial.chunk, trial.forced)


def claimed(recipe: str, shape: Shape) -> float:
    """Bytes that its methods say a kept token of one layer and KV head takes; where none encodes or places it, it is raw beside."""
    methods = _methods(recipe)
    told = sum(m.cost(shape).device + m.cost(shape).host for m in methods)
    return told if any(isinstance(m, Encode | Place) for m in methods) else told + 4 * shape.head_dim


def _methods(recipe: str) -> list[Method]:
    return [item.method for item in parse(recipe)]


def _sits(recipe: str, *seats: type[Role]) -> bool:
    """Whether the recipe has a method on one of the seats."""
    return any(isinstance(m, seats) for m in _methods(recipe))


def _acts(trial: Trial, actions: Actions) -> Line:
    """A method that did nothing is as good as dense for no merit of its own."""
    did = {m.slug: actions.get(m.slug, {}) for m in _methods(trial.recipe)}
    told = "; ".join(f"{name}: " + ", ".join(f"{what} {n:,.0f}" for what, n in own.items()) for name, own in did.items())
    return Line("each method made a difference", "", told, "by its counters", all(map(acted, did.values())))


def _budgets(bench: Bench, trial: Trial, mine: Score) -> Iterator[Line]:
    """That the method spends no more than its control, and what it says that it does."""
    recipe = trial.recipe
    if trial.control:
        control = _score(bench, trial, trial.control)
        if _sits(recipe, Admit, Evict):
            yield _spends("bytes held, as a part of dense", control.share, mine.share, "{:.1%}".format)
        if _sits(recipe, Select):
            yield _spends("tokens read a step", control.read, mine.read, "{:,.0f}".format)
    if _sits(recipe, Encode):
        raw, told = 4 * bench.llm.model.shape.head_dim, claimed(recipe, bench.llm.model.shape)
        whole = mine.recent * raw + (1 - mine.recent) * told
        most = min(SLACK * whole, raw)
        what = f"bytes held for a kept token, against {told:.0f} claimed and {raw} while it is recent"
        yield Line(what, f"{whole:.0f}", f"{mine.held:.0f}", f"at most {most:.0f}", mine.held <= most)
    if _sits(recipe, Place):
        yield Line("bytes that are not on the device", "0", f"{mine.away:,}", "above 0", mine.away > 0)


def _spends(what: str, control: float, mine: float, said: Callable[[float], str]) -> Line:
    return Line(f"{what}, against the control", said(control), said(mine), f"at most {SLACK} times as many", mine <= SLACK * control)


def _closer(bench: Bench, trial: Trial, mine: Score) -> Iterator[Line]:
    """Divergence from dense."""

    def told(score: Score) -> str:
        return f"{Mean.of(score.kl)} (top-1 {score.top1:.1%}, perplexity {score.surprise:+.1%}, {score.share:.1%} of the bytes)"

    what = f"divergence from dense, nats a token{' of a repeated passage' if trial.on == 'repeat' else ''}"
    for rival, theirs in _rivals(bench, trial):
        yield _better(trial, rival, what, "lower", gain(theirs.kl, mine.kl), told(theirs), told(mine))
    if trial.within is not None:
        yield Line(what, "", told(mine), f"at most {trial.within:g}", Mean.of(mine.kl).mean <= trial.within)


def _finds(bench: Bench, trial: Trial, dense: Score, mine: Score) -> Iterator[Line]:
    """Needles, of those that dense finds."""
    known = [i for i, q in enumerate(dense.texts) if q.found]
    if len(known) < 2:
        yield Line("needles that dense finds", f"{len(known)}", "", "at least 2", False)
        return

    def missed(score: Score) -> list[float]:
        return [score.missed[i] for i in known]

    def told(score: Score) -> str:
        return f"{len(known) - sum(missed(score)):.0f} of {len(known)}"

    what = f"needles found, the question {'known' if trial.on == 'aware' else 'unknown'} to the method"
    for rival, theirs in _rivals(bench, trial):
        yield _better(trial, rival, what, "more", gain(missed(theirs), missed(mine)), told(theirs), told(mine))


def _rivals(bench: Bench, trial: Trial) -> Iterator[tuple[str, Score]]:
    """The control and the recipes that it must not be worse than."""
    for rival in filter(None, (trial.control, *trial.beats)):
        yield rival, _score(bench, trial, rival)


def _better(trial: Trial, rival: str, what: str, way: str, lead: Mean, theirs: str, mine: str) -> Line:
    """Clearly better than the control, not worse than the others."""
    blind = rival == trial.control
    bar = f"{way} by more than 2 standard errors" if blind else "not worse"
    return Line(f"{what}, against {rival}", theirs, mine, f"{bar}: {lead}", lead.clear if blind else lead.mean >= 0)


def _exact(bench: Bench, trial: Trial) -> Iterator[Line]:
    """Greedy answers are dense's, token for token."""
    texts = prose(bench.llm.tokenizer, bench.count, trial.length, 0, bench.seed)
    same, reports = 0, []
    for i, text in enumerate(texts):
        bench.tell(i / len(texts), f"{trial.recipe}: answers to {trial.length:,} tokens")
        plain, _ = _answer(bench, text.ids, "dense")
        other, report = _answer(bench, text.ids, trial.recipe)
        same += plain == other
        reports.append(report)
    yield _acts(trial, added(r.actions for r in reports))
    if _sits(trial.recipe, Place):
        away = sum(r.memory.host_bytes + r.memory.disk_bytes for r in reports)
        yield Line("bytes that are not on the device", "0", f"{away:,}", "above 0", away > 0)
    yield Line(f"answers of {ANSWERS} tokens equal to dense's", f"{len(texts)}", f"{same}", "all", same == len(texts))


def _answer(bench: Bench, ids: Sequence[int], recipe: str) -> tuple[tuple[int, ...], Report]:
    result = bench.llm.generate(list(ids), max_tokens=ANSWERS, ignore_eos=True, recipe=recipe)[0]
    return result.tokens, result.report
