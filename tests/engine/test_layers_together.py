"""A codec that spans layers, through the whole engine, against a plain runner that encodes groups of layers by hand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from layermean import LayerMean
from longspool.engine.estimate import need
from longspool.memory import Memory
from longspool.memory.file import load, save
from longspool.method import Method
from longspool.model.build import Model
from longspool.model.tiny import tiny
from longspool.plan import Item, Plan, resolve
from longspool.recipe import parse
from reference import dense_logits, rotate
from toolbox import Job, Rig, causal, tokens, words
from toys import Halve

N, MORE, RECENT, PAGE = 230, 80, 16, 64
IDS = words(N + MORE, 8)
FIVE = {"num_hidden_layers": 5}
MEAN = LayerMean(2, window=RECENT)


@functools.cache
def model(kind: str = "llama", **over: object) -> Model:
    return tiny(kind, **FIVE, **over)


def plan(of: Model, *methods: Method | Item | str) -> Plan:
    items: list[Item] = []
    for m in methods:
        items += parse(m) if isinstance(m, str) else [m if isinstance(m, Item) else Item(m)]
    return resolve(tuple(items), of.shape, torch.float32)


FACTORS = {"short_factor": [1 + 0.1 * i for i in range(8)], "long_factor": [1 + 1.5 * i for i in range(8)]}
SCALED: dict[str, dict[str, object]] = {
    "dynamic": {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "longrope": {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 64, **FACTORS}},
    "longrope, long from the 21st new token": {
        "rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": N + 20, **FACTORS}
    },
}
"""Rotary embeddings that turn otherwise when a text gets longer. Only the second changes no more after the prompt."""


@functools.cache
def scaled(kind: str) -> Model:
    return tiny(**FIVE, **SCALED[kind])


class Plain:
    """Keys and values of every layer as attention sees them; after a step the old ones of a group become what its codec makes of them.
    Bare keys are kept without rotation and all turned anew in each step."""

    def __init__(self, of: Model, groups: Sequence[Sequence[int]], keep: float, window: int = RECENT, bare: bool = False) -> None:
        self.model, self.groups, self.keep, self.window, self.bare = of, groups, keep, window, bare
        self.k: list[Tensor] = [torch.zeros(0)] * of.shape.layers
        self.v: list[Tensor] = [torch.zeros(0)] * of.shape.layers
        self.settled = {tuple(g): 0 for g in groups}

    @torch.no_grad()
    def feed(self, ids: Sequence[int], total: int = 0) -> Tensor:
        s, before = self.model.shape, len(self.k[0])
        x, pos = self.model.embed(torch.tensor(ids)), torch.arange(before + len(ids))
        total = max(total, len(pos))
        for layer, block in enumerate(self.model.blocks):
            q, k, v = block.qkv(x)
            assert block.rope is not None
            angles = block.rope.angles(pos, total)
            fresh = [part[before:] for part in angles]
            q, k = rotate(q, *fresh), k if self.bare else rotate(k, *fresh)
            self.k[layer], self.v[layer] = torch.cat([self.k[layer], k.double()]), torch.cat([self.v[layer], v.double()])
            keys = rotate(self.k[layer], *angles) if self.bare else self.k[layer]
            seen = causal(before + len(ids), s.windows[layer])[before:]
            out = []
            for h in range(s.heads):
                logits = q[:, h].double() @ keys[:, h // s.group].T * s.scale
                logits = torch.tanh(logits / s.softcap) * s.softcap if s.softcap else logits
                out.append(logits.masked_fill(~seen, -torch.inf).softmax(-1) @ self.v[layer][:, h // s.group])
            x = block.finish(x, torch.stack(out, 1).float())
        for group in self.groups:
            self.settle(tuple(group))
        return self.model.logits(self.model.final(x))

    def settle(self, group: tuple[int, ...]) -> None:
        first = self.settled[group]
        old = len(self.k[0]) - first - self.window
        if old < PAGE:
            return
        end = self.settled[group] = first + old // PAGE * PAGE
        for kept in (self.k, self.v):
            mean = sum(kept[layer][first:end] for layer in group) / len(group)
            for layer in group:
                kept[layer][first:end] = mean + self.keep * (kept[layer][first:end] - mean)

    def run(self, ids: Sequence[int], prefill: int, chunk: int = 1 << 20) -> Tensor:
        out = [self.feed(ids[first : min(first + chunk, prefill)], prefill) for first in range(0, prefill, chunk)]
        return torch.cat(out + [self.feed([token]) for token in ids[prefill:]])


def near(a: Tensor, b: Tensor) -> None:
    assert float(b.std(0).mean()) > 0.1
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def balanced(rig: Rig, *memories: Memory) -> None:
    """Claimed bytes are live bytes, each settled zone counted once."""
    for memory in memories:
        memory.check()
    assert sum(m.bytes for m in memories) == sum(sum(m.tiers().values()) for m in memories)
    if len(memories) == 1:
        assert memories[0].tiers() == rig.pools.ledger.now


def dense(of: Model, ids: Sequence[int]) -> Tensor:
    return dense_logits(of, torch.tensor(list(ids)))


# ---- which layers


def test_groups_are_neighbours_under_the_same_methods() -> None:
    def joint(recipe: Sequence[Method | Item | str], of: Model) -> list[tuple[int, ...]]:
        return [p.joint for p in plan(of, *recipe).layers]

    assert joint([MEAN], model()) == [(0, 1), (0, 1), (2, 3), (2, 3), ()], "what is left over stands alone"
    assert joint([LayerMean(3)], model()) == [(0, 1, 2)] * 3 + [(3, 4)] * 2
    assert joint([LayerMean(9)], model()) == [(0, 1, 2, 3, 4)] * 5
    assert joint([LayerMean(1)], model()) == joint(["int8"], model()) == joint([], model()) == [()] * 5
    assert joint([Item(MEAN, 1, 2)], model()) == [(), (1, 2), (1, 2), (), ()]
    assert joint([Item(LayerMean(3), 0, 2), Item(LayerMean(2), 3)], model()) == [(0, 1, 2)] * 3 + [(3, 4)] * 2
    assert joint([LayerMean(4), "quest(dense=0) @ 3-"], model()) == [(0, 1, 2)] * 3 + [(3, 4)] * 2, "pages of 64 and of 16"
    layers = plan(model(), MEAN).layers
    assert layers[0] is layers[1] and layers[1] is not layers[2]


def test_sliding_layers_stay_alone_and_full_ones_find_each_other_across_them() -> None:
    of = model("gemma2", attn_logit_softcapping=3.0, final_logit_softcapping=5.0)
    assert of.shape.windows == (32, None, 32, None, 32)
    made = plan(of, MEAN)
    assert [p.joint for p in made.layers] == [(), (1, 3), (), (1, 3), ()]
    assert [p.window for p in made.layers] == [32, None, 32, None, 32]
    logits, memory = Rig(of).run(Job(made, IDS, N, 100))
    near(logits, Plain(of, [(1, 3)], MEAN.keep).run(IDS, N, 100))
    assert memory[1].settled is memory[3].settled and memory[0].settled is None


def test_a_pruning_layer_stands_alone() -> None:
    """Later layers hold fewer tokens than it does."""
    made = plan(model(), LayerMean(4, window=RECENT), Item(Halve(), 1, 1))
    assert [p.joint for p in made.layers] == [(), (), (2, 3, 4), (2, 3, 4), (2, 3, 4)]
    assert not any(p.joint for p in plan(model(), LayerMean(4), Halve()).layers)
    rig = Rig(model())
    memory = rig.read(made, IDS[:N], 100)
    rig.drip(memory, IDS[N:])
    assert len({tuple(memory.positions(layer)[0].tolist()) for layer in (2, 3, 4)}) == 1
    assert len(memory.positions(1)[0]) == N + MORE > len(memory.positions(2)[0])
    exact = plan(model(), LayerMean(4, 1.0, RECENT), Item(Halve(), 1, 1))
    near(rig.run(Job(exact, IDS, N, 100))[0], rig.run(Job(plan(model(), Item(Halve(), 1, 1)), IDS, N, 100))[0])


# ---- what is computed


@pytest.mark.parametrize("layers", [2, 3, 5])
@pytest.mark.parametrize("chunk", [N, 64, 50])
def test_equals_a_runner_that_encodes_groups_by_hand(layers: int, chunk: int) -> None:
    rig, codec = Rig(model()), LayerMean(layers, window=RECENT)
    made = plan(rig.model, codec)
    groups = sorted({p.joint for p in made.layers} - {()})
    expected = Plain(rig.model, groups, codec.keep).run(IDS, N, chunk)
    logits, memory = rig.run(Job(made, IDS, N, chunk))
    near(logits, expected)
    assert float((logits - dense(rig.model, IDS)).abs().max()) > 0.05, "the loss is seen"
    assert {n for layer in memory.layers for n in layer.rows().length.tolist()} == {256}
    assert memory.actions["layermean"] == {"tokens": 256 * 2 * 5}
    balanced(rig, memory)
    memory.free()
    balanced(rig, memory)
    assert not any(rig.pools.ledger.now.values())


def test_a_lossless_codec_is_lossless() -> None:
    for methods in (
        ["quest(budget=100000, dense=0)"],
        ["headinfer(window=8)"],
        ["self_extend(group=1)"],
        ["vericache(int8(window=8), horizon=3)"],
    ):
        rig = Rig(model())
        near(rig.run(Job(plan(rig.model, LayerMean(2, 1.0, RECENT), *methods), IDS, N, 70))[0], dense(rig.model, IDS))


@pytest.mark.parametrize("chunk", [N, 50])
def test_keys_may_be_stored_before_rotation(chunk: int) -> None:
    """A mean of bare keys, rotated when it is read, is the mean of rotated ones, as all layers turn alike."""
    rig = Rig(model())
    made = plan(rig.model, LayerMean(2, window=RECENT, bare=True))
    logits, memory = rig.run(Job(made, IDS, N, chunk))
    near(logits, Plain(rig.model, [(0, 1), (2, 3)], MEAN.keep).run(IDS, N, chunk))
    turned = rig.read(plan(rig.model, MEAN), IDS[:N])
    assert float((memory[0].read_settled()[0][0][:64] - turned[0].read_settled()[0][0][:64]).abs().max()) > 0.1
    memory.check()


@pytest.mark.parametrize("chunk", [N, 50])
@pytest.mark.parametrize("keep", [0.5, 1.0])
@pytest.mark.parametrize("kind", SCALED)
def test_bare_keys_turn_by_the_length_of_the_text(kind: str, keep: float, chunk: int) -> None:
    """Where the angles depend on a text's length, queries, settled and recent keys of a step turn by the same length, the step's total.

    A prompt gives what rotated keys give. So does the answer unless the angles change with its length: then dense attention goes on with
    older keys as they were rotated on entry, and bare ones all turn anew with every token.
    """
    of, groups = scaled(kind), [(0, 1), (2, 3)]
    logits, memory = Rig(of).run(Job(plan(of, LayerMean(2, keep, RECENT, bare=True)), IDS, N, chunk))
    near(logits, Plain(of, groups, keep, bare=True).run(IDS, N, chunk))
    turned = Plain(of, groups, keep).run(IDS, N, chunk)
    near(logits[:N], turned[:N])
    if keep == 1:
        near(logits[:N], dense(of, IDS[:N]))
    if kind == "longrope":
        near(logits, turned)
    else:
        assert float((logits - turned)[N:].abs().max()) > 0.1
    memory.check()


@pytest.mark.parametrize("kind", SCALED)
def test_bare_keys_of_requests_in_one_step_turn_by_their_own_lengths(kind: str) -> None:
    of = scaled(kind)
    made = plan(of, LayerMean(2, window=RECENT, bare=True))
    jobs = [Job(made, IDS, N, 64), Job(made, words(150, 4), 40, 30)]
    for job, (logits, _) in zip(jobs, Rig(of).together(jobs), strict=True):
        near(logits, Plain(of, [(0, 1), (2, 3)], MEAN.keep, bare=True).run(job.ids, job.prefill, job.chunk))


def test_stores_a_group_once() -> None:
    """3 groups of 2, 2 and 1 layers hold 192 tokens of 2 heads, as fp32: a mean, and a difference for every layer."""
    rig = Rig(model())
    memory = rig.read(plan(rig.model, MEAN), IDS[:N])
    zones = [layer.settled for layer in memory.layers]
    assert zones[0] is zones[1] and zones[2] is zones[3] and len({id(z) for z in zones}) == 3
    pages, numbers = 2 * 192 // PAGE, 2 * PAGE * 16
    assert [z.bytes for z in zones if z is not None] == [pages * numbers * 4 * (1 + n) for n in (2, 2, 2, 2, 1)]
    raw = sum(layer.recent.bytes + layer.recent.side for layer in memory.layers)
    tables = sum(z.side for z in {id(z): z for z in zones if z is not None}.values())
    assert memory.bytes == raw + tables + pages * numbers * 4 * (3 + 3 + 2) == rig.pools.ledger.now["device"]


def test_a_selection_keeps_a_summary_of_every_layer() -> None:
    """Each layer's bounds are those of its own keys, and the pages it reads are chosen by them."""
    rig = Rig(model())
    memory = rig.read(plan(rig.model, LayerMean(5, 1.0, RECENT), "quest(budget=64, dense=0)"), IDS[:N])
    for layer in memory.layers:
        for row, (k, _) in enumerate(layer.read_settled()):
            held = layer.rows()
            pages = held.table[row, : int(held.filled[row])].long()
            low = torch.stack([part.amin(0) for part in k.split(16)])
            got = layer.summaries["kmin"][pages].float()
            assert ((got <= low) & (got >= low - 2e-3 * low.abs() - 1e-3)).all()
    logits = rig.drip(memory, IDS[N:])
    alone = rig.run(Job(plan(rig.model, "quest(budget=64, dense=0) + headinfer(window=16)"), IDS, N))[0]
    near(logits, alone[N:])
    assert float((logits - dense(rig.model, IDS)[N:]).abs().max()) > 1e-3, "not everything was read"


# ---- life


def test_forks_share_pages_and_go_their_own_ways() -> None:
    rig = Rig(model())
    left = rig.read(plan(rig.model, MEAN), IDS[:N], 64)
    before = rig.pools.ledger.now["device"]
    right = left.fork()
    assert right[0].settled is right[1].settled is not left[1].settled
    assert rig.pools.ledger.now["device"] - before < 2000, "only tables"
    balanced(rig, left, right)
    for memory, seed in ((left, 1), (right, 2), (left, 3)):
        way = words(70, seed)
        plain = Plain(rig.model, [(0, 1), (2, 3), (4,)], MEAN.keep)
        if seed == 3:
            expected = plain.run([*IDS[:N], *words(70, 1), *way], N, 64)[N + 70 :]
        else:
            expected = plain.run([*IDS[:N], *way], N, 64)[N:]
        near(rig.drip(memory, way), expected)
    assert left.seen == right.seen + 70
    left.free()
    balanced(rig, right)
    right.free()
    assert not any(rig.pools.ledger.now.values())
    rig.pools.check()


def test_is_rolled_back_within_the_recent_zone() -> None:
    rig = Rig(model())
    memory = rig.read(plan(rig.model, MEAN), IDS[:N])
    rig.feed(memory, words(6, 5), "verify")
    memory.truncate(N)
    plain = Plain(rig.model, [(0, 1), (2, 3)], MEAN.keep)
    near(rig.drip(memory, IDS[N:]), plain.run(IDS, N)[N:])
    balanced(rig, memory)


@pytest.mark.parametrize("more", [(), ("quest(budget=64, dense=0)",), ("headinfer(window=8)",)])
def test_goes_to_disk_and_back(more: tuple[str, ...], tmp_path: Path) -> None:
    rig, other = Rig(model()), Rig(model())
    made = plan(rig.model, MEAN, *more)
    memory = rig.read(made, IDS[:N], 64)
    size = save(memory, tmp_path / "m", "x")
    assert size < sum(memory.tiers().values()) + 20_000, "a group is written once"
    again = load(tmp_path / "m", made, other.pools, other.engine._rotates, "x")
    assert again[0].settled is again[1].settled
    assert torch.equal(other.drip(again, IDS[N:]), rig.drip(memory, IDS[N:]))
    balanced(other, again)


def test_shares_a_step_with_other_plans() -> None:
    rig = Rig(model())
    made = plan(rig.model, MEAN)
    jobs = [
        Job(made, IDS, N, 64),
        Job(made, words(150, 4), 120, 50),
        Job(plan(rig.model), IDS, N, 90),
        Job(plan(rig.model, "streaming(sinks=4, window=16)"), IDS, 70),
    ]
    for job, (logits, memory) in zip(jobs, rig.together(jobs), strict=True):
        near(logits, Rig(model()).run(job)[0])
        memory.check()


def test_a_draft_under_it_is_verified() -> None:
    rig = Rig(model())
    codec = LayerMean(3, 0.9, RECENT)
    (item,) = parse("vericache(int8, horizon=4)")
    drafting = dataclasses.replace(item.method, inner=(codec,))  # type: ignore[call-arg]
    request = rig.answer(plan(rig.model, drafting), IDS[:N], max_tokens=24)
    assert request.error is None
    alone = rig.answer(plan(rig.model), IDS[:N], max_tokens=24)
    assert tokens(request) == tokens(alone) and request.actions["vericache"]["accepted"] > 0
    assert not any(rig.pools.ledger.now.values())


# ---- bytes


@pytest.mark.parametrize("more", [(), ("headinfer(window=8)",)])
@pytest.mark.parametrize(("prompt", "answer"), [(500, 10), (40, 90), (15, 2)])
@pytest.mark.parametrize("layers", [2, 5])
def test_the_estimate_is_near_the_truth(layers: int, prompt: int, answer: int, more: tuple[str, ...]) -> None:
    rig = Rig(model(), chunk=128)
    made = plan(rig.model, LayerMean(layers, window=RECENT), *more)
    guess = need(made, prompt, 128, answer)
    rig.answer(made, words(prompt), max_tokens=answer)
    peak = rig.pools.ledger.peak["device"]
    assert peak <= guess <= 2 * peak + 5 * 2 * 6 * 64 * 64, (peak, guess)


def test_a_step_is_foreseen_exactly() -> None:
    """The device's peak in each step is what `growth` said before it, where pages are all that grows."""
    rig = Rig(model(), chunk=64)
    made = plan(rig.model, LayerMean(3, window=RECENT))
    memory = rig.engine.empty(made)
    steps = [(first, min(first + 64, N), "prefill") for first in range(0, N, 64)] + [(i, i + 1, "decode") for i in range(N, N + MORE)]
    for a, b, phase in steps:
        ask = rig.ask(memory, IDS[a:b], phase, N if phase == "prefill" else None)  # type: ignore[arg-type]
        rig.pools.ledger.mark()
        before, grows = rig.pools.ledger.now["device"], memory.growth(ask.step)
        rig.feed(memory, IDS[a:b], phase, N if phase == "prefill" else None)  # type: ignore[arg-type]
        assert rig.pools.ledger.peak["device"] - before <= grows <= rig.pools.ledger.peak["device"] - before + 1000


def test_a_tight_budget_preempts_and_changes_nothing() -> None:
    rig = Rig(model())
    made = plan(rig.model, MEAN)
    wanted = [tokens(Rig(model()).answer(made, words(150, i), max_tokens=70)) for i in range(2)]
    rig = Rig(model(), budget=int(need(made, 150, 1 << 20, 70) * 1.2))
    requests = [rig.request(made, words(150, i), max_tokens=70) for i in range(2)]
    for request in requests:
        rig.engine.submit(request)
    while rig.engine.busy:
        rig.engine.step()
        if len(requests[0].choices) == 40 and requests[0].preempted == 0:
            rig.engine._preempt(requests[0])
    assert [tokens(r) for r in requests] == wanted and requests[0].preempted >= 1
    assert rig.pools.ledger.peak["device"] <= rig.engine.budget and not any(rig.pools.ledger.now.values())
