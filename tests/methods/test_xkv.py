"""xKV: the best basis of a group of layers, stored once, and what a shared one gains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspool.engine.samples import Runs
from longspool.methods.encode.xkv import XKV, principal
from longspool.model.tiny import tiny
from longspool.plan import Item, resolve
from reference import dense_logits
from toolbox import Job, Rig, words

N, MORE = 230, 70
IDS = words(N + MORE, 8)
RECENT = 20
SETTLED = (N - RECENT) // 64 * 64


@pytest.mark.parametrize(("tokens", "width", "rank"), [(90, 40, 7), (30, 40, 7), (30, 40, 36), (64, 64, 64)])
def test_the_basis_is_numpys(tokens: int, width: int, rank: int) -> None:
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(1)) * torch.logspace(0, -2, width)
    vectors = principal(x, rank)
    u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
    best = (u[:, :rank] * s[:rank]) @ vt[:rank]
    torch.testing.assert_close(x.double() @ vectors @ vectors.T, best, atol=1e-6, rtol=0)
    assert vectors.shape == (width, rank)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("chunk", [N, 64])
def test_what_is_read_is_the_best_of_its_rank(layers: int, chunk: int) -> None:
    """Keys before rotation and values of the prompt's old tokens, cut to the rank by float64's SVD of the group."""
    rig, method = Rig(), XKV(layers, 0.25, 0.5, RECENT)
    memory = rig.read(rig.plan(method), IDS[:N], chunk)
    runs = Runs(rig.model, [IDS[:N]], ("bare", "values"), dtype=torch.float32)
    for group in ([0, 1, 2][i : i + layers] for i in range(0, 3, layers)):
        for part, (look, share) in enumerate(((runs.bare, 0.25), (runs.values, 0.5))):
            x = torch.cat([look(i)[:SETTLED].flatten(1) for i in group], 1).double()
            u, s, vt = torch.linalg.svd(x, full_matrices=False)
            rank = round(share * x.shape[1])
            best = ((u[:, :rank] * s[:rank]) @ vt[:rank]).view(SETTLED, len(group), 2, 16)
            for i, layer in enumerate(group):
                for head in range(2):
                    got = memory[layer].read_settled()[head][part]
                    torch.testing.assert_close(got.double(), best[:, i, head], atol=2e-2, rtol=0)
                    assert float((got - x.view(SETTLED, -1, 2, 16)[:, i, head]).abs().max()) > 0.1, "the loss is seen"


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3"])
def test_the_whole_rank_is_dense(kind: str, layers: int) -> None:
    rig = Rig(kind)
    logits, _ = rig.run(Job(rig.plan(f"xkv(layers={layers}, keys=1.0, values=1.0, window={RECENT})"), IDS, N, 64))
    torch.testing.assert_close(logits, dense_logits(rig.model, torch.tensor(IDS)), atol=1e-3, rtol=0)


def test_the_prompt_is_read_with_exact_attention_and_the_answer_stays_raw() -> None:
    rig = Rig()
    logits, memory = rig.run(Job(rig.plan(f"xkv(window={RECENT})"), IDS, N, 64))
    dense = dense_logits(rig.model, torch.tensor(IDS))
    torch.testing.assert_close(logits[:N], dense[:N], atol=1e-4, rtol=0)
    assert float((logits - dense)[N:].abs().max()) > 0.05
    assert all(layer.rows().length.tolist() == [SETTLED] * 2 and len(layer.pos) == len(IDS) - SETTLED for layer in memory.layers)


def test_a_later_prompt_on_the_same_memory_takes_the_basis_that_is_there() -> None:
    rig = Rig()
    memory = rig.read(rig.plan(f"xkv(window={RECENT})"), IDS[:N], 64)
    kept = memory[2].book
    assert kept is not None
    before = {name: kept.pool[name][int(kept.table[0, 0])].clone() for name in ("k", "v")}
    old = memory[0].read_settled()[0][0]
    rig.feed(memory, words(150, 3), "prefill", N + 150)
    assert all(torch.equal(kept.pool[name][int(kept.table[0, 0])], x) for name, x in before.items())
    assert memory[0].rows().length.tolist() == [(N + 150 - RECENT) // 64 * 64] * 2
    torch.testing.assert_close(memory[0].read_settled()[0][0][:SETTLED], old, atol=1e-6, rtol=0)
    memory.check()


def test_stores_ranks_by_pages_and_a_basis_once() -> None:
    rig, method = Rig(), XKV(3, 0.25, 0.5, RECENT)
    memory = rig.read(rig.plan(method, torch.float16), IDS[:N])
    width = 3 * 2 * 16
    zone, kept = memory[2].settled, memory[2].book
    assert zone is memory[0].settled and zone is not None and kept is not None
    assert kept.bytes == 2 * (width // 4 + width // 2) * width
    marks = (4 * 2 + 4 * 64) * SETTLED // 64  # where the basis is, and positions, as keys are bare
    assert zone.bytes == 2 * SETTLED * (width // 4 + width // 2) + marks


def related(seed: int) -> Rig:
    """A model whose layers have the same key and value matrices, but for some noise: what a token is, is alike in all of them."""
    of = tiny(num_hidden_layers=5, seed=seed)
    first = of.blocks[0].inward.weight
    assert isinstance(first, Tensor)
    for block in of.blocks[1:]:
        weight = block.inward.weight
        assert isinstance(weight, Tensor)
        weight[64:] = first[64:]
    return Rig(of)


def test_layers_that_are_alike_lose_less_together() -> None:
    """At equal shares of the width, five layers on one basis against each on its own, by the error of what is read."""
    rig = related(3)
    runs = Runs(rig.model, [IDS[:N]], ("bare", "values"), dtype=torch.float32)
    errors = []
    for layers in (1, 5):
        plan = resolve((Item(XKV(layers, 0.2, 0.2, RECENT)),), rig.model.shape, torch.float32)
        memory = rig.read(plan, IDS[:N])
        found = [memory[i].read_settled() for i in range(5)]
        true = [torch.stack([runs.bare(i)[:SETTLED], runs.values(i)[:SETTLED]]) for i in range(5)]
        got = [torch.stack([torch.stack([pair[part] for pair in heads], 1) for part in (0, 1)]) for heads in found]
        errors.append(sum(float((a - b).square().sum()) for a, b in zip(got, true, strict=True)))
    assert errors[1] < 0.9 * errors[0]
