"""VeriCache: plain decoding's tokens, however bad the drafts are, and counters that tell how good they were."""

from __future__ import annotations

import pytest
import torch

from longspool.engine.request import Request
from longspool.method import Method
from longspool.methods.decode.vericache import VeriCache
from longspool.recipe import parse
from reference import dense_logits
from toolbox import Rig, tokens, words
from toys import Every, Odd

COUNT = 16
DRAFTS: dict[str, tuple[Method, ...]] = {
    name: tuple(item.method for item in parse(name))
    for name in ("int8(window=16)", "snapkv(budget=70, window=16) + int4(window=16)", "quest(dense=0, budget=64)", "streaming(window=16)")
} | {"two thirds gone": (Every(),), "half gone": (Odd(),)}


def answer(rig: Rig, inner: tuple[Method, ...], horizon: int, seed: int, **wishes: object) -> tuple[Request, Request]:
    """The same request under vericache and plainly."""
    ids = words(90 + 31 * seed, seed)
    wishes = {"max_tokens": COUNT, "seed": seed} | wishes
    return rig.answer(rig.plan(VeriCache(inner, horizon)), ids, **wishes), rig.answer(rig.plan(), ids, **wishes)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("wishes", [{}, {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.2}], ids=str)
def test_equals_plain_decoding(draft: str, wishes: dict[str, object]) -> None:
    rig = Rig()
    for seed, horizon in ((1, 1), (2, 6)):
        fast, plain = answer(rig, DRAFTS[draft], horizon, seed, logprobs=0, **wishes)
        assert tokens(fast) == tokens(plain)
        assert [c.logprob for c in fast.choices] == pytest.approx([c.logprob for c in plain.choices], abs=1e-4)
        counted = fast.actions["vericache"]
        assert counted["drafted"] == counted["rounds"] * horizon and 0 <= counted["accepted"] <= counted["drafted"]
        # Every round gives its accepted tokens and one of the verifier's; the first token comes from the prompt.
        assert counted["accepted"] + counted["rounds"] + 1 >= COUNT > counted["accepted"] + counted["rounds"] - horizon
    assert not any(rig.pools.ledger.now.values())


def test_perfect_drafts_are_all_accepted() -> None:
    rig = Rig()
    fast, _ = answer(rig, parse_one("streaming(sinks=1000000, window=16)"), 5, 2)
    assert fast.actions["vericache"] == {"rounds": 3, "drafted": 15, "accepted": 15}


def test_drafts_of_another_prompt_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that always guesses the wrong token costs a round a token and changes nothing."""
    rig = Rig()
    draft = Request.draft

    def strange(self: Request, methods: tuple[Method, ...], recent: int) -> object:
        self.sampler.fork().commit(0)
        memory = draft(self, methods, recent)
        memory.free()
        self.memory, held = rig.read(rig.plan("streaming(window=16)"), words(90 + 31 * 2, 99)), self.memory
        other = draft(self, methods, recent)
        self.memory.free()
        self.memory = held
        return other

    plain = answer(rig, DRAFTS["int8(window=16)"], 4, 2)[1]
    monkeypatch.setattr(Request, "draft", strange)
    fast = answer(rig, DRAFTS["int8(window=16)"], 4, 2)[0]
    assert tokens(fast) == tokens(plain) and fast.actions["vericache"]["accepted"] <= 6


def test_the_memory_after_a_round_is_the_dense_one() -> None:
    rig = Rig()
    ids = words(100, 5)
    request = rig.request(rig.plan(VeriCache(DRAFTS["two thirds gone"], 6)), ids, max_tokens=20)
    rig.engine.submit(request)
    while not request.done:
        rig.engine.step()
        if request.choices and request.pending is not None and request.pending.memory is request.memory:
            seen = request.memory.seen
            assert all(p.tolist() == list(range(seen)) for layer in range(3) for p in request.memory.positions(layer))
            request.memory.check()
    logits = dense_logits(rig.model, torch.tensor(ids + tokens(request)[:-1]))[99:]
    assert tokens(request) == logits.argmax(-1).tolist()


def parse_one(text: str) -> tuple[Method, ...]:
    return tuple(item.method for item in parse(text))
