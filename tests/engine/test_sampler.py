"""Sampling against transformers' processors, OpenAI's formula and statistics."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from longspool.engine.sampler import Sampler, Sampling, _race
from longspool.errors import LongspoolError
from longspool.values.flow import Choice

V = 1000
PROMPT = [5, 17, 17, 400, 999]
ANSWER = [3, 17, 3, 3, 250]


def logits(seed: int = 0, vocab: int = V, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sampler(vocab: int = V, index: int = 0, prompt: list[int] = PROMPT, answer: list[int] = (), **wishes: object) -> Sampler:
    out = Sampler(Sampling(**wishes), prompt, vocab, index)
    for token in answer:
        out.commit(token)
    return out


def draws(one: Sampler, x: torch.Tensor, count: int) -> np.ndarray:
    out = []
    for _ in range(count):
        out.append(one.pick(x).token)
        one.commit(out[-1])
    return np.array(out)


def fits(tokens: np.ndarray, p: torch.Tensor, least: float = 8.0) -> float:
    """The p-value of a chi-square test; rare tokens share one cell."""
    expected = p.double().numpy() * len(tokens)
    seen = np.bincount(tokens, minlength=len(expected))
    assert seen[expected == 0].sum() == 0
    common = expected >= least
    cells = [(seen[common], expected[common])]
    if expected[~common].sum() >= least:
        cells.append((seen[~common].sum(keepdims=True), expected[~common].sum(keepdims=True)))
    observed, wanted = (np.concatenate(part) for part in zip(*cells, strict=True))
    assert len(wanted) >= 4
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


# ------------------------------------------------------------------------------------------------- the distribution

WARPERS = {
    "nothing": ({}, []),
    "cool": ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
    "hot": ({"temperature": 1.7}, [TemperatureLogitsWarper(1.7)]),
    "top_k": ({"top_k": 40}, [TopKLogitsWarper(40)]),
    "top_k of one": ({"top_k": 1}, [TopKLogitsWarper(1)]),
    "top_k beyond the vocabulary": ({"top_k": 5000}, [TopKLogitsWarper(5000)]),
    "top_p": ({"top_p": 0.9}, [TopPLogitsWarper(0.9)]),
    "small top_p": ({"top_p": 0.01}, [TopPLogitsWarper(0.01)]),
    "wide top_p": ({"top_p": 0.999}, [TopPLogitsWarper(0.999)]),
    "min_p": ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
    "full min_p": ({"min_p": 1.0}, [MinPLogitsWarper(1.0)]),
    "repetition": ({"repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(1.3)]),
    "repetition wanted": ({"repetition_penalty": 0.7}, [RepetitionPenaltyLogitsProcessor(0.7)]),
    "bias": (
        {"logit_bias": ((3, 4.0), (17, -2.5))},
        [transformers.SequenceBiasLogitsProcessor([[[3], 4.0], [[17], -2.5]])],
    ),
    "all": (
        {"logit_bias": ((400, 9.0),), "repetition_penalty": 1.4, "temperature": 1.6, "top_k": 60, "top_p": 0.8, "min_p": 0.05},
        [
            transformers.SequenceBiasLogitsProcessor([[[400], 9.0]]),
            RepetitionPenaltyLogitsProcessor(1.4),
            TemperatureLogitsWarper(1.6),
            TopKLogitsWarper(60),
            TopPLogitsWarper(0.8),
            MinPLogitsWarper(0.05),
        ],
    ),
}


@pytest.mark.parametrize("scale", [0.5, 3.0])
@pytest.mark.parametrize("name", WARPERS)
def test_probabilities_equal_those_of_transformers(name: str, scale: float) -> None:
    wishes, processors = WARPERS[name]
    x = logits(1, scale=scale)
    got = sampler(answer=ANSWER, **({"temperature": 1.0} | wishes)).probabilities(x)
    want = LogitsProcessorList(processors)(torch.tensor([PROMPT + ANSWER]), x[None].double())[0].softmax(0)
    assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-9)


def test_the_cases_above_tell_the_order_of_the_filters() -> None:
    """Guards the case "all": were two neighbouring steps swapped, it would notice."""
    _, processors = WARPERS["all"]
    ids, x = torch.tensor([PROMPT + ANSWER]), logits(1)[None].double()
    want = LogitsProcessorList(processors)(ids, x)[0].softmax(0)
    for i in (0, 3, 4):  # temperature commutes with its neighbours: it scales, and top-k only ranks
        swapped = [*processors[:i], processors[i + 1], processors[i], *processors[i + 2 :]]
        assert not torch.allclose(LogitsProcessorList(swapped)(ids, x)[0].softmax(0), want, atol=1e-6), i
    late = [p for p in processors if not isinstance(p, TemperatureLogitsWarper)] + [TemperatureLogitsWarper(1.6)]
    assert not torch.allclose(LogitsProcessorList(late)(ids, x)[0].softmax(0), want, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.floats(0.1, 5.0),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.01, 0.999) | st.just(1.0),
    min_p=st.floats(0.0, 0.5),
)
def test_any_filters_equal_those_of_transformers(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    x = logits(seed, vocab=50, scale=2.0)
    chain = [TemperatureLogitsWarper(temperature)]
    chain += [TopKLogitsWarper(top_k)] if top_k else []
    chain += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    want = LogitsProcessorList([*chain, MinPLogitsWarper(min_p)])(torch.tensor([[0]]), x[None].double())[0].softmax(0)
    got = sampler(50, prompt=[], temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p).probabilities(x).double()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-9)


def test_presence_and_frequency_penalties_follow_openai_and_leave_the_prompt_alone() -> None:
    x = logits(2).double()
    got = sampler(answer=ANSWER, temperature=1.0, presence_penalty=0.6, frequency_penalty=0.35).probabilities(x.float())
    for token in range(V):
        count = ANSWER.count(token)
        x[token] -= count * 0.35 + (count > 0) * 0.6
    torch.testing.assert_close(got.double(), x.softmax(0), rtol=2e-5, atol=1e-9)


def test_the_real_vocabulary_size() -> None:
    x = logits(3, 49152)
    got = sampler(49152, temperature=0.8, top_p=0.95, top_k=2000).probabilities(x)
    chain = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopKLogitsWarper(2000), TopPLogitsWarper(0.95)])
    want = chain(torch.tensor([[0]]), x[None].double())[0].softmax(0)
    assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-10)


def test_of_equal_logits_top_k_keeps_all_and_top_p_the_lowest_ids() -> None:
    level = torch.zeros(10)
    assert (sampler(10, prompt=[], temperature=1.0, top_k=3).probabilities(level) > 0).all()  # as transformers does
    half = sampler(10, prompt=[], temperature=1.0, top_p=0.45).probabilities(level)
    assert half.tolist() == pytest.approx([0.2] * 5 + [0.0] * 5)


@pytest.mark.parametrize("wishes", [{}, {"top_p": 0.3, "top_k": 2, "min_p": 0.5}])
def test_temperature_zero_is_one_hot_at_the_lowest_best_id(wishes: dict[str, float]) -> None:
    x = torch.tensor([1.0, 7.0, -2.0, 7.0])
    one = sampler(4, prompt=[], **wishes)
    assert one.probabilities(x).tolist() == [0, 1, 0, 0]
    assert [one.pick(x).token for _ in range(3)] == [1, 1, 1]


def test_greedy_feels_bias_and_penalties() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert sampler(4, prompt=[], logit_bias=((0, 3.5),)).pick(x).token == 0
    assert sampler(4, prompt=[], logit_bias=((3, -math.inf),)).pick(x).token == 2
    assert sampler(4, prompt=[3], repetition_penalty=2.0).pick(x).token == 2
    assert sampler(4, prompt=[3], presence_penalty=2.0).pick(x).token == 3
    assert sampler(4, prompt=[], answer=[3, 3], frequency_penalty=0.6).pick(x).token == 2


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 5e-324])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    x = logits(4)
    p = sampler(temperature=temperature).probabilities(x)
    assert p[x.argmax()] == 1 and p.sum() == 1


def test_a_huge_temperature_is_nearly_uniform() -> None:
    p = sampler(temperature=1e30).probabilities(logits(4))
    torch.testing.assert_close(p, torch.full((V,), 1 / V), rtol=1e-5, atol=0)


def test_half_precision_logits_and_prompt_placeholders_are_understood() -> None:
    x = logits(5).bfloat16()
    one = sampler(prompt=[-1, V, 2 * V, 7], temperature=1.0, repetition_penalty=1.5)
    want = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([[7]]), x[None].double())[0].softmax(0)
    torch.testing.assert_close(one.probabilities(x).double(), want, rtol=2e-5, atol=1e-9)
    given_tensor = Sampler(one.sampling, torch.tensor([7]), V)
    assert torch.equal(given_tensor.probabilities(x), one.probabilities(x))


# ------------------------------------------------------------------------------------------------- the draw


@pytest.mark.parametrize("wishes", [{}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.1, "top_k": 30}], ids=str)
def test_frequencies_follow_the_probabilities(wishes: dict[str, float]) -> None:
    x = logits(6, 60, scale=1.5)
    one = sampler(60, prompt=[], temperature=0.9, seed=11, **wishes)
    assert fits(draws(one, x, 8_000), one.probabilities(x)) > 1e-3


def test_frequencies_would_betray_a_wrong_distribution() -> None:
    """The test above can fail: the same draws do not fit a slightly warmer distribution."""
    x = logits(6, 60, scale=1.5)
    tokens = draws(sampler(60, prompt=[], temperature=0.9, seed=11), x, 8_000)
    assert fits(tokens, sampler(60, prompt=[], temperature=1.0).probabilities(x)) < 1e-6


def test_frequencies_over_the_real_vocabulary() -> None:
    x = logits(7, 49152, scale=1.0)
    one = sampler(49152, prompt=[], temperature=1.0, seed=5)
    p = one.probabilities(x)
    order = torch.argsort(p, descending=True)
    cell = torch.empty(49152, dtype=torch.long)
    cell[order] = torch.arange(49152) * 24 // 49152
    mass = torch.zeros(24, dtype=torch.double).index_add(0, cell, p.double())
    assert fits(cell[torch.from_numpy(draws(one, x, 2500))].numpy(), mass) > 1e-3


def test_neither_samples_nor_neighbours_in_one_sample_are_related() -> None:
    x = torch.linspace(0, 1, 6)
    first, second = (draws(sampler(6, index=index, prompt=[], temperature=1.0, seed=3), x, 8000) for index in (0, 1))
    for a, b in ((first, second), (first[:-1], first[1:])):
        table = np.zeros((6, 6))
        np.add.at(table, (a, b), 1)
        assert stats.chi2_contingency(table).pvalue > 1e-3


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 300), st.floats(0, 40))
def test_the_race_is_won_by_the_largest_weight_over_time(seed: int, n: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    weights = np.exp(-spread * rng.random(n)).astype(np.float32)
    weights[rng.integers(n)] = 1
    noise = rng.random(n) ** rng.integers(1, 60)
    noise = np.clip(noise, 2.0**-53, 1 - 2.0**-53)
    assert _race(weights, noise) == int(np.argmax(weights / -np.log1p(-noise)))


def test_noise_is_splitmix64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published outputs of SplitMix64 for the seed 1234567."""
    monkeypatch.setattr(Sampler, "_word", lambda self, draw, lane: 1234567)
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    noise = sampler(temperature=1.0)._noise(np.arange(1, 6))
    assert noise.tolist() == [(word // 2**12 + 0.5) / 2**52 for word in outputs]


def test_draws_stay_the_same_across_versions() -> None:
    """A seed that someone wrote down keeps its meaning."""
    x = torch.linspace(-1, 1, 100)
    assert draws(sampler(100, prompt=[], temperature=1.0, seed=42), x, 8).tolist() == [82, 53, 92, 99, 42, 58, 52, 86]
    assert draws(sampler(100, index=1, prompt=[], temperature=1.0, seed=42), x, 8).tolist() == [70, 99, 64, 23, 90, 56, 30, 29]


def test_a_draw_depends_on_seed_index_and_place_alone() -> None:
    x = logits(8, scale=1.0)
    alone = draws(sampler(temperature=1.0, seed=7), x, 20)
    mine, other = sampler(temperature=1.0, seed=7), sampler(temperature=0.5, seed=8, top_k=9)
    for i in range(20):
        torch.manual_seed(i)
        np.random.seed(i)
        other.commit(other.pick(x).token)
        assert mine.pick(x) == mine.pick(x)
        mine.probabilities(x)
        mine.uniform(1)
        assert mine.pick(x).token == alone[i]
        mine.commit(int(alone[i]))
    assert len(set(alone)) > 10
    skipped = sampler(answer=[1] * 13, temperature=1.0, seed=7)  # thirteen tokens came from elsewhere
    assert skipped.pick(x).token == alone[13]


def test_seeds_and_indices_have_streams_of_their_own() -> None:
    x = logits(9, scale=1.0)
    keys = [(0, 0), (1, 0), (0, 1), (2**63, 0), (-1, 0), (2**64 - 2, 0)]
    answers = {tuple(draws(sampler(index=index, temperature=1.0, seed=seed), x, 12)) for seed, index in keys}
    streams = {sampler(index=index, seed=seed).stream for seed, index in keys}
    assert len(answers) == len(streams) == len(keys)
    assert all(0 <= stream < 2**63 for stream in streams)


def test_without_a_seed_each_sampler_takes_one_that_it_tells() -> None:
    x = logits(10, scale=1.0)
    one, other = sampler(temperature=1.0), sampler(temperature=1.0)
    assert one.seed != other.seed and 0 <= one.seed < 2**63
    answer = draws(one, x, 12)
    assert (answer == draws(sampler(temperature=1.0, seed=one.seed), x, 12)).all()
    assert (answer != draws(other, x, 12)).any()


def test_a_fork_goes_its_own_way() -> None:
    x = logits(11, scale=1.0)
    one = sampler(answer=ANSWER, temperature=1.0, seed=1, repetition_penalty=1.2, frequency_penalty=0.5)
    before = one.probabilities(x)
    twin = one.fork()
    assert twin.pick(x) == one.pick(x)
    draws(twin, x, 5)
    assert torch.equal(one.probabilities(x), before) and one.drawn == len(ANSWER)
    assert twin.drawn == len(ANSWER) + 5 and not torch.equal(twin.probabilities(x), before)
    same = one.fork()
    assert draws(same, x, 5).tolist() == draws(one, x, 5).tolist()


def test_a_draft_through_a_fork_is_mostly_what_the_target_draws() -> None:
    """Speculation relies on it: agreement is at least (1 - d) / (1 + d), d the distance of the two distributions."""
    target = sampler(temperature=1.0, seed=12)
    x = logits(12, scale=2.0)
    y = x + logits(13, scale=0.3)
    p, q = target.probabilities(x).double(), target.probabilities(y).double()
    distance = float((p - q).abs().sum() / 2)
    agree = 0
    for _ in range(2000):
        token = target.pick(x).token
        agree += target.fork().pick(y).token == token
        target.commit(token)
    floor = (1 - distance) / (1 + distance)
    assert 0.05 < distance < 0.3
    assert agree / 2000 > floor - 4 * math.sqrt(floor * (1 - floor) / 2000)


def test_lanes_are_uniform_and_apart_from_the_draw() -> None:
    one, x = sampler(2, prompt=[], temperature=1.0, seed=4), torch.zeros(2)
    rows = []
    for _ in range(3000):
        rows.append((one.pick(x).token, one.uniform(1), one.uniform(2)))
        one.commit(0)
    token, first, second = map(np.array, zip(*rows, strict=True))
    assert stats.kstest(first, "uniform").pvalue > 1e-3
    assert stats.ks_2samp(first[token == 0], first[token == 1]).pvalue > 1e-3
    assert abs(stats.pearsonr(first, second).statistic) < 4 / math.sqrt(3000)


# ------------------------------------------------------------------------------------------------- what is reported


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_logprobs_are_those_of_the_model(temperature: float) -> None:
    x = logits(14)
    wishes = {"temperature": temperature, "repetition_penalty": 1.5, "top_k": 5, "logit_bias": ((17, 30.0),), "seed": 1}
    choice = sampler(answer=ANSWER, logprobs=4, **wishes).pick(x)
    want = x.double().log_softmax(0)
    assert choice.token == 17 and choice.logprob == pytest.approx(float(want[17]), abs=1e-5)
    best = want.topk(4)
    assert [token for token, _ in choice.top] == best.indices.tolist()
    assert [logprob for _, logprob in choice.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_cost_nothing_unless_asked_for() -> None:
    x = torch.tensor([1.0, 2.0, 2.0, 0.0])
    assert sampler(4, prompt=[]).pick(x) == Choice(1)
    none = sampler(4, prompt=[], logprobs=0).pick(x)
    assert none.top == () and none.logprob == pytest.approx(float(x.double().log_softmax(0)[1]), abs=1e-6)
    every = sampler(4, prompt=[], logprobs=99).pick(x)
    assert [token for token, _ in every.top] == [1, 2, 0, 3]


def test_plain_tells_when_only_the_temperature_matters() -> None:
    assert Sampling().plain and Sampling(temperature=0.7, seed=1, stop=("x",), n=3).plain
    assert Sampling(top_k=5, top_p=0.5, min_p=0.1).plain  # greedy: nothing to cut
    for wish in ({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}):
        assert not Sampling(temperature=1.0, **wish).plain and Sampling(temperature=1.0, **wish).filtered
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": -0.1, "logit_bias": ((1, 1.0),), "logprobs": 0}
    for name, value in penalties.items():
        assert not Sampling(**{name: value}).plain, name


# ------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("where", [0, 500, V - 1])
@pytest.mark.parametrize("wishes", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.1}], ids=str)
def test_nan_logits_are_the_models_fault_and_said_so(where: int, wishes: dict[str, float]) -> None:
    x = logits(15)
    x[where] = math.nan
    one = sampler(**wishes)
    for call in (one.pick, one.probabilities):
        with pytest.raises(LongspoolError, match=f"The model produced NaN logits \\(at token {where}\\)"):
            call(x)


def test_infinite_logits_and_bans_of_everything_are_refused() -> None:
    x = torch.zeros(3)
    with pytest.raises(LongspoolError, match="The model produced infinite logits"):
        sampler(3, prompt=[]).pick(torch.tensor([0.0, math.inf, 0.0]))
    with pytest.raises(LongspoolError, match="leave no token with a finite logit"):
        sampler(3, prompt=[], logit_bias=tuple((token, -math.inf) for token in range(3))).pick(x)
    masked = torch.tensor([-math.inf, 0.0, 0.0])
    assert sampler(3, prompt=[], temperature=1.0).probabilities(masked).tolist() == [0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be 0 (greedy) or a positive number."),
        ({"temperature": math.nan}, "temperature=nan must be"),
        ({"temperature": math.inf}, "temperature=inf must be"),
        ({"temperature": "hot"}, "temperature='hot' must be a number."),
        ({"top_k": -1}, "top_k=-1 must be 0 (off) or a positive number."),
        ({"top_k": 2.5}, "top_k=2.5 must be a whole number."),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1 (off)."),
        ({"top_p": 1.01}, "top_p=1.01 must be"),
        ({"top_p": None}, "top_p=None must be a number."),
        ({"min_p": -0.1}, "min_p=-0.1 must be between 0 (off) and 1."),
        ({"min_p": 1.1}, "min_p=1.1 must be"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be a positive number (1 is off)."),
        ({"presence_penalty": math.nan}, "presence_penalty=nan must be a finite number (0 is off)."),
        ({"frequency_penalty": math.inf}, "frequency_penalty=inf must be a finite number (0 is off)."),
        ({"seed": 2**64}, "seed=18446744073709551616 must fit into 64 bits."),
        ({"seed": "x"}, "seed='x' must be a whole number or None."),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1."),
        ({"n": 0}, "n=0 must be at least 1."),
        ({"logprobs": -1}, "logprobs=-1 must be None (off), or how many of the best tokens to report."),
        ({"stop": "END"}, "stop='END' must be a tuple, for example ('###',)."),
        ({"stop": ("a", "")}, "stop=('a', '') must not hold an empty string"),
        ({"stop": (2,)}, "stop=(2,) must hold strings only; token ids go into stop_tokens."),
        ({"stop_tokens": [2]}, "stop_tokens=[2] must be a tuple"),
        ({"logit_bias": {7: 1.0}}, "logit_bias={7: 1.0} must be a tuple"),
        ({"logit_bias": ((7, 1.0), (7, 2.0))}, "logit_bias names a token twice."),
        ({"logit_bias": ((7, math.nan),)}, "logit_bias values must be finite numbers, or -inf to ban a token."),
    ],
    ids=lambda value: str(value)[:30],
)
def test_senseless_wishes_are_refused_with_a_sentence(wish: dict[str, object], sentence: str) -> None:
    with pytest.raises(LongspoolError) as caught:
        Sampling(**wish)
    assert sentence in str(caught.value)


def test_all_complaints_come_at_once() -> None:
    with pytest.raises(LongspoolError, match=r"temperature=-1 .* top_p=2 .* n=0 "):
        Sampling(temperature=-1, top_p=2, n=0)


def test_bias_for_unknown_tokens_is_refused_once_the_vocabulary_is_known() -> None:
    wishes = Sampling(logit_bias=((3, 1.0), (1000, 1.0), (-2, 1.0)))
    with pytest.raises(LongspoolError, match=r"names tokens \[1000, -2\], but the model's vocabulary ends at 999"):
        Sampler(wishes, [], V)


def test_wishes_are_values() -> None:
    wishes = Sampling(temperature=0.5, stop=("a",), logit_bias=((1, 2.0),))
    assert hash(wishes) == hash(dataclasses.replace(wishes)) and wishes != dataclasses.replace(wishes, seed=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        wishes.temperature = 1.0
    assert all(a != b for a, b in itertools.combinations([Sampling(), wishes, Sampling(n=2)], 2))
