"""From logits to a token: one request's wishes (`Sampling`) and the state of one answer (`Sampler`).

Logits pass, in this order, through bias, repetition penalty, presence and frequency penalty, temperature, top-k, top-p, min-p.
Log-probabilities are those of the model itself: the log-softmax of the logits before any of these.

A draw is an exponential race: of the tokens left, the one with the largest weight / noise wins, which is a draw from their distribution.
The noise of token v at draw i depends on (seed, index, i, v) and nothing else, so a request's tokens do not depend on who shares its batch,
and two nearly equal distributions nearly always yield the same token: a draft that is drawn through a `fork` has a good chance to be what
the target draws at the same place, and accepting it only then gives exactly the tokens of plain decoding.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import LongspoolError
from ..values.flow import Choice

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_COUNTS = ("top_k", "max_tokens", "n")
_WORD = 2**64
_GAMMA, _MIX1, _MIX2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class Sampling:
    """How one request wants its tokens drawn. Raises LongspoolError with a sentence for every value that makes no sense.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off. `repetition_penalty` divides positive and multiplies negative
    logits of every token in the prompt or the answer; `presence_penalty` and `frequency_penalty` are subtracted once, or once per
    occurrence, for tokens of the answer. `logit_bias` pairs token ids with what is added to their logits (-inf bans). `logprobs`
    asks for the log-probability of the chosen token and of so many best ones.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        mistyped = list(_mistyped(self))
        if reasons := mistyped or list(_senseless(self)):
            raise LongspoolError(" ".join(reasons))

    @property
    def filtered(self) -> bool:
        """Some tokens are cut off before the draw; at temperature 0 there is nothing to cut."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def plain(self) -> bool:
        """Only the temperature matters, so a fused head sampler may serve this request without ever making its logits."""
        penalised = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return not (self.filtered or penalised or self.logit_bias) and self.logprobs is None


def _mistyped(s: Sampling) -> Iterator[str]:
    for name in _REALS:
        if not isinstance(getattr(s, name), Real):
            yield f"{name}={getattr(s, name)!r} must be a number."
    for name in _COUNTS:
        if not isinstance(getattr(s, name), Integral):
            yield f"{name}={getattr(s, name)!r} must be a whole number."
    for name in ("seed", "logprobs"):
        if not isinstance(getattr(s, name), Integral | None):
            yield f"{name}={getattr(s, name)!r} must be a whole number or None."
    for name, example in (("stop", "('###',)"), ("stop_tokens", "(2,)"), ("logit_bias", "((7, -1.5), (9, 2.0))")):
        if not isinstance(getattr(s, name), tuple):
            yield f"{name}={getattr(s, name)!r} must be a tuple, for example {example}."
    if isinstance(s.stop, tuple) and not all(isinstance(stop, str) for stop in s.stop):
        yield f"stop={s.stop!r} must hold strings only; token ids go into stop_tokens."


def _senseless(s: Sampling) -> Iterator[str]:
    rules = (
        ("temperature", 0 <= s.temperature < math.inf, "must be 0 (greedy) or a positive number"),
        ("top_k", s.top_k >= 0, "must be 0 (off) or a positive number"),
        ("top_p", 0 < s.top_p <= 1, "must be above 0 and at most 1 (off)"),
        ("min_p", 0 <= s.min_p <= 1, "must be between 0 (off) and 1"),
        ("repetition_penalty", 0 < s.repetition_penalty < math.inf, "must be a positive number (1 is off)"),
        ("presence_penalty", math.isfinite(s.presence_penalty), "must be a finite number (0 is off)"),
        ("frequency_penalty", math.isfinite(s.frequency_penalty), "must be a finite number (0 is off)"),
        ("seed", s.seed is None or -(_WORD // 2) <= s.seed < _WORD, "must fit into 64 bits"),
        ("max_tokens", s.max_tokens >= 1, "must be at least 1"),
        ("stop", all(s.stop), "must not hold an empty string, which would stop every answer at once"),
        ("logprobs", s.logprobs is None or s.logprobs >= 0, "must be None (off), or how many of the best tokens to report"),
        ("n", s.n >= 1, "must be at least 1"),
    )
    for name, sound, wish in rules:
        if not sound:
            yield f"{name}={getattr(s, name)!r} {wish}."
    biased = [token for token, _ in s.logit_bias]
    if len(set(biased)) < len(biased):
        yield "logit_bias names a token twice."
    if any(math.isnan(bias) or bias == math.inf for _, bias in s.logit_bias):
        yield "logit_bias values must be finite numbers, or -inf to ban a token."


class Sampler:
    """The state of one answer: which tokens it has seen, and where its random stream stands.

    `index` says which of the request's n samples this is; each has a stream of its own. Where the request names no seed, one is taken from
    the operating system; `seed` tells it, so that the answer can be had again. `drawn` counts the committed tokens.
    """

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int] | Tensor, vocab: int, index: int = 0) -> None:
        unknown = [token for token, _ in sampling.logit_bias if not 0 <= token < vocab]
        if unknown:
            raise LongspoolError(f"logit_bias names tokens {unknown}, but the model's vocabulary ends at {vocab - 1}.")
        self.sampling = sampling
        self.vocab = vocab
        self.index = index
        self.seed = int.from_bytes(os.urandom(8), "little") >> 1 if sampling.seed is None else int(sampling.seed)
        self.drawn = 0
        self._bias_ids = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self._seen: npt.NDArray[np.bool_] | None = None
        self._counts: npt.NDArray[np.int32] | None = None
        if sampling.repetition_penalty != 1:
            ids = np.asarray(prompt_ids, np.int64)
            self._seen = np.zeros(vocab, np.bool_)
            # A prompt may hold placeholders (soft embeddings, images) that the head can't produce.
            self._seen[ids[(ids >= 0) & (ids < vocab)]] = True
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = np.zeros(vocab, np.int32)

    @property
    def stream(self) -> int:
        """What names this sample's randomness in 63 bits: a fused head sampler is keyed by it, with `drawn` as its offset."""
        return self._word(0, _WORD - 1) >> 1

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution [V], fp32, that `pick` draws from; one-hot at temperature 0. Raises LongspoolError where it is NaN."""
        ids, weights = self._candidates(self._adjusted(_array(logits)))
        out = torch.zeros(self.vocab)
        out[torch.from_numpy(ids)] = torch.from_numpy(weights / weights.sum(dtype=np.float64)).float()
        return out

    def pick(self, logits: Tensor) -> Choice:
        """Draw the coming token from logits [V]; the same again until `commit`. Raises LongspoolError where the model produced NaN."""
        raw = _array(logits)
        ids, weights = self._candidates(self._adjusted(raw))
        token = int(ids[0] if len(ids) == 1 else ids[_race(weights, self._noise(ids))])
        if self.sampling.logprobs is None:
            return Choice(token)
        logprobs = torch.from_numpy(raw).log_softmax(0).numpy()
        return Choice(token, float(logprobs[token]), _best(logprobs, min(int(self.sampling.logprobs), self.vocab)))

    def commit(self, token: int) -> None:
        """The answer goes on with this token, drawn here or not."""
        self.drawn += 1
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1

    def fork(self) -> Sampler:
        """A copy that goes its own way: what is committed to one is not seen by the other."""
        twin = copy.copy(self)
        twin._seen = None if self._seen is None else self._seen.copy()
        twin._counts = None if self._counts is None else self._counts.copy()
        return twin

    def uniform(self, lane: int) -> float:
        """A number in [0, 1) for the coming token that is independent of `pick` and of every other lane (1, 2, ...)."""
        assert lane > 0, "lane 0 is pick's own"
        return (self._word(self.drawn, lane) >> 11) * 2.0**-53

    def _adjusted(self, logits: Floats) -> Floats:
        """Bias and penalties. [V]"""
        assert logits.shape == (self.vocab,)
        _peak(logits)
        s = self.sampling
        if not len(self._bias) and self._seen is None and self._counts is None:
            return logits
        out: Floats = logits.copy()
        out[self._bias_ids] += self._bias
        if self._seen is not None:
            ids = np.flatnonzero(self._seen)
            out[ids] = np.where(out[ids] < 0, out[ids] * s.repetition_penalty, out[ids] / s.repetition_penalty)
        if self._counts is not None:
            ids = np.flatnonzero(self._counts)
            out[ids] -= (s.presence_penalty + s.frequency_penalty * self._counts[ids]).astype(np.float32)
        return out

    def _candidates(self, logits: Floats) -> tuple[Ids, Floats]:
        """The tokens left, ascending, and their weights relative to the best one's, which is 1."""
        s = self.sampling
        best = _peak(logits, penalised=True)
        peak = logits[best]
        if s.temperature == 0:
            return np.array([best]), np.ones(1, np.float32)
        ids = None
        if 0 < s.top_k < self.vocab:
            ids = np.flatnonzero(logits >= np.partition(logits, -s.top_k)[-s.top_k])
            logits = logits[ids]
        # A temperature below this bound would overflow, and is greedy in all but name.
        with np.errstate(over="ignore"):
            weights: Floats = np.exp((logits - peak) / np.float32(max(s.temperature, 1e-30)))
        if s.top_p == 1 and s.min_p == 0:
            return np.arange(self.vocab) if ids is None else ids, weights
        keep = weights >= s.min_p
        if s.top_p < 1:
            keep &= _nucleus(weights, s.top_p)
        left = np.flatnonzero(keep)
        return left if ids is None else ids[left], weights[left]

    def _noise(self, ids: Ids) -> npt.NDArray[np.float64]:
        """Numbers in (0, 1) for these tokens in this draw: token v has output v of the SplitMix64 stream that the draw's word starts."""
        z = ids.astype(np.uint64)
        z *= _GAMMA
        z += np.uint64(self._word(self.drawn, 0))
        for shift, mix in ((30, _MIX1), (27, _MIX2)):
            z ^= z >> np.uint64(shift)
            z *= mix
        z ^= z >> np.uint64(31)
        noise: npt.NDArray[np.float64] = ((z >> np.uint64(12)) + 0.5) * 2.0**-52
        return noise

    def _word(self, draw: int, lane: int) -> int:
        """64 random bits, a function of (seed, index, draw, lane) alone."""
        key = np.array([self.seed % _WORD, self.index], np.uint64)
        return int(np.random.Philox(key=key, counter=np.array([0, draw, lane, 0], np.uint64)).random_raw())


def _array(logits: Tensor) -> Floats:
    return np.asarray(logits.detach().float().cpu())


def _peak(logits: Floats, penalised: bool = False) -> int:
    """Where the largest logit is, the lowest id of equal ones. numpy's argmax stops at a NaN, so this finds them at no cost."""
    best = int(logits.argmax())
    if math.isfinite(logits[best]):
        return best
    if penalised:
        raise LongspoolError("logit_bias and the penalties leave no token with a finite logit; ban fewer tokens or weaken them.")
    kind = "NaN" if math.isnan(logits[best]) else "infinite"
    raise LongspoolError(f"The model produced {kind} logits (at token {best}): its weights may be damaged, or a computation overflowed.")


def _nucleus(weights: Floats, top_p: float) -> npt.NDArray[np.bool_]:
    """The smallest set of largest weights that holds the share `top_p`; of equal weights at its edge the lowest ids are in it."""
    # Weights below this bound can't hold the share 1 - top_p even together; leaving them out spares most of the sort.
    total = weights.sum(dtype=np.float64)
    falling = -np.sort(-weights[weights >= (1 - top_p) * total / len(weights)])
    mass = torch.from_numpy(falling.astype(np.float64)).cumsum(0).numpy()
    count = min(int(np.searchsorted(mass, top_p * total)) + 1, len(falling))
    keep: npt.NDArray[np.bool_] = weights > falling[count - 1]
    edge = np.flatnonzero(weights == falling[count - 1])
    keep[edge[: count - np.count_nonzero(keep)]] = True
    return keep


def _race(weights: Floats, noise: npt.NDArray[np.float64]) -> int:
    """The index with the largest weight / time, where time = -log(1 - noise) is exponential: each wins with a chance like its weight."""
    best = int(weights.argmax())
    reach = -math.log1p(-noise[best]) / float(weights[best]) * (1 + 1e-9)
    # As time >= noise, whoever fails this test has lost to the heaviest; so few logarithms are taken. The margin is for rounding.
    close = np.flatnonzero(noise <= np.multiply(weights, reach, dtype=np.float64))
    return int(close[np.argmax(weights[close] / -np.log1p(-noise[close]))])


def _best(logprobs: Floats, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens, best first, lower ids before higher ones of equal chance."""
    if count == 0:
        return ()
    ids = np.flatnonzero(logprobs >= np.partition(logprobs, -count)[-count])
    order = ids[np.lexsort((ids, -logprobs[ids]))][:count]
    return tuple((int(token), float(logprobs[token])) for token in order)
