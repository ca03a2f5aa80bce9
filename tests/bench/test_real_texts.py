"""The texts that are measured on: exact lengths, apart from each other, and a needle that is really there."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from longspool import LLM
from longspool.bench.texts import CUE, english, needles, prose, repeats
from longspool.errors import LongspoolError


@pytest.fixture(scope="module")
def llm(tiny_dir: Path) -> LLM:
    return LLM(str(tiny_dir))


def test_prose_has_its_lengths_and_no_token_twice(llm: LLM) -> None:
    whole = llm.tokenizer.encode(english())
    texts = prose(llm.tokenizer, 5, 300, 20, seed=1)
    assert all((len(t.ids), t.prompt, t.scored) == (320, 300, 300) for t in texts)
    starts = sorted(next(i for i in range(len(whole)) if tuple(whole[i : i + 320]) == t.ids) for t in texts)
    assert all(b - a >= 320 for a, b in itertools.pairwise(starts))
    assert texts == prose(llm.tokenizer, 5, 300, 20, seed=1) != prose(llm.tokenizer, 5, 300, 20, seed=2)


def test_more_prose_than_there_is(llm: LLM) -> None:
    with pytest.raises(LongspoolError, match=r"holds \d texts of 100,010 tokens, not 8"):
        prose(llm.tokenizer, 8, 100_000, 10, seed=0)


def test_a_passage_comes_again(llm: LLM) -> None:
    texts = repeats(llm.tokenizer, 4, 600, 20, seed=1)
    for number, text in enumerate(texts):
        assert (len(text.ids), text.prompt, text.scored) == (620, 600, 600)
        passage, before = text.ids[600 - CUE :], text.ids[: 600 - CUE]
        room = 600 - 2 * CUE - 20
        starts = [i for i in range(len(before)) if before[i : i + len(passage)] == passage]
        dots = [i for i in starts if llm.tokenizer.decode([before[i - 1]]) == "."]
        assert dots or round(room * (number + 0.5) / 4) in starts
        assert min(abs(i / room - (number + 0.5) / 4) for i in starts) < 0.4
    with pytest.raises(LongspoolError, match="take 149 tokens; 100 are too few"):
        repeats(llm.tokenizer, 1, 100, 21, seed=0)


@pytest.mark.parametrize("aware", [True, False])
def test_a_needle_is_hidden_asked_for_and_answered(llm: LLM, aware: bool) -> None:
    texts = needles(llm.tokenizer, 6, 900, seed=3, aware=aware)
    for number, text in enumerate(texts):
        words = llm.tokenizer.decode(text.ids)
        answer = llm.tokenizer.decode(text.ids[text.scored :]).strip()
        context, rest = (llm.tokenizer.decode(part) for part in (text.ids[: text.prompt], text.ids[text.prompt : text.scored]))
        key = words.split("What is the special magic number for ")[1].split(" mentioned")[0]
        assert answer.isdigit() and len(answer) == 7
        assert len(llm.tokenizer.encode(f" {answer}")) == len(text.ids) - 900  # what comes before the digits is fed, not asked for
        assert words.count(f"One of the special magic numbers for {key} is: {answer}.") == 1
        assert ("What is the special" in context) == aware == (rest.strip() == "")
        place = words.index("One of the special magic numbers") / words.index("What is the special")
        assert abs(place - (number + 0.5) / 6) < 0.45  # at the sentence's end that is nearest to its depth
    assert len({llm.tokenizer.decode(t.ids[t.scored :]) for t in texts}) == 6


def test_a_needle_needs_room(llm: LLM) -> None:
    with pytest.raises(LongspoolError, match=r"take \d+ tokens; 100 are too few"):
        needles(llm.tokenizer, 1, 100, seed=0, aware=True)
