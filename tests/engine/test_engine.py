"""Continuous batching: who runs, who waits, who gives way, and that nobody's answer depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peer import SMALL, peer_logits, random_model
from torch import Tensor
from transformers import LlamaConfig

from longspool.engine.estimate import need
from longspool.errors import LongspoolError, OutOfMemory, PlanError, PromptTooLong
from longspool.llm import LLM
from longspool.method import Method
from longspool.model.hf import from_transformers
from longspool.model.tiny import tiny
from longspool.plan import Item, Plan, resolve
from longspool.roles import Admit, View
from reference import dense_logits
from toolbox import Rig, loaded, tokens, words
from toys import PAPER

RECIPES = {
    "dense": "",
    "streaming": "streaming(sinks=4, window=16)",
    "snapkv": "snapkv(budget=60, window=16)",
    "snapkv, every 16": "snapkv(budget=60, window=16, when=16)",
    "int4": "int4(window=16)",
    "quest": "quest(budget=64, dense=1)",
    "trianglemix": "trianglemix(dense=1, window=16, sinks=4, last=8, block=16)",
    "headinfer": "headinfer(window=16)",
    "vericache": "vericache(int8(window=16), horizon=3)",
    "self_extend": "self_extend(window=32, group=4)",
}


def alone(recipe: str | Plan, ids: list[int], index: int = 0, **wishes: object) -> list[int]:
    rig = Rig()
    request = rig.request(rig.plan(recipe) if isinstance(recipe, str) else recipe, ids, index, **wishes)
    rig.engine.run([request])
    return tokens(request)


def empty(rig: Rig) -> bool:
    rig.pools.check()
    return not any(rig.pools.ledger.now.values()) and not rig.engine.busy


@dataclass(frozen=True)
class Faulty(Method, Admit):
    """Fails when position `at` settles."""

    at: int = 100
    slug: ClassVar[str] = "faulty"
    paper: ClassVar = PAPER
    identity: ClassVar[dict[str, object]] = {}

    def admit(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        if bool((pos == self.at).any()):
            raise PlanError("This text can't be admitted.")
        return torch.ones(pos.shape, dtype=torch.bool)


# ---- batching


def test_requests_under_different_recipes_share_steps() -> None:
    """All recipes at once, of different lengths, joining at different steps: each answer is that of its request alone."""
    rig = Rig(chunk=64)
    made = {name: rig.request(rig.plan(r), words(60 + 17 * i, i), max_tokens=5 + i % 4) for i, (name, r) in enumerate(RECIPES.items())}
    waiting, widths = list(made.values()), []
    while waiting or rig.engine.busy:
        for request in waiting[:3]:
            rig.engine.submit(request)
        waiting = waiting[3:]
        rig.engine.step()
        widths.append(len(rig.engine.running))
    assert max(widths) >= 8, "they really ran together"
    for name, request in made.items():
        other = Rig(chunk=64)
        same = other.request(other.plan(RECIPES[name]), request.prompt[: request.asked], max_tokens=request.sampling.max_tokens)
        other.engine.run([same])
        assert tokens(request) == tokens(same) and request.finish == "length", name
        assert request.actions == same.actions, name
    assert empty(rig)


def test_a_long_prompt_does_not_stop_running_answers() -> None:
    """Decodes advance at every step while a prompt of 1,000 tokens is read beside them, in chunks of at most 256."""
    rig = Rig(chunk=512)
    short = [rig.request(rig.plan(), words(20, i), max_tokens=60) for i in range(2)]
    for request in short:
        rig.engine.submit(request)
    while not all(r.choices for r in short):
        rig.engine.step()
    long = rig.request(rig.plan(), words(1000, 9), max_tokens=2)
    rig.engine.submit(long)
    before, steps, chunks = [len(r.choices) for r in short], 0, []
    while not long.choices:
        read = long.clock.prefilled
        rig.engine.step()
        steps += 1
        chunks.append(long.clock.prefilled - read)
    assert [len(r.choices) for r in short] == [n + steps for n in before]
    assert chunks == [256, 256, 256, 232]
    rig.engine.run([])
    for request in (*short, long):
        rig.engine.cancel(request)
    assert empty(rig)


def test_alone_a_prompt_is_read_in_whole_chunks() -> None:
    rig = Rig(chunk=512)
    request = rig.request(rig.plan(), words(1000, 9), max_tokens=1)
    rig.engine.submit(request)
    read = [(rig.engine.step() and None) or request.clock.prefilled for _ in range(2)]
    assert read == [512, 1000] and request.done


# ---- memory


def test_waits_until_there_is_room_and_never_exceeds_the_budget() -> None:
    rig = Rig()
    plan = rig.plan()
    each = need(plan, 100, rig.engine.chunk, 20)
    rig = Rig(budget=int(each * 2.5))
    made = [rig.request(plan, words(100, i), max_tokens=20) for i in range(5)]
    for request in made:
        rig.engine.submit(request)
    widths = []
    while rig.engine.busy:
        rig.engine.step()
        widths.append(len(rig.engine.running))
        assert rig.pools.ledger.now["device"] <= rig.engine.budget
    assert max(widths) == 2 and rig.pools.ledger.peak["device"] <= rig.engine.budget
    for i, request in enumerate(made):
        assert tokens(request) == alone("", words(100, i), max_tokens=20)
    assert all(r.preempted == 0 for r in made) and empty(rig)


@pytest.mark.parametrize("name", RECIPES)
def test_a_preempted_request_goes_on_with_the_same_tokens(name: str) -> None:
    rig = Rig()
    request = rig.request(rig.plan(RECIPES[name]), words(120, 4), max_tokens=30, temperature=0.9, seed=3)
    rig.engine.submit(request)
    for until in (7, 19):
        while len(request.choices) < until:
            rig.engine.step()
        rig.engine._preempt(request)
        assert not any(rig.pools.ledger.now.values())
    while not request.done:
        rig.engine.step()
    assert request.preempted == 2 and request.error is None
    assert tokens(request) == alone(RECIPES[name], words(120, 4), max_tokens=30, temperature=0.9, seed=3)
    assert empty(rig)


def test_the_youngest_gives_way_when_answers_outgrow_the_budget() -> None:
    """Samples fork after the prompt, so they run although the budget can't hold them all to their ends."""
    rig = Rig()
    plan = rig.plan()
    rig = Rig(budget=int(need(plan, 120, 1 << 20, 20) * 1.5))
    made = [rig.request(plan, words(120, 1), i, max_tokens=20, temperature=1.0, seed=11) for i in range(4)]
    made[0].siblings = made[1:]
    rig.engine.run(made[:1])
    assert sum(r.preempted for r in made) > 0 and rig.pools.ledger.peak["device"] <= rig.engine.budget
    for i, request in enumerate(made):
        assert tokens(request) == alone("", words(120, 1), i, max_tokens=20, temperature=1.0, seed=11)
    assert empty(rig)


def test_refuses_what_can_never_fit_and_harms_nobody() -> None:
    rig = Rig(budget=400_000, chunk=64)
    running = rig.request(rig.plan(), words(40), max_tokens=6)
    rig.engine.submit(running)
    rig.engine.step()
    with pytest.raises(OutOfMemory, match=r"needs about [\d,]+ bytes.*budget is 400,000.*3000 tokens"):
        rig.engine.submit(rig.request(rig.plan(), words(3000), max_tokens=6))
    while rig.engine.busy:
        rig.engine.step()
    assert tokens(running) == alone("", words(40), max_tokens=6) and empty(rig)


@pytest.mark.parametrize("recipe", ["streaming(sinks=4, window=16)", "headinfer(window=16)", "snapkv(budget=64, window=16, when='chunk')"])
def test_a_recipe_that_keeps_less_is_let_in(recipe: str) -> None:
    """3,000 tokens take 1.2 MB dense; the device may hold a quarter of that."""
    rig = Rig(budget=300_000, chunk=64)
    with pytest.raises(OutOfMemory):
        rig.engine.submit(rig.request(rig.plan("", torch.float16), words(3000), max_tokens=6))
    request = rig.answer(rig.plan(recipe, torch.float16), words(3000), max_tokens=6)
    assert request.error is None and len(tokens(request)) == 6
    assert rig.pools.ledger.peak["device"] <= 300_000 and empty(rig)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(RECIPES)),
    st.lists(st.tuples(st.integers(1, 230), st.integers(1, 9)), min_size=1, max_size=4),
    st.sampled_from([32, 100, 4096]),
    st.floats(1.0, 3.0),
)
def test_any_load_stays_within_the_budget(name: str, load: list[tuple[int, int]], chunk: int, room: float) -> None:
    rig = Rig()
    plan = rig.plan(RECIPES[name], torch.float16)
    rig = Rig(budget=int(max(need(plan, n, chunk, more) for n, more in load) * room), chunk=chunk)
    made = [rig.request(plan, words(n, n), max_tokens=more) for n, more in load]
    rig.engine.run(made)
    assert [len(tokens(r)) for r in made] == [more for _, more in load] and not any(r.error for r in made)
    assert rig.pools.ledger.peak["device"] <= rig.engine.budget
    assert empty(rig)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("prompt", "answer"), [(500, 10), (40, 90), (15, 2)])
def test_the_estimate_is_near_the_truth(name: str, prompt: int, answer: int) -> None:
    """Not below the measured peak, and not more than twice above it and a few pages."""
    rig = Rig(chunk=128)
    plan = rig.plan(RECIPES[name], torch.float16)
    guess = need(plan, prompt, 128, answer)
    rig.answer(plan, words(prompt), max_tokens=answer)
    peak = rig.pools.ledger.peak["device"]
    assert peak <= guess <= 2 * peak + 3 * 2 * 6 * 64 * 64, (peak, guess)


# ---- ending


def test_cancelling_frees_at_once() -> None:
    rig = Rig(chunk=64)
    stays = rig.request(rig.plan(), words(50), max_tokens=30)
    rig.engine.submit(stays)
    for _ in range(3):
        rig.engine.step()
    for steps, recipe in ((1, ""), (5, "vericache(int8(window=16), horizon=3)"), (4, "snapkv(budget=60, window=16)"), (0, "")):
        request = rig.request(rig.plan(recipe), words(150), max_tokens=20)
        request.siblings = [rig.request(rig.plan(recipe), words(150), 1, max_tokens=20)]
        family = [request, *request.siblings]
        rig.engine.submit(request)
        for _ in range(steps):
            rig.engine.step()
        for member in family:
            rig.engine.cancel(member)
        assert rig.pools.ledger.now == stays.memory.tiers(), "what is left is the other's"
        assert all(r.done and r.finish == "cancelled" for r in family)
    while not stays.done:
        rig.engine.step()
    assert tokens(stays) == alone("", words(50), max_tokens=30) and empty(rig)


def test_an_error_in_a_draw_ends_that_request_alone() -> None:
    rig = Rig()
    bad = rig.request(rig.plan(), words(50), max_tokens=5, logit_bias=tuple((i, float("-inf")) for i in range(256)))
    bad.siblings = [rig.request(rig.plan(), words(50), 1, max_tokens=5)]
    good = rig.request(rig.plan(), words(60), max_tokens=5)
    rig.engine.run([bad, good])
    for request in (bad, *[r for r in (bad,) if r.siblings]):
        assert isinstance(request.error, LongspoolError) and "no token" in str(request.error) and request.finish == "error"
    assert tokens(good) == alone("", words(60), max_tokens=5) and empty(rig)


@pytest.mark.parametrize("recipe", ["", "snapkv(budget=60, window=16)"])
def test_an_error_in_a_method_ends_the_requests_under_its_recipe_alone(recipe: str) -> None:
    """Position 100 settles while decoding, in the middle of a pass that the others share."""
    rig = Rig()
    faulty = resolve((Item(Faulty(100)),), rig.model.shape, torch.float32)
    bad = rig.request(faulty, words(120), max_tokens=30)
    twin = rig.request(faulty, words(30), max_tokens=9)
    good = [rig.request(rig.plan(recipe), words(60 + i, i), max_tokens=20, temperature=0.8, seed=5) for i in range(2)]
    rig.engine.run([good[0], bad, good[1]])
    assert isinstance(bad.error, PlanError) and "can't be admitted" in str(bad.error) and len(bad.choices) == 8
    for i, request in enumerate(good):
        assert request.error is None and tokens(request) == alone(recipe, words(60 + i, i), max_tokens=20, temperature=0.8, seed=5)
    rig.engine.run([twin])
    assert twin.error is None and empty(rig)


def test_samples_whose_parent_fails_end_too() -> None:
    rig = Rig()
    faulty = resolve((Item(Faulty(3)),), rig.model.shape, torch.float32)
    made = [rig.request(faulty, words(120), i, max_tokens=5) for i in range(3)]
    made[0].siblings = made[1:]
    rig.engine.run(made[:1])
    assert all(r.done and isinstance(r.error, PlanError) for r in made) and empty(rig)


# ---- samples


@pytest.mark.parametrize("name", ["dense", "snapkv", "quest", "vericache"])
def test_samples_share_the_prompt_and_equal_separate_runs(name: str) -> None:
    rig = Rig()
    plan = rig.plan(RECIPES[name])
    made = [rig.request(plan, words(150, 2), i, max_tokens=(3, 9, 6)[i], temperature=1.1, seed=21) for i in range(3)]
    made[0].siblings = made[1:]
    rig.engine.submit(made[0])
    rig.engine.step()
    if name == "dense":
        used = sum(pool.used for pool in rig.pools._made.values())
        assert used == 3 * 2 * 3, "three layers, two heads, three pages: the prompt is held once"
    rig.engine.run([])
    while rig.engine.busy:
        rig.engine.step()
    assert made[0].clock.prefilled == 150 and made[1].clock.prefilled == made[2].clock.prefilled == 0
    answers = [tokens(r) for r in made]
    assert len(set(map(tuple, [a[:3] for a in answers]))) == 3, "they differ"
    for i, answer in enumerate(answers):
        assert answer == alone(plan, words(150, 2), i, max_tokens=len(answer), temperature=1.1, seed=21)
        assert made[i].finish == "length"
        if name == "snapkv":
            assert made[i].actions["snapkv"]["evicted"] > 0, "each report tells what was done to its prompt"
    assert empty(rig)


def test_generate_waits_for_every_sample() -> None:
    llm = LLM(loaded(), kv="f32")
    results = llm.generate("A long story", n=4, temperature=1.5, seed=2, max_tokens=40)
    lengths = [len(r.tokens) for r in results]
    assert len(set(lengths)) > 1, "the first one ends before others"
    assert all((r.report.finish_reason, n) in {("length", 40), ("stop", n)} for r, n in zip(results, lengths, strict=True))


# ---- LLM


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(loaded(), kv="f32", memory="64MB")


def test_logits_equal_transformers() -> None:
    peer = random_model(LlamaConfig(**{**SMALL, "vocab_size": 256}))
    llm = LLM(loaded(from_transformers(peer)), kv="f32", chunk=30)
    ids = words(90)
    expected = peer_logits(peer, torch.tensor(ids))
    for prefill in (None, 1, 90):
        torch.testing.assert_close(llm.logits(ids, prefill), expected, atol=1e-4, rtol=0)
    scores = expected.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(llm.score(ids), torch.cat([torch.zeros(1), scores]), atol=1e-4, rtol=0)
    assert not any(llm.engine.pools.ledger.now.values())


def test_stops_at_strings_and_tokens(llm: LLM) -> None:
    whole = llm.generate("Once upon a time", max_tokens=40, ignore_eos=True, temperature=1.0, seed=8)[0]
    text = whole.text
    stop = text[10:12]
    cut = llm.generate("Once upon a time", max_tokens=40, ignore_eos=True, temperature=1.0, seed=8, stop=(stop,))[0]
    assert cut.text == text[: text.index(stop)] and cut.report.finish_reason == "stop"
    token = whole.tokens[6]
    at = whole.tokens.index(token)
    cut = llm.generate("Once upon a time", max_tokens=40, ignore_eos=True, temperature=1.0, seed=8, stop_tokens=(token,))[0]
    assert cut.tokens == whole.tokens[:at] and cut.report.finish_reason == "stop"
    assert whole.report.finish_reason == "length" and len(whole.tokens) == 40
    ended = llm.generate("Once", max_tokens=40, logit_bias=((0, 1e4),))[0]
    assert ended.tokens == () and ended.report.finish_reason == "stop", "the tokenizer's end token"


def test_tells_log_probabilities(llm: LLM) -> None:
    ids = words(50)
    result = llm.generate(ids, max_tokens=5, logprobs=3, temperature=0.7, seed=1)[0]
    expected = dense_logits(llm.model, torch.tensor([*ids, *result.tokens[:-1]]))[49:].log_softmax(-1)
    for (logprob, top), token, row in zip(result.logprobs, result.tokens, expected, strict=True):
        assert logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(3)
        assert [t for t, _ in top] == best.indices.tolist()
        assert [p for _, p in top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("recipe", ["", "vericache(int8(window=16), horizon=5)"])
def test_streamed_pieces_are_the_text(llm: LLM, recipe: str) -> None:
    wishes: dict[str, object] = {"max_tokens": 30, "temperature": 1.2, "seed": 4, "ignore_eos": True}
    whole = llm.generate("Some prompt", recipe=recipe, **wishes)[0]
    pieces = list(llm.stream("Some prompt", recipe=recipe, **wishes))
    assert "".join(p.text for p in pieces) == whole.text and pieces[-1].result is not None
    assert pieces[-1].result.tokens == whole.tokens and len(pieces) > 3
    assert all(p.result is None for p in pieces[:-1])


def test_leaving_a_stream_frees_its_memory(llm: LLM) -> None:
    before = dict(llm.engine.pools.ledger.now)
    for piece in llm.stream("Some prompt", max_tokens=30, ignore_eos=True, temperature=1.0, seed=1):
        assert piece.result is None
        break
    import gc

    gc.collect()
    assert llm.engine.pools.ledger.now == before and not llm.engine.busy


def test_two_streams_and_a_batch_do_not_mix(llm: LLM) -> None:
    wishes: dict[str, object] = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 6}
    expected = [llm.generate(p, **wishes)[0].text for p in ("left", "right", "between")]
    left, right = llm.stream("left", **wishes), llm.stream("right", **wishes)
    texts = ["", ""]
    for turn in range(3):
        for side, stream in enumerate((left, right)):
            texts[side] += next(stream).text
        if turn == 2:
            assert llm.generate("between", **wishes)[0].text == expected[2]
    for side, rest in enumerate((left, right)):
        texts[side] += "".join(p.text for p in rest)
    assert texts == expected[:2]


def test_mistakes_are_sentences(llm: LLM) -> None:
    for call, words_said in (
        (lambda: llm.generate(""), "empty"),
        (lambda: llm.generate([]) or llm.generate([[]]), "empty"),
        (lambda: llm.generate([300]), "vocabulary of 256"),
        (lambda: llm.generate("a", recipe="snapkvv"), "did you mean 'snapkv'"),
        (lambda: llm.generate("a", hotness=1), "hotness"),
        (lambda: llm.generate("a" * 5000), "5000 tokens"),
        (lambda: llm.logits(words(10), 11), "prefill=11"),
        (lambda: LLM(loaded(), kv="f64"), "f64"),
        (lambda: LLM(loaded(), chunk=0), "chunk=0"),
        (lambda: LLM(loaded(), memory="lots"), "lots"),
    ):
        with pytest.raises(LongspoolError, match=words_said):
            call()
    with pytest.raises(PromptTooLong, match="self_extend"):
        llm.generate("a" * 4096)
    with pytest.raises(OutOfMemory, match="raise the memory budget"):
        LLM(loaded(), memory="50kB").generate("a" * 3000)


def test_position_methods_lengthen_the_reach() -> None:
    llm = LLM(loaded(tiny(max_position_embeddings=128)), kv="f32")
    with pytest.raises(PromptTooLong, match="self_extend"):
        llm.generate("a" * 300)
    result = llm.generate("a" * 300, recipe="self_extend(window=64, group=4)", max_tokens=2)[0]
    assert result.report.prompt_tokens == 300 and result.report.actions["self_extend"]["far_keys"] > 0


def test_a_method_that_did_nothing_is_named(llm: LLM) -> None:
    quiet = llm.generate("short", recipe="snapkv + int4", max_tokens=3)[0].report
    assert [note.split()[0] for note in quiet.notes] == ["snapkv", "int4"] and quiet.recipe == "snapkv + int4"
    busy = llm.generate(words(200), recipe="snapkv(budget=60, window=16) + int4(window=16)", max_tokens=3)[0].report
    assert [note.partition(" in this")[0] for note in busy.notes] == ["snapkv chose what to keep by the question"]
    assert busy.memory.kv_bytes < busy.memory.kv_dense_bytes * 2 and busy.memory.kv_peak_bytes >= busy.memory.kv_bytes


def test_choices_by_the_question_are_told(llm: LLM) -> None:
    """Only where something was dropped by it: not for what is always dropped, for a draft, or for a budget that holds everything."""
    said = "chose what to keep by the question in this prompt"
    for recipe, named in (
        ("snapkv(budget=60, window=16)", ["snapkv"]),
        ("adakv(snapkv(budget=60, window=16)) + int8", ["adakv"]),
        ("snapkv(budget=1000, window=16)", []),
        ("streaming(sinks=4, window=16)", []),
        ("vericache(snapkv(budget=60, window=16), horizon=3)", []),
        ("quest(budget=64, dense=0)", []),
    ):
        notes = llm.generate(words(200), recipe=recipe, max_tokens=3)[0].report.notes
        assert [note.split()[0] for note in notes if said in note] == named, (recipe, notes)
