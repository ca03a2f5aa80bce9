"""KVTC: bits by dynamic programming against brute force, bytes that decode to what they encode, and a memory that is mostly code."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longspool.engine.samples import Runs
from longspool.kernels.transform import BITS, SLACK, Layout, allot, pca
from longspool.memory.file import save
from longspool.methods.encode.kvtc import KVTC
from longspool.plan import Item, resolve
from reference import dense_logits
from toolbox import Job, Rig, fitted, model, words

N, MORE, RECENT = 230, 40, 20
IDS = words(N + MORE, 8)


def falling(seed: int, n: int, width: int, decay: float = 1.5) -> Tensor:
    """Coordinates in order of falling variance."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=rng) * torch.logspace(0, -decay, width)


def loss(d: Tensor, groups: list[tuple[int, int]]) -> float:
    """A twelfth of each group's squared step a coordinate, by token, and what is dropped."""
    at, total = 0, 0.0
    for size, bits in groups:
        part = d[:, at : at + size].double()
        step = (part.amax(1) - part.amin(1)) / (2**bits - 1)
        total += float(step.square().mean()) / 12 * size
        at += size
    return total + float(d[:, at:].double().square().sum(1).mean())


def size_of(groups: list[tuple[int, int]]) -> int:
    return sum(size * bits + 32 for size, bits in groups)


@pytest.mark.parametrize(("width", "room"), [(5, 8 + SLACK), (6, 14 + SLACK), (6, 22 + SLACK), (4, 40 + SLACK)])
def test_the_allotment_is_that_of_brute_force(width: int, room: int) -> None:
    d = falling(width + room, 50, width, 1.0)
    best = float("inf")
    for count in range(1, width + 1):
        for sizes in itertools.product((1, 2, 4), repeat=count):
            if sum(sizes) <= width:
                for bits in itertools.product(BITS, repeat=count):
                    groups = list(zip(sizes, bits, strict=True))
                    if size_of(groups) <= 8 * (room - SLACK):
                        best = min(best, loss(d, groups))
    found = [(int(s), int(b)) for s, b in allot(d, room).tolist()]
    assert size_of(found) <= 8 * (room - SLACK)
    assert loss(d, found) == pytest.approx(best, rel=1e-5)


def test_the_allotment_beats_the_same_bits_for_all() -> None:
    d = falling(1, 300, 256)
    room = 256 * 2 // 8
    found = [(int(s), int(b)) for s, b in allot(d, room).tolist()]
    even = [(16, 2)] * ((8 * (room - SLACK)) // (16 * 2 + 32))
    assert size_of(even) <= 8 * (room - SLACK) and loss(d, found) < 0.5 * loss(d, even)
    widths = [b for _, b in found]
    assert max(widths) > min(widths) and sum(s for s, _ in found) < 256, "more bits ahead, none behind"


@pytest.mark.parametrize("groups", [((1, 8), (2, 4), (4, 2), (8, 4), (1, 2)), ((16, 2),), ((3, 8),)])
def test_bytes_decode_to_what_they_encode(groups: tuple[tuple[int, int], ...]) -> None:
    layout, d = Layout(groups), falling(7, 40, sum(s for s, _ in groups), 0.5)
    raw = layout.encode(d)
    assert raw.dtype == torch.uint8 and raw.shape[1] <= 4 * len(groups) + sum(
        -(-sum(s for s, b in groups if b == w) * w // 8) for w in BITS
    )
    padded = torch.nn.functional.pad(raw, (0, 5), value=99)
    back, at = layout.decode(padded), 0
    for size, bits in groups:
        part = d[:, at : at + size].double()
        step = (part.amax(1) - part.amin(1)) / (2**bits - 1)
        slip = part.abs().amax(1) * 2.0**-10 + 2.0**-13
        assert ((back[:, at : at + size] - part).abs().amax(1) <= step * 0.51 + slip).all()
        at += size
    assert torch.equal(layout.decode(layout.encode(back)), layout.decode(layout.encode(layout.decode(layout.encode(back)))))


@pytest.mark.parametrize("n", [300, 30])
def test_directions_are_those_of_most_variance(n: int) -> None:
    x = falling(2, n, 40) @ torch.linalg.qr(torch.randn(40, 40, generator=torch.Generator().manual_seed(1)))[0] + 3
    mean, basis = pca(x, 12)
    torch.testing.assert_close(mean, x.mean(0))
    torch.testing.assert_close(basis.T @ basis, torch.eye(12), atol=1e-4, rtol=0)
    _, s, _ = torch.linalg.svd((x - x.mean(0)).double(), full_matrices=False)
    torch.testing.assert_close(((x - mean) @ basis).square().sum(0).sqrt().double(), s[:12], atol=1e-3, rtol=1e-3)


def test_a_fit_is_a_transform_of_all_layers() -> None:
    fit = fitted(model(), KVTC(4.0))
    for name in ("k", "v"):
        groups = fit[f"{name}.groups"]
        assert fit[f"{name}.mean"].shape == (96,) and fit[f"{name}.basis"].shape == (96, int(groups[:, 0].sum()))
        assert size_of([(int(s), int(b)) for s, b in groups.tolist()]) <= 96 * 16 / 4


def test_loses_less_the_more_it_may_take() -> None:
    rig, dense = Rig(), dense_logits(model(), torch.tensor(IDS))
    errors = []
    for ratio in (1.6, 3.0, 8.0):
        logits, memory = rig.run(Job(rig.plan(KVTC(ratio, 4, RECENT)), IDS, N))
        errors.append(float((logits - dense)[N:].norm() / dense[N:].norm()))
        torch.testing.assert_close(logits[:N], dense[:N], atol=1e-4, rtol=0)
        memory.check()
    assert errors == sorted(errors) and errors[0] < 0.35 * errors[2]


def test_sinks_come_back_as_they_were() -> None:
    rig = Rig()
    memory, raw = rig.read(rig.plan(KVTC(8.0, 4, RECENT)), IDS[:N], 64), rig.read(rig.plan("self_extend(group=1)"), IDS[:N])
    held = memory[0].read_settled()
    for (k, v), (bare, value) in zip(held, raw[0].read_recent(0, 192), strict=True):
        torch.testing.assert_close(k[:4], bare[:4], atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(v[:4], value[:4], atol=2e-3, rtol=2e-3)
        assert float((k - bare)[4:].abs().mean()) > 0.01


def test_takes_the_share_that_it_says_and_less_on_disk(tmp_path: Path) -> None:
    rig = Rig()
    memory = rig.read(rig.plan(KVTC(8.0, 4, RECENT), torch.float16), words(600))
    zone = memory[2].settled
    assert zone is memory[0].settled and zone is not None
    pages = (600 - RECENT) // 64
    assert zone.bytes == pages * (64 * 2 * (96 * 2 // 8) + 8 + 64 * 4)
    before = sum(memory.tiers().values())
    assert save(memory, tmp_path / "m", "x") < before + 4096


def test_some_of_the_layers_take_their_rows_of_the_basis() -> None:
    """With enough coordinates they lose little more than all layers do."""
    rig = Rig()
    whole = rig.read(rig.plan(KVTC(1.6, 4, RECENT)), IDS[:N])
    plan = resolve((Item(KVTC(1.6, 4, RECENT), 0, 1),), rig.model.shape, torch.float32)
    some = rig.read(plan, IDS[:N])
    assert [p.joint for p in plan.layers] == [(0, 1), (0, 1), ()]
    runs = Runs(rig.model, [IDS[:N]], ("bare", "values"), dtype=torch.float32)
    for layer in (0, 1):
        true = runs.bare(layer)[:192]
        errors = []
        for memory in (whole, some):
            got = torch.stack([k for k, _ in memory[layer].read_settled()], 1)
            errors.append(float((got - true).norm() / true.norm()))
        assert errors[0] < 0.2 and errors[1] < 0.5
