"""Each seat is called as it says: toy methods against hand-written references."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from peer import SMALL, peer_logits, random_model
from tokenizers import Tokenizer as Core
from tokenizers import models
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from longspool.errors import PlanError
from longspool.llm import LLM
from longspool.method import Method, registry
from longspool.model.build import Model
from longspool.model.sources import DirectorySource
from longspool.plan import Item, Plan, resolve
from longspool.recipe import parse
from reference import attend, dense_logits, rotate
from toolbox import Job, Rig, loaded, tokens, words
from toys import Again, Cut, Five, Halve, Heavy, Leave, Rounded, Shelf, Twice

N, MORE = 130, 6
IDS = words(N + MORE, 3)


def plan(*methods: Method | Item | str) -> Plan:
    items: list[Item] = []
    for m in methods:
        items += parse(m) if isinstance(m, str) else [m if isinstance(m, Item) else Item(m)]
    return resolve(tuple(items), Rig().model.shape, torch.float32)


@torch.no_grad()
def layered(
    model: Model,
    ids: Sequence[int],
    keep: Callable[[int, Tensor], Tensor] = lambda layer, pos: torch.arange(len(pos)),
    skip: Callable[[int, Tensor], Tensor] = lambda layer, pos: torch.zeros(len(pos), dtype=torch.bool),
) -> tuple[Tensor, Tensor]:
    """A plain runner in which tokens may vanish after a layer (`keep` gives indices) or leave one out (`skip` gives a mask); returns
    the logits and the positions that they belong to."""
    pos, x = torch.arange(len(ids)), model.embed(torch.tensor(ids))
    for layer, block in enumerate(model.blocks):
        q, k, v = block.qkv(x)
        assert block.rope is not None
        angles = block.rope.angles(pos, len(ids))
        out = attend(model, layer, rotate(q, *angles), rotate(k, *angles), v)
        x = torch.where(skip(layer, pos)[:, None], x, block.finish(x, out))
        index = keep(layer, pos)
        pos, x = pos[index], x[index]
    return model.logits(model.final(x)), pos


def near(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def greedy(model: Model, ids: Sequence[int], count: int) -> list[int]:
    """The dense model's answer, from scratch for every token."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(dense_logits(model, torch.tensor(ids))[-1].argmax()))
    return ids[-count:]


# ---- Prune


@pytest.mark.parametrize("chunk", [N, 60])
def test_pruned_tokens_are_missing_in_later_layers(chunk: int) -> None:
    """Every second token of each chunk vanishes after layer 1; the chunk's last one stays."""
    rig = Rig()
    survivors = sorted({p for first in range(0, N, chunk) for p in [*range(first, min(first + chunk, N), 2), min(first + chunk, N) - 1]})
    gone = torch.tensor([p not in survivors for p in range(N)] + [False] * MORE)
    expected, pos = layered(
        rig.model, IDS, keep=lambda layer, pos: torch.nonzero(~gone[pos])[:, 0] if layer == 1 else torch.arange(len(pos))
    )
    memory = rig.engine.empty(plan(Item(Halve(), 1, 1)))
    last = [rig.feed(memory, IDS[first : min(first + chunk, N)], "prefill", N)[-1] for first in range(0, N, chunk)][-1]
    near(torch.cat([last[None], rig.drip(memory, IDS[N:])]), expected[pos >= N - 1])
    assert memory.positions(0)[0].tolist() == memory.positions(1)[0].tolist() == list(range(N + MORE))
    assert memory.positions(2)[0].tolist() == [*survivors, *range(N, N + MORE)]
    assert memory.actions["halve"] == {"pruned": N - sum(len(range(f, min(f + chunk, N), 2)) for f in range(0, N, chunk))}
    memory.check()


def test_pruning_leaves_the_others_of_a_step_alone() -> None:
    rig = Rig()
    jobs = [
        Job(plan(Item(Halve(), 1, 1)), IDS, N),
        Job(rig.plan(), words(90, 5), 80),
        Job(plan(Item(Halve(), 0, 0), "int8(window=8)"), IDS, N),
    ]
    together = rig.together(jobs)
    near(together[1][0], dense_logits(rig.model, torch.tensor(jobs[1].ids)))
    for job, (logits, _) in zip(jobs, together, strict=True):
        near(logits, Rig().run(job)[0])


# ---- Skip


def test_a_layer_is_left_out() -> None:
    rig = Rig()
    expected, _ = layered(rig.model, IDS, skip=lambda layer, pos: torch.full((len(pos),), layer == 1))
    (skipped, memory), (dense, _) = rig.together([Job(plan(Item(Leave(), 1, 1)), IDS, N, 60), Job(rig.plan(), IDS, N, 70)])
    near(skipped, expected)
    near(dense, dense_logits(rig.model, torch.tensor(IDS)))
    near(Rig().run(Job(plan(Item(Leave(), 1, 1)), IDS, N))[0], expected)
    assert memory.actions["leave"] == {"skipped": N + MORE}


def test_a_layer_that_is_left_out_still_writes_what_later_tokens_see() -> None:
    rig = Rig()
    expected, _ = layered(rig.model, IDS, skip=lambda layer, pos: (pos < N) & (layer == 1))
    near(rig.run(Job(plan(Item(Leave("prefill"), 1, 1)), IDS, N, 50))[0], expected)


# ---- Ingest, Review


def test_an_ingest_reads_as_it_likes() -> None:
    rig = Rig()
    request = rig.answer(plan(Twice()), IDS[:N], max_tokens=5)
    assert tokens(request) == greedy(rig.model, IDS[:N], 5)
    assert request.clock.prefilled == N // 2 + N
    assert request.actions["twice"] == {"halves": 1}


@pytest.mark.parametrize("place", [False, True])
def test_a_review_passes_between_prompt_and_answer(place: bool) -> None:
    rig, passes = Rig(), []
    request = rig.request(plan(Again(4, place), Five()), IDS[:N], max_tokens=9)
    rig.engine.submit(request)
    while not request.done:
        passes.append(None if request.pending is None else (request.pending.step.phase, len(request.pending.step.ids)))
        rig.engine.step()
    assert passes == [None, ("verify", 4)] + [("decode", 1)] * 4
    assert tokens(request) == greedy(rig.model, IDS[:N], 5)
    assert request.actions["again"] == {"passes": 1}
    assert not any(rig.pools.ledger.now.values())


def test_a_review_may_replace_the_reply() -> None:
    class Other(Again):
        def review(self, request):  # type: ignore[no-untyped-def]
            return -(yield request.ask([5], "verify", request.memory.fork()))

    rig = Rig()
    request = rig.request(plan(Other()), IDS[:N], max_tokens=1)
    rig.engine.run([request])
    assert tokens(request) == [int(dense_logits(rig.model, torch.tensor([*IDS[:N], 5]))[-1].argmin())]


# ---- Reuse


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    Shelf.known.clear()
    yield Shelf()
    Shelf.known.clear()


def test_a_known_prefix_is_not_read_again(shelf: Shelf) -> None:
    rig = Rig()
    first = rig.answer(plan(shelf), IDS[:80], max_tokens=3)
    assert (first.reused, first.clock.prefilled) == (0, 80)
    for prompt, known in ((IDS[:N], 80), ([*IDS[:N], 7], N), (IDS[:80], 79), (IDS[:79], 0)):
        request = rig.answer(plan(shelf), prompt, max_tokens=3)
        assert (request.reused, request.clock.prefilled) == (known, len(prompt) - known)
        assert tokens(request) == greedy(rig.model, prompt, 3)
        assert request.actions.get("shelf", {}) == ({"reused": known} if known else {})
    for memory in Shelf.known.values():
        memory.free()  # type: ignore[attr-defined]
    assert not any(rig.pools.ledger.now.values()), "what was not used has been given back"
    rig.pools.check()


def test_a_memory_under_another_recipe_is_not_used(shelf: Shelf) -> None:
    rig = Rig()
    rig.answer(plan(shelf, "streaming(window=8, sinks=2)"), IDS[:N], max_tokens=2)
    request = rig.answer(plan(shelf), [*IDS[:N], 3], max_tokens=3)
    assert request.reused == 0 and tokens(request) == greedy(rig.model, [*IDS[:N], 3], 3)


def test_a_known_prompt_whose_end_has_settled_is_read_anew(shelf: Shelf) -> None:
    """128 tokens without a recent zone are two settled pages: the last token can't be taken back."""
    rig = Rig()
    for _ in range(2):
        request = rig.answer(plan(shelf, "headinfer(window=0)"), IDS[:128], max_tokens=3)
        assert request.error is None and tokens(request) == greedy(rig.model, IDS[:128], 3)
        assert request.reused == 0 and request.clock.prefilled == 128


# ---- Stop, Prompt


def test_a_stop_ends_the_answer() -> None:
    rig = Rig()
    request = rig.answer(plan(Five()), IDS[:N], max_tokens=50)
    assert tokens(request) == greedy(rig.model, IDS[:N], 5)
    assert request.finish == "stop" and request.actions["five"] == {"stopped": 1}
    assert rig.answer(plan(Five()), IDS[:N], max_tokens=3).finish == "length"


def test_a_prompt_is_rewritten_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(loaded(), kv="f32")
    cut = resolve((Item(Cut(2)),), llm.model.shape, llm.dtype)
    monkeypatch.setattr(llm, "plan_for", lambda recipe: cut if recipe == "cut" else llm.plan)
    text = "one two three four five"
    result, plain = (llm.generate(text, recipe=recipe, max_tokens=4)[0] for recipe in ("cut", None))
    assert result.tokens == tuple(greedy(llm.model, list(b"four five"), 4)) and result.report.prompt_tokens == 9
    assert result.report.actions["cut"] == {"tokens_before": len(text), "tokens_after": 9} and not result.report.notes
    assert plain.report.prompt_tokens == len(text) and plain.tokens != result.tokens
    chat = llm.chat([{"role": "system", "content": "a b c"}, {"role": "user", "content": text}], recipe="cut", max_tokens=4)
    assert chat.tokens == tuple(greedy(llm.model, list(b"<system>a b c<user>four five<assistant>"), 4))
    assert chat.report.actions["cut"]["tokens_after"] < chat.report.actions["cut"]["tokens_before"]
    given = llm.generate(list(text.encode()), recipe="cut", max_tokens=4)[0]
    assert given.tokens == plain.tokens and "cut did nothing" in given.report.notes[0], "tokens are read as they are"


# ---- Evict with mass, through the engine


def test_mass_is_observed_while_a_prompt_is_read() -> None:
    """Layer 0's kept tokens are those with the largest float64 column sums of its attention."""
    rig = Rig()
    memory = rig.read(plan(Heavy(10)), IDS[:N])
    block = rig.model.blocks[0]
    q, k, _ = block.qkv(rig.model.embed(torch.tensor(IDS[:N])))
    assert block.rope is not None
    angles = block.rope.angles(torch.arange(N), N)
    q, k = rotate(q, *angles).double(), rotate(k, *angles).double().repeat_interleave(2, 1)
    score = torch.einsum("nhd,mhd->hnm", q, k) * rig.model.shape.scale
    mass = score.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -torch.inf).softmax(-1).sum(1).view(2, 2, N).sum(1)
    for row, held in zip(mass, memory.positions(0), strict=True):
        assert held.tolist() == [*sorted(row[:64].topk(10).indices.tolist()), *range(64, N)]


# ---- Weights


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    peer = random_model(LlamaConfig(**{**SMALL, "hidden_size": 64, "intermediate_size": 96}))
    peer.save_pretrained(str(tmp_path))
    core = Core(models.BPE(vocab={chr(33 + i): i for i in range(94)}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="!").save_pretrained(str(tmp_path))
    return tmp_path


def test_weights_are_packed_while_the_model_loads(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry(), "rounded", Rounded)
    llm = LLM(str(directory), "rounded(step=0.5)", kv="f32")
    peer = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    before = peer_logits(peer, torch.arange(1, 60))
    with torch.no_grad():
        for name, weight in peer.named_parameters():
            if ".mlp." in name:
                weight.copy_((weight / 0.5).round() * 0.5)
    expected = peer_logits(peer, torch.arange(1, 60))
    near(llm.logits(list(range(1, 60))), expected)
    assert float((before - expected).abs().max()) > 0.1
    report = llm.generate(list(range(1, 30)), max_tokens=2)[0].report
    assert report.actions["rounded"] == {"matrices": 9.0} and not report.notes
    other, plain = LLM(str(directory), "rounded(step=0.25)"), LLM(str(directory))
    assert len({m.loaded.fingerprint for m in (llm, other, plain)}) == 3, "a saved memory belongs to weights in one form"
    with pytest.raises(PlanError, match="while a model is loaded"):
        plain.generate([1, 2], recipe="rounded(step=0.5)")
    with pytest.raises(PlanError, match="while a model is loaded"):
        LLM(plain.loaded, "rounded")


def test_a_recipe_that_cannot_run_is_refused_before_a_weight_is_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DirectorySource, "read", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(PlanError, match="int8 and int4"):
        LLM(str(directory), "int8 + int4")
