"""ClusterKV's clusters against k-means written out in numpy, and its recall against a plain loop over clusters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from longspool.kernels.clusters import recall
from longspool.memory import Memory
from toolbox import Job, Rig, Trace, causal, masked_logits, words

N, MORE, WINDOW, SINKS = 200, 10, 16, 5
OLD = (N - WINDOW) // 16 * 16
IDS = words(N + MORE, 35)
RECIPE = f"clusterkv(window={WINDOW}, sinks={SINKS}, dense=1, cluster=12, block=64, budget="


def kmeans(k: np.ndarray, start: np.ndarray, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels after `rounds` of updates by cosine, and the plain means of their members."""
    centroid = start.copy()

    def nearest() -> np.ndarray:
        return (k @ (centroid / np.linalg.norm(centroid, axis=1, keepdims=True)).T).argmax(1)

    for _ in range(rounds):
        label = nearest()
        for c in range(len(centroid)):
            if (label == c).any():
                centroid[c] = k[label == c].mean(0)
    label = nearest()
    return label, np.stack([k[label == c].mean(0) if (label == c).any() else np.zeros(k.shape[1]) for c in range(len(centroid))])


def clusters(memory: Memory, layer: int, r: int) -> list[tuple[Tensor, list[int]]]:
    """A row's clusters as its index tells them: mean and members."""
    index, out, at = memory[layer].index, [], 0
    for c, size in enumerate(index["size"][r].tolist()):
        out.append((index["mean"][r, c], index["order"][r, at : at + size].tolist()))
        at += size
    return out


def test_clusters_are_those_of_k_means_by_cosine() -> None:
    rig = Rig()
    memory = rig.read(rig.plan(RECIPE + "60, seed=3)"), IDS[:N])
    assert not memory[0].index, "a dense layer has none"
    for layer in (1, 2):
        for r in (0, 1):
            k = memory[layer].read_settled()[r][0][SINKS:].double().numpy()
            count = len(k) // 12
            start = torch.randperm(len(k), generator=torch.Generator().manual_seed(3 + 64 * layer + r))[:count]
            label, mean = kmeans(k, k[start.numpy()], 20)
            found = clusters(memory, layer, r)
            assert [sorted(m) for _, m in found] == [(np.flatnonzero(label == c) + SINKS).tolist() for c in range(count)]
            np.testing.assert_allclose(np.stack([m.numpy() for m, _ in found]), mean, atol=1e-5)


def recalled(q: Tensor, found: list[tuple[Tensor, list[int]]], room: int) -> list[int]:
    """Whole clusters by the inner product with their means, the last one cut."""
    out: list[int] = []
    for _, members in sorted(found, key=lambda c: -float(c[0].double() @ q)):
        out += members
    return out[:room]


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("budget", [40, 61])
def test_clusters_are_recalled_until_the_budget_is_full(per_head: bool, budget: int) -> None:
    rig = Rig()
    plan = rig.plan(RECIPE + f"{budget}, per_head={per_head})")
    known = rig.read(plan, IDS[:N])

    def seen(layer: int, trace: Trace) -> Tensor:
        mask = causal(N + MORE).repeat(4, 1, 1)
        for i in range(N, N + MORE if layer else N):
            for h in range(4):
                q = trace.q[i, h] if per_head else trace.q[i, h // 2 * 2 : h // 2 * 2 + 2].mean(0)
                kept = {*range(SINKS), *recalled(q, clusters(known, layer, h // 2), budget - SINKS)}
                mask[h, i, [j for j in range(OLD) if j not in kept]] = False
        return mask

    expected, _ = masked_logits(rig.model, IDS, seen)
    logits, memory = rig.run(Job(plan, IDS, N))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    rows = 4 if per_head else 2
    first = MORE * OLD * 2  # layer 0 reads everything
    assert memory.actions["clusterkv"] == {
        "tokens_read": 2 * MORE * rows * budget + first,
        "tokens_stored": 2 * MORE * rows * OLD + first,
    }


def test_a_token_a_cluster_is_the_search_over_tokens() -> None:
    rig, budget = Rig(), 40

    def seen(layer: int, trace: Trace) -> Tensor:
        mask = causal(N + MORE).repeat(4, 1, 1)
        for h in range(4):
            gone = (trace.q[N:, h] @ trace.k[SINKS:OLD, h // 2].T).argsort(1, descending=True)[:, budget - SINKS :]
            mask[h, N:, SINKS:OLD] = torch.ones(MORE, OLD - SINKS, dtype=torch.bool).scatter(1, gone, False)
        return mask

    expected, _ = masked_logits(rig.model, IDS, seen)
    recipe = f"clusterkv(budget={budget}, window={WINDOW}, sinks={SINKS}, dense=0, cluster=1, rounds=2)"
    torch.testing.assert_close(rig.run(Job(rig.plan(recipe), IDS, N))[0], expected, atol=1e-4, rtol=0)


def test_what_settles_later_waits_is_read_and_becomes_clusters_of_its_own() -> None:
    """Decoded tokens settle 64 at a time; those that are in no cluster yet are read beside the budget."""
    rig, budget = Rig(), 40
    memory = rig.read(rig.plan(f"clusterkv(budget={budget}, window={WINDOW}, sinks={SINKS}, dense=0, cluster=12, block=100)"), IDS[:N])
    before = {name: x.clone() for name, x in memory[1].index.items()}
    told = []
    for token in words(160, 9):
        length, done = int(memory[1].rows().length[0]), int(memory[1].index["done"][0])
        read = memory.actions["clusterkv"].get("tokens_read", 0)
        rig.feed(memory, [token])
        told.append((memory.actions["clusterkv"]["tokens_read"] - read, 3 * 4 * (budget + length - done)))
    assert all(a == b for a, b in told) and len({a for a, _ in told}) == 2, "sometimes 64 tokens wait"
    index, length = memory[1].index, int(memory[1].rows().length[0])
    new = int(index["done"][0]) - int(before["done"][0])
    assert new == 128 and index["done"].tolist() == [length] * 2
    assert index["size"].shape[1] == before["size"].shape[1] + new // 6
    for r in (0, 1):
        n = int(before["size"][r].sum())
        assert torch.equal(index["order"][r, :n], before["order"][r, :n]), "old clusters are untouched"
        assert torch.equal(index["mean"][r, : before["mean"].shape[1]], before["mean"][r])
        assert sorted(index["order"][r].tolist()) == list(range(SINKS, length)), "every token is in one cluster"
        for mean, members in clusters(memory, 1, r):
            if members:
                torch.testing.assert_close(mean, memory[1].read_settled()[r][0][members].mean(0), atol=1e-5, rtol=0)


def test_rows_of_different_lengths_have_their_own_clusters() -> None:
    rig = Rig()
    memory = rig.read(
        rig.plan("adakv(snapkv(budget=150, window=16)) + clusterkv(budget=40, window=16, sinks=5, cluster=12, dense=0)"), IDS[:N]
    )
    length = [layer.rows().length.tolist() for layer in memory.layers]
    assert any(a != b for a, b in length)
    for layer in range(3):
        for r in (0, 1):
            assert sorted(j for _, members in clusters(memory, layer, r) for j in members) == list(range(5, length[layer][r]))
    rig.drip(memory, IDS[N:])
    assert memory.actions["clusterkv"]["tokens_read"] == MORE * sum(2 * min(40, n) for row in length for n in row)


def test_recall_cuts_the_last_cluster() -> None:
    rank = torch.tensor([[2, 0, 1], [1, 2, 0]])
    size, order = torch.tensor([[2, 0, 3], [1, 1, 2]]), torch.tensor([[7, 8, 4, 5, 6], [0, 9, 3, 2, -1]])
    got = recall(rank, size, order, torch.tensor([4, 9]))
    assert [sorted(row.tolist()) for row in got] == [[4, 5, 6, 7], [0, 2, 3, 9]]
    assert recall(rank, size, order, torch.tensor([4, 1])).tolist() == [[4, 5, 6, 7], [9, -1, -1, -1]]
