"""What every method must do, for each one that the registry finds.

A method sits on a tiny random model with its parameters made small by their names (see toolbox.SMALL), so a new file under methods/ is
tested here without being listed. The dense reference shares no code with the memory or the engine.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from headmean import HeadMean
from layermean import LayerMean
from longspool.engine.estimate import need
from longspool.engine.request import Request
from longspool.errors import PlanError
from longspool.memory import Pool
from longspool.memory.file import load, save
from longspool.memory.positions import Positions
from longspool.method import LOSSLESS, Method, registry
from longspool.plan import Item, resolve
from longspool.recipe import parse
from longspool.roles import SEATS, Admit, Decode, Encode, Evict, Head, Ingest, Place, Prompt, Prune, Skip, Stop, Weights
from model.reference import dense_logits
from toolbox import KINDS, Job, Rig, example, idle, small, tokens, words

TOYS = {"headmean": HeadMean, "layermean": LayerMean}
"""Methods of a kind that no shipped one is of yet."""
KNOWN = registry() | TOYS
NAMES = sorted(KNOWN)
JOINT = [name for name in NAMES if issubclass(KNOWN[name], Encode) and KNOWN[name].across is not Encode.across]
"""Codecs that store several layers together."""
METHODS = pytest.mark.parametrize("name", NAMES)
BOUND = 1e-4
PROMPT, ANSWER = 200, 6
IDS = words(PROMPT + ANSWER, seed=1)


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    """The toys are found like any other method while these tests run."""
    registry().update(TOYS)
    yield
    for name in TOYS:
        del registry()[name]


@functools.cache
def dense(kind: str = "llama") -> Tensor:
    return dense_logits(Rig(kind).model, torch.tensor(IDS))


def exact(method: Method) -> bool:
    """Whether the method at its identity must give the dense logits."""
    return not isinstance(method.identity, float)


def close(a: Tensor, b: Tensor, bound: float = BOUND) -> None:
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= bound


def check_greedy(rig: Rig, request: Request) -> None:
    """The answer's tokens are the dense model's best ones, and its log-probabilities the dense ones."""
    answer = tokens(request)
    logits = dense_logits(rig.model, torch.tensor(request.prompt[: request.asked] + answer[:-1]))[request.asked - 1 :]
    best = logits.topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > BOUND, "the test's text has a tie; take another seed"
    assert answer == logits.argmax(-1).tolist()
    logprobs = [c.logprob for c in request.choices if c.logprob is not None]
    if logprobs:
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        close(torch.tensor(logprobs), expected)


@METHODS
def test_says_what_it_is(name: str) -> None:
    cls = registry()[name]
    assert cls.paper.title and cls.paper.link
    doc = inspect.getdoc(sys.modules[cls.__module__]) or ""
    assert len(doc.split()) >= 25, "the file's docstring tells the idea"
    assert isinstance(cls.identity, dict | str | float)
    assert any(issubclass(cls, seat) for seat in SEATS)


@METHODS
def test_round_trip_through_its_text(name: str) -> None:
    for method in (example(name), small(example(name)), idle(name)):
        assert parse(str(method)) == (Item(method),)
        assert parse(str(Item(method, 1, 2))) == (Item(method, 1, 2),)
        assert hash(parse(str(method))) == hash((Item(method),))


@METHODS
@pytest.mark.parametrize("kind", KINDS)
def test_changes_nothing_at_its_identity(name: str, kind: str) -> None:
    rig, method = Rig(kind), idle(name)
    try:
        plan = rig.plan(method)
    except PlanError as error:
        assert all(rig.model.shape.windows) and "sliding window" in str(error)
        return
    logits, memory = rig.run(Job(plan, IDS, PROMPT))
    reference = dense(kind)
    assert float(reference.std(0).mean()) > 0.1, "the reference is varied"
    if exact(method):
        close(logits, reference)
    else:
        error = float((logits - reference).norm() / reference.norm())
        assert isinstance(method.identity, float)
        assert 0 < error <= method.identity
    memory.check()


@METHODS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stores_short_floats(name: str, dtype: torch.dtype) -> None:
    """At its identity, over 2-byte storage, a method differs from fp32 as rounding does: at most 8 units in the last place."""
    rig = Rig()
    logits, memory = rig.run(Job(rig.plan(idle(name), dtype), IDS, PROMPT))
    error = float((logits - dense()).norm() / dense().norm())
    tolerance = registry()[name].identity if not exact(example(name)) else 0.0
    assert isinstance(tolerance, float)
    assert 0 < error <= tolerance + 8 * torch.finfo(dtype).eps
    assert memory[0].recent.pool["k"].dtype == dtype


@METHODS
def test_answers_as_dense_at_its_identity(name: str) -> None:
    method = idle(name)
    if not exact(method):
        return
    rig = Rig()
    for wishes in ({}, {"logprobs": 0}):
        check_greedy(rig, rig.answer(rig.plan(method), IDS[:PROMPT], max_tokens=12, **wishes))


@METHODS
def test_leaves_short_prompts_alone(name: str) -> None:
    """Fifteen tokens and the method as it comes."""
    rig, method = Rig(), example(name)
    logits, _ = rig.run(Job(rig.plan(method), IDS[:19], 15))
    close(logits, dense()[:19])
    check_greedy(rig, rig.answer(rig.plan(method), IDS[:15], max_tokens=4))


@METHODS
def test_says_the_same_twice(name: str) -> None:
    runs = [Rig().run(Job(rig.plan(small(example(name))), IDS, PROMPT))[0] for rig in (Rig(), Rig())]
    assert torch.equal(*runs)
    assert float(runs[0].std(0).mean()) > 0.1


@METHODS
def test_counts_what_it_did(name: str) -> None:
    method = small(example(name))
    if isinstance(method, Prompt | Weights):
        return  # what acts before a request is counted by LLM; see test_llm.py
    rig = Rig()
    request = rig.answer(rig.plan(method), IDS[:PROMPT], max_tokens=8)
    assert request.error is None
    counted = request.actions.get(name, {})
    assert counted and all(amount >= 0 for amount in counted.values()) and sum(counted.values()) > 0


@METHODS
def test_a_batch_of_two_is_two_alone(name: str) -> None:
    """Prompts of different lengths under the method, twice, and beside them a dense one and one under another method."""
    rig, plan = Rig(), None
    plan = rig.plan(small(example(name)))
    other = rig.plan(small(example(NAMES[NAMES.index(name) - 1])))
    jobs = [Job(plan, IDS, PROMPT, 70), Job(plan, words(130, 2), 120, 90), Job(rig.plan(), words(150, 3), 140), Job(other, IDS, PROMPT, 90)]
    for job, (logits, memory) in zip(jobs, rig.together(jobs), strict=True):
        alone, own = Rig().run(job)
        close(logits, alone)
        for layer in range(3):
            assert all(map(torch.equal, memory.positions(layer), own.positions(layer)))
        assert memory.actions == own.actions


@METHODS
def test_a_prompt_in_chunks_is_the_whole_prompt(name: str) -> None:
    rig, method = Rig(), idle(name)
    if exact(method):
        whole, parts = (rig.run(Job(rig.plan(method), IDS, PROMPT, chunk))[0] for chunk in (PROMPT, 64))
        close(parts, whole)
    plan = rig.plan(small(example(name)))
    whole, parts = (rig.read(plan, IDS[:PROMPT], chunk) for chunk in (PROMPT, 64))
    for layer in range(3):
        held = [p.tolist() for p in whole.positions(layer)]
        assert [p.tolist() for p in parts.positions(layer)] == held
        assert all(p[-1] == PROMPT - 1 for p in held)


@METHODS
def test_forks_go_their_own_ways(name: str) -> None:
    rig = Rig()
    plan = rig.plan(small(example(name)))
    left = rig.read(plan, IDS[:PROMPT], 64)
    right = left.fork()
    ways = words(20, 4), words(20, 5)
    got: list[list[Tensor]] = [[], []]
    for pair in zip(*ways, strict=True):
        for i, (memory, token) in enumerate(zip((left, right), pair, strict=True)):
            got[i].append(rig.feed(memory, [token]))
    for way, logits in zip(ways, got, strict=True):
        close(torch.cat(logits), Rig().run(Job(plan, IDS[:PROMPT] + way, PROMPT, 64))[0][PROMPT:])
    left.check()
    right.check()


@METHODS
def test_what_is_taken_back_never_was(name: str) -> None:
    rig = Rig()
    plan = rig.plan(small(example(name)))
    memory, never = rig.read(plan, IDS[:PROMPT]), rig.read(plan, IDS[:PROMPT])
    rig.feed(memory, words(4, 6), "verify")
    memory.truncate(PROMPT)
    assert memory.seen == PROMPT
    assert all(map(torch.equal, memory.positions(1), never.positions(1)))
    close(rig.drip(memory, IDS[PROMPT:]), rig.drip(never, IDS[PROMPT:]))
    memory.check()


@METHODS
def test_books_the_bytes_that_it_holds(name: str) -> None:
    rig = Rig()
    memory = rig.read(rig.plan(small(example(name)), torch.float16), IDS[:PROMPT], 64)
    rig.drip(memory, IDS[PROMPT:])
    held = {"device": 0, "host": 0, "disk": 0}
    # What several layers share is one zone, and there once.
    for zone in {id(z): z for layer in memory.layers for z in layer.zones}.values():
        pages = {int(p) for row, n in zip(zone.table, zone.length, strict=True) for p in row[: -(-int(n) // zone.pool.page)]}
        assert -1 not in pages
        for field, stored in zone.pool.get(torch.tensor(sorted(pages))).items():
            if field not in zone.pool.away or zone.pool.disk is None:
                held[zone.pool.tier if field in zone.pool.away else "device"] += stored.nbytes
        if zone.pool.disk is not None:  # records have checksums, and repeat what all tokens of a page share
            held["disk"] += len(pages) * zone.pool.page // zone.pool.piece * zone.pool.disk.record
        for cache in zone.near:
            held[cache.pool.tier] += sum(x.nbytes for x in cache.pool.get(torch.from_numpy(cache.slots).long()).values())
        held["device"] += zone.table.nbytes + zone.length.nbytes
    held["device"] += sum(q.nbytes for layer in memory.layers for q in layer.past) + sum(layer.pos.nbytes for layer in memory.layers)
    held["device"] += sum(layer.drawn.nbytes for layer in memory.layers if layer.drawn) + (memory.text.nbytes if memory.text else 0)
    held["device"] += sum(x.nbytes for layer in memory.layers for x in layer.index.values())
    assert memory.tiers() == held == rig.pools.ledger.now
    assert memory.bytes == sum(held.values())
    memory.free()
    assert memory.bytes == 0 and not any(memory.tiers().values())
    assert not any(rig.pools.ledger.now.values())
    rig.pools.check()


@METHODS
def test_goes_to_disk_and_back(name: str, tmp_path: Path) -> None:
    rig, other = Rig(), Rig()
    plan = rig.plan(small(example(name)), torch.float16)
    memory = rig.read(plan, IDS[:PROMPT], 64)
    rig.drip(memory, IDS[PROMPT : PROMPT + 2])
    assert save(memory, tmp_path / "memory", "tiny") == (tmp_path / "memory").stat().st_size
    again = load(tmp_path / "memory", plan, other.pools, other.engine._rotates, "tiny")
    for layer in range(3):
        assert all(map(torch.equal, again.positions(layer), memory.positions(layer)))
    assert torch.equal(other.drip(again, IDS[PROMPT + 2 :]), rig.drip(memory, IDS[PROMPT + 2 :]))
    again.check()


@METHODS
def test_a_request_leaves_nothing_behind(name: str) -> None:
    rig = Rig()
    request = rig.answer(rig.plan(small(example(name))), IDS[:PROMPT], max_tokens=8)
    assert len(tokens(request)) == 8
    assert not any(rig.pools.ledger.now.values())
    rig.pools.check()


@METHODS
@pytest.mark.parametrize(("prompt", "answer"), [(500, 8), (40, 90)])
def test_needs_no_more_than_was_foreseen(name: str, prompt: int, answer: int) -> None:
    """The prediction that admits a request covers the measured peak, and each step's growth covers that step's."""
    rig = Rig(chunk=128)
    plan = rig.plan(small(example(name)), torch.float16)
    request = rig.request(plan, words(prompt), max_tokens=answer)
    rig.engine.submit(request)
    while not request.done:
        rig.engine.step()
    assert request.error is None and rig.pools.ledger.peak["device"] <= need(plan, prompt, 128, answer)
    memory = rig.engine.empty(plan)
    for first, last, phase in Job(plan, IDS, PROMPT, 64).steps():
        total = PROMPT if phase == "prefill" else None
        foreseen = rig.pools.ledger.now["device"] + memory.growth(rig.ask(memory, IDS[first:last], phase, total).step)
        rig.pools.ledger.mark()
        rig.feed(memory, IDS[first:last], phase, total)
        assert rig.pools.ledger.peak["device"] <= foreseen


@pytest.mark.parametrize("name", [n for n in NAMES if issubclass(KNOWN[n], Admit | Evict | Prune)])
def test_says_whether_it_looks_at_the_question(name: str) -> None:
    """Prompts that differ in their last 8 tokens, too new to be dropped: what is kept of the others differs where a method says so."""
    rig, method = Rig(), small(example(name))
    memories = [rig.read(rig.plan(method), IDS[: PROMPT - 8] + words(8, seed)) for seed in (11, 12)]
    held = [[p for layer in range(3) for p in memory.positions(layer)] for memory in memories]
    assert method.question == method.aware()
    assert all(map(torch.equal, *held)) != method.question


@pytest.mark.parametrize("name", JOINT)
def test_layers_that_are_stored_together_settle_together(name: str) -> None:
    """One zone after the group's last layer; each layer reads back what the codec makes of its own tokens, however they came."""
    rig, method = Rig(), small(example(name))
    assert isinstance(method, Encode)
    plan = rig.plan(method)
    groups = {p.joint for p in plan.layers if p.joint}
    assert groups and all(2 <= len(g) <= method.across() for g in groups)
    memory, raw = rig.read(plan, IDS[:PROMPT], 64), rig.read(rig.plan(idle(name)), IDS[:PROMPT], 64)
    for group in groups:
        members = [memory[i] for i in group]
        assert all(m.settled is members[0].settled and torch.equal(m.rows().length, members[0].rows().length) for m in members)
        assert len({str([p.tolist() for p in m.positions()]) for m in members}) == 1 and int(members[0].rows().length.min()) > 0
        own = [torch.cat([k for k, _ in raw[i].read_settled()]) for i in group]
        got = [torch.cat([k for k, _ in m.read_settled()]) for m in members]
        for i, mine in enumerate(got):
            distance = [float((mine - other).norm()) for other in own]
            assert min(distance) == distance[i], "a layer is nearest to itself"
    twin = memory.fork()
    twin.check()
    for group in groups:
        assert len({id(twin[i].settled) for i in group}) == 1 and twin[group[0]].settled is not memory[group[0]].settled


@pytest.mark.parametrize("name", JOINT)
def test_layers_that_are_stored_together_refuse_what_parts_them(name: str) -> None:
    rig, method = Rig(), small(example(name))
    for other in (n for n in NAMES if issubclass(KNOWN[n], Admit | Evict)):
        with pytest.raises(PlanError, match="must hold the same tokens"):
            rig.plan([method, small(example(other))])
        apart = resolve((Item(method, 1), Item(small(example(other)), 0, 0)), rig.model.shape, torch.float32)
        assert apart.layers[0].joint == () and 1 in apart.layers[1].joint
        memory = rig.read(apart, IDS[:PROMPT], 64)
        memory.check()
        assert bool(rig.drip(memory, IDS[PROMPT:]).isfinite().all())
    sliding = Rig("mistral")
    with pytest.raises(PlanError, match="sliding window"):
        sliding.plan(method)


@pytest.mark.parametrize("name", [n for n in NAMES if issubclass(KNOWN[n], Encode) and KNOWN[n].joins])
def test_heads_that_are_stored_together_refuse_what_parts_them(name: str) -> None:
    rig = Rig()
    for other in (n for n in NAMES if issubclass(KNOWN[n], Admit | Evict)):
        with pytest.raises(PlanError, match="must hold the same tokens"):
            rig.plan([small(example(name)), small(example(other))])


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(NAMES, 2)))
def test_pairs_run_or_are_refused_with_a_sentence(a: str, b: str) -> None:
    rig, pair = Rig(), [small(example(name)) for name in (a, b)]
    try:
        plan = rig.plan(pair)
    except PlanError as error:
        assert len(error.reasons) >= 1 and all(why.endswith(".") and len(why.split()) > 4 for why in error.reasons)
        assert any(m.slug in why for m in pair for why in error.reasons)
        return
    request = rig.answer(plan, IDS[:150], max_tokens=6, logprobs=0)
    assert request.error is None and len(tokens(request)) == 6
    logits, memory = rig.run(Job(plan, IDS[:156], 150, 64))
    assert bool(logits.isfinite().all()) and float(logits.std(0).mean()) > 0.1
    memory.check()
    if all(m.identity == LOSSLESS for m in pair):
        check_greedy(rig, request)


def test_all_lossless_methods_that_fit_together_equal_dense() -> None:
    """Every stack of lossless methods that the plan allows."""
    rig = Rig()
    names = [name for name in NAMES if registry()[name].identity == LOSSLESS]
    stacks = [s for n in range(1, len(names) + 1) for s in itertools.combinations(names, n)]
    ran = 0
    for stack in stacks:
        try:
            plan = rig.plan([small(example(name)) for name in stack])
        except PlanError:
            continue
        check_greedy(rig, rig.answer(plan, IDS[:PROMPT], max_tokens=10))
        ran += 1
    assert ran >= len(names)


def test_the_small_settings_make_methods_act() -> None:
    """Otherwise the tests above would compare dense runs with dense runs."""
    quiet = (Decode, Head, Place, Prompt, Stop, Weights, Ingest, Skip, Prune)
    rig = Rig()
    for name in NAMES:
        method = small(example(name))
        if not isinstance(method, quiet) and exact(method):
            logits, _ = rig.run(Job(rig.plan(method), IDS, PROMPT, 64))
            assert float((logits - dense()).norm() / dense().norm()) > 1e-3, name


def test_a_page_that_is_written_while_shared_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "own", lambda self, page: page)
    with pytest.raises(AssertionError):
        test_forks_go_their_own_ways("quest")


def test_a_key_too_few_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    below = Positions.below
    monkeypatch.setattr(Positions, "below", lambda self, pos: below(self, pos) - (np.asarray(pos) > 100))
    with pytest.raises(AssertionError):
        test_changes_nothing_at_its_identity("headinfer", "llama")


def test_pages_that_are_never_given_back_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "give", lambda self, pages: None)
    with pytest.raises(AssertionError):
        test_a_request_leaves_nothing_behind("snapkv")
