"""RetroInfer's clusters, zones and estimate against their definitions in float64."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import pytest
import torch
from torch import Tensor

from longspool.values import Shape
from toolbox import Job, Rig, attended_logits, causal, masked_logits, words

N, MORE, WINDOW, SINKS = 204, 8, 16, 8
OLD = (N - WINDOW) // 16 * 16  # 176, of which 168 are in clusters
IDS = words(N + MORE, 36)
BASE = f"retroinfer(window={WINDOW}, sinks={SINKS}, block=64, cluster=8, "


def bend(x: Tensor, shape: Shape) -> Tensor:
    return torch.tanh(x / shape.softcap) * shape.softcap if shape.softcap else x


def zones(q: Tensor, k: Tensor, v: Tensor, members: list[list[int]], shape: Shape, retrieve: float, estimate: float) -> Tensor:
    """One token's queries q [G, D] over the keys and values [S, D] that it sees, of which clusters hold `members`; [G, D]."""
    members = [m for m in members if m]
    mean = torch.stack([k[m].mean(0) for m in members])
    logits = bend(q @ mean.T * shape.scale, shape)  # [G, C]
    order = logits.softmax(1).sum(0).argsort(descending=True).tolist()
    exact, upto = ceil(retrieve * len(members) - 1e-9), ceil((retrieve + estimate) * len(members) - 1e-9)
    read = [*range(SINKS), *(j for c in order[:exact] for j in members[c]), *range(OLD, len(k))]
    weight = bend(q @ k[read].T * shape.scale, shape).exp()
    top, bottom = weight @ v[read], weight.sum(1, keepdim=True)
    for c in order[exact:upto]:
        near = logits[:, c : c + 1].exp()
        top, bottom = top + near * v[members[c]].sum(0), bottom + near * len(members[c])
    return top / bottom


def members_of(index: dict[str, Tensor], r: int) -> list[list[int]]:
    out, at = [], 0
    for size in index["size"][r].tolist():
        out.append(index["order"][r, at : at + size].tolist())
        at += size
    return out


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize(("retrieve", "estimate"), [(0.1, 0.4), (0.25, 0.75), (0.0, 0.5), (0.3, 0.0)])
def test_reads_estimates_and_leaves_out(kind: str, retrieve: float, estimate: float) -> None:
    rig = Rig(kind)
    shape = rig.model.shape
    plan = rig.plan(BASE + f"retrieve={retrieve}, estimate={estimate})")
    known = rig.read(plan, IDS[:N])

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = bend(torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(2, 1)) * shape.scale, shape)
        mask = causal(len(q), shape.windows[layer])
        out = torch.einsum("hnm,mhd->nhd", logits.masked_fill(~mask, -torch.inf).softmax(-1), v.repeat_interleave(2, 1))
        for i in range(N, N + MORE if shape.windows[layer] is None else N):
            for r in (0, 1):
                members = members_of(known[layer].index, r)
                out[i, 2 * r : 2 * r + 2] = zones(q[i, 2 * r : 2 * r + 2], k[: i + 1, r], v[: i + 1, r], members, shape, retrieve, estimate)
        return out

    expected = attended_logits(rig.model, IDS, attention)
    logits, memory = rig.run(Job(plan, IDS, N))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    layers = sum(w is None for w in shape.windows)
    count = [sum(bool(m) for m in members_of(m.index, r)) for m in known.layers if m.index for r in (0, 1)]
    parts = sum(ceil((retrieve + estimate) * c - 1e-9) - ceil(retrieve * c - 1e-9) for c in count)
    assert len(count) == 2 * layers
    assert memory.actions["retroinfer"].get("estimated", 0) == MORE * parts
    assert memory.actions["retroinfer"]["tokens_stored"] == layers * MORE * 2 * OLD


def cosine(x: Tensor, c: Tensor) -> Tensor:
    return (x @ (c / c.norm(dim=1, keepdim=True).clamp_min(1e-12)).T).argmax(1)


def test_clusters_are_found_in_segments_and_joined_over_all() -> None:
    """An independent run: centred keys, evenly spaced starts in each of three segments, spherical rounds, one last pass over all."""
    rig = Rig()
    memory = rig.read(rig.plan(BASE + "segment=56, rounds=4)"), IDS[:N])
    for layer in range(3):
        for r, (keys, values) in enumerate(memory[layer].read_settled()):
            k, v = keys[SINKS:].double(), values[SINKS:].double()
            x, found = k - k.mean(0), []
            for part in x.split(56):  # 168 tokens, about 21 clusters: 24 is a multiple of 8 and of 3
                c = torch.stack([part[i * 56 // 8] for i in range(8)])
                for _ in range(4):
                    label = cosine(part, c)
                    c = torch.stack([part[label == i].mean(0) if bool((label == i).any()) else c[i] for i in range(8)])
                found.append(c)
            label = cosine(x, torch.cat(found))
            index = memory[layer].index
            assert index["size"].shape[1] == 24
            assert [sorted(m) for m in members_of(index, r)] == [(torch.nonzero(label == c)[:, 0] + SINKS).tolist() for c in range(24)]
            for c, members in enumerate(members_of(index, r)):
                if members:
                    torch.testing.assert_close(index["key"][r, c].double(), k[[j - SINKS for j in members]].mean(0), atol=1e-5, rtol=0)
                    torch.testing.assert_close(index["value"][r, c].double(), v[[j - SINKS for j in members]].mean(0), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("retrieve", "estimate", "cluster"), [(0.999, 0.0, 8), (0.0, 1.0, 1), (0.25, 0.75, 1)])
def test_limits_are_dense_attention(retrieve: float, estimate: float, cluster: int) -> None:
    """Everything read; every token a cluster of its own, and all of them estimated."""
    rig = Rig()
    expected, _ = masked_logits(rig.model, IDS, lambda layer, trace: causal(N + MORE))
    recipe = f"retroinfer(window={WINDOW}, sinks={SINKS}, block=64, cluster={cluster}, retrieve={retrieve}, estimate={estimate})"
    logits, memory = rig.run(Job(rig.plan(recipe), IDS, N))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert memory.actions["retroinfer"].get("estimated", 0) == (3 * MORE * 2 * (OLD - SINKS) * estimate if cluster == 1 else 0)


def test_more_estimate_is_nearer_to_dense() -> None:
    """The card's sweep: the error falls with every larger share that is estimated, though random keys hardly cluster."""
    rig = Rig()
    dense, _ = masked_logits(rig.model, IDS, lambda layer, trace: causal(N + MORE))
    errors = []
    for estimate in (0.0, 0.3, 0.6, 0.9):
        logits, _ = rig.run(Job(rig.plan(BASE + f"retrieve=0.1, estimate={estimate})"), IDS, N))
        errors.append(float((logits - dense)[N:].norm()))
    assert all(a > b for a, b in pairwise(errors))


def test_an_estimate_never_weighs_more_than_its_tokens() -> None:
    """Jensen's inequality, on the clusters that are made of real keys."""
    rig = Rig()
    memory = rig.read(rig.plan(BASE + "retrieve=0.1)"), IDS[:N])
    q = torch.randn(50, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    for r, (k, _) in enumerate(memory[1].read_settled()):
        for c, members in enumerate(members_of(memory[1].index, r)):
            if members:
                exact = (q @ k[members].double().T).exp().sum(1)
                assert bool(((q @ memory[1].index["key"][r, c].double()).exp() * len(members) <= exact * (1 + 1e-5)).all())


def test_what_settles_later_waits_and_becomes_clusters() -> None:
    rig = Rig()
    memory = rig.read(rig.plan(f"retroinfer(window={WINDOW}, sinks={SINKS}, block=100, cluster=8)"), IDS[:N])
    clusters, waited = memory[0].index["size"].shape[1], set()
    for token in words(160, 9):
        rig.feed(memory, [token])
        waited.add(int(memory[0].rows().length[0]) - int(memory[0].index["done"][0]))
    assert waited == {0, 64}
    index = memory[0].index
    assert index["size"].shape[1] == clusters + 16 and int(index["done"][0]) == int(memory[0].rows().length[0])
    for r in (0, 1):
        assert sorted(j for m in members_of(index, r) for j in m) == list(range(SINKS, int(index["done"][r])))


def test_a_short_prompt_is_read_whole() -> None:
    rig = Rig()
    expected, _ = masked_logits(rig.model, IDS, lambda layer, trace: causal(N + MORE))
    logits, memory = rig.run(Job(rig.plan(f"retroinfer(window={WINDOW}, block=512)"), IDS, N))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert not any(layer.index for layer in memory.layers)
