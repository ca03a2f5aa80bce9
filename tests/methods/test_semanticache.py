"""SemantiCache's chunks and clusters against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspool.errors import LongspoolError
from longspool.llm import LLM
from longspool.memory import Pools
from longspool.methods.evict.semanticache import SemantiCache, clusters, cut
from longspool.plan import resolve
from longspool.recipe import parse
from toolbox import Job, Rig, loaded, masked_logits, words
from toolbox import causal as seen_by_all

TEXT = "The cat sat, and the dog lay; nobody spoke. Then a very long sentence came along that had no mark in it for quite a while! Yes. No?"


def chunks_of(delimits: list[bool], size: int) -> tuple[list[list[int]], int]:
    """Chunks token by token, and how many tokens are done with."""
    out: list[list[int]] = []
    begun: list[int] = []
    done = 0
    for place, mark in enumerate(delimits):
        if not mark:
            begun.append(place)
        if mark or len(begun) == size:
            out += [begun] if begun else []
            begun, done = [], place + 1
    return out, done


@settings(max_examples=300, deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.integers(2, 6))
def test_cuts_at_marks_and_at_the_longest(delimits: list[bool], size: int) -> None:
    got, done = cut(torch.tensor(delimits, dtype=torch.bool), size)
    expected, end = chunks_of(delimits, size)
    assert [[p for p in row if p >= 0] for row in got.tolist()] == expected and done == end


def greedy(k: Tensor, theta: float) -> list[int]:
    """Each token's seed in one chunk [C, D], from left to right."""
    unit = k.double() / k.double().norm(dim=-1, keepdim=True)
    seed = [-1] * len(k)
    for i in range(len(k)):
        if seed[i] < 0:
            for j in range(i, len(k)):
                if seed[j] < 0 and (i == j or float(unit[i] @ unit[j]) > theta):
                    seed[j] = i
    return seed


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.sampled_from([0.0, 0.4, 0.8]))
def test_seeds_take_what_is_like_them(seed: int, sizes: list[int], theta: float) -> None:
    k = torch.randn(len(sizes), 12, 4, generator=torch.Generator().manual_seed(seed))
    there = torch.arange(12) < torch.tensor(sizes)[:, None]
    got = clusters(k, there, theta)
    for row, keys, size in zip(got.tolist(), k, sizes, strict=True):
        assert row[:size] == greedy(keys[:size], theta)


def reference(pos: list[int], text: str, k: Tensor, theta: float, size: int, sinks: int) -> dict[int, list[int]]:
    """The members of each entry, by the position of its seed, of one row's old tokens."""
    out = {p: [p] for p in pos}
    fresh = [p for p in pos if p >= sinks]
    chunks, _ = chunks_of([text[p] in ".,?!;:" for p in fresh], size)
    for chunk in chunks:
        at = [fresh[i] for i in chunk]
        for place, seed in enumerate(greedy(k[at], theta)):
            if seed != place:
                out[at[seed]] += out.pop(at[place])
    return out


@pytest.mark.parametrize("counted", [True, False])
def test_what_a_prompt_leaves_and_what_is_seen_of_it(counted: bool) -> None:
    """The first layer, whose keys are those of the dense model: positions, sizes, means; and the next token's attention over them."""
    rig, theta, size = Rig(), 0.3, 10
    text = (TEXT * 2)[:206]
    ids = [ord(c) for c in text]
    n, old = 200, 128
    plan = rig.plan(f"semanticache(theta={theta}, chunk={size}, window=16, counted={counted})")
    _, (trace, *_) = masked_logits(rig.model, ids[:n], lambda layer, trace: seen_by_all(n))
    for chunk in (n, 64):
        memory = rig.run(Job(plan, ids[:n], n, chunk))[1]
        merged = 0
        for r, (pos, weight, (k, v)) in enumerate(
            zip(memory[0].settled_field("pos"), memory[0].settled_field("weight"), memory[0].read_settled(), strict=True)
        ):
            entries = reference(list(range(old)), text, trace.k[:, r], theta, size, 4)
            assert pos.tolist() == sorted(entries)
            for place, p in enumerate(pos.tolist()):
                members = entries[p]
                merged += len(members) - 1
                torch.testing.assert_close(k[place].double(), trace.k[members, r].mean(0), atol=1e-4, rtol=0)
                torch.testing.assert_close(v[place].double(), trace.v[members, r].mean(0), atol=1e-4, rtol=0)
                assert float(weight[place]) == pytest.approx(math.log(len(members)) if counted else 0.0, abs=1e-5)
        assert merged > 20, "otherwise it does nothing"
        marks = [p for p in range(4, old) if text[p] in ".,?!;:"]
        assert set(marks) <= set(memory[0].settled_field("pos")[0].tolist()), "delimiters stay"


class Sight:
    """A view of one layer's candidates."""

    layer = 0

    def __init__(self, text: str, heads: int) -> None:
        self.text, self.logweight, self.notes = text, torch.zeros(heads, len(text)), {}

    def note(self, method: object) -> dict[str, object]:
        return self.notes

    def pieces(self, pos: Tensor) -> list[str]:
        return [self.text[p] for p in pos.tolist()]


def test_equal_members_count_as_many() -> None:
    """Where the members of each cluster are equal, attention over the entries is that over all tokens."""
    text = "abcab, cabbage. bcacbb; "
    kinds = torch.tensor(["abcge,. ;".index(c) for c in text])
    k, v, q = torch.randn(2, 9, 8)[:, kinds], torch.randn(2, 9, 8)[:, kinds], torch.randn(2, 8)
    pos = torch.arange(len(text)).expand(2, -1)
    kept = SemantiCache(theta=0.9999, sinks=0).keep(k, v, pos, Sight(text, 2))  # type: ignore[arg-type]
    assert kept.k is not None and kept.v is not None and kept.weight is not None
    for r in (0, 1):
        assert len(kept.index[r]) < len(text) - 6
        weights = (kept.k[r] @ q[r] + kept.weight[r]).softmax(0)
        torch.testing.assert_close(weights @ kept.v[r], (k[r] @ q[r]).softmax(0) @ v[r], atol=1e-5, rtol=1e-5)


def test_an_answer_is_merged_once_and_goes_on_after_a_fork() -> None:
    rig = Rig()
    plan = rig.plan("semanticache(theta=0.2, chunk=16, window=16)")
    ids = [ord(c) for c in (TEXT * 4)[:420]]
    logits, memory = rig.run(Job(plan, ids, 200, 64))
    twin = rig.read(plan, ids[:200], 64).fork()
    torch.testing.assert_close(rig.drip(twin, ids[200:]), logits[200:], atol=1e-4, rtol=0)
    for weight in memory[0].settled_field("weight"):
        assert float(weight.exp().sum()) == pytest.approx(memory[0].gone, abs=1e-2), "every token counts once"
    assert memory.actions["semanticache"]["evicted"] > rig.read(plan, ids[:200], 64).actions["semanticache"]["evicted"]


def test_knows_the_text_through_the_tokenizer_only() -> None:
    llm = LLM(loaded(), "semanticache(theta=0.2, window=16)", kv="f32")
    result = llm.generate((TEXT * 2)[:200], max_tokens=4)[0]
    assert result.report.actions["semanticache"]["evicted"] > 0
    rig = Rig()
    rig.pools.spell = Pools(rig.model.shape, 1 << 20).spell
    with pytest.raises(LongspoolError, match="no tokenizer"):
        rig.read(resolve(parse("semanticache(window=16)"), rig.model.shape), words(200))
