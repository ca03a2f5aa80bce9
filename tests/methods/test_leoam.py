"""LeoAM: boxes that hold, pieces that win though few are scored, and tiers that change nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspool.kernels.boxes import bounds, boxes
from longspool.methods.place.leoam import LeoAM
from methods.selecting import SHAPE, Sight, Watched, places, summarised
from toolbox import Job, Rig, tokens, words

IDS = words(430, 12)
RECIPE = "leoam(budget=128, window=16, device=96, host=200)"


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 64), st.sampled_from([8, 16, 64]), st.sampled_from([1e-6, 1.0, 300.0]), st.booleans())
def test_no_key_of_a_piece_exceeds_its_bound(seed: int, fill: int, piece: int, size: float, flat: bool) -> None:
    """Nor a piece's bound its chunk's; and no box is wider than rounding makes it."""
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(3, 12, 1 if flat else 64, generator=rng).expand(3, 12, 64).contiguous() * size
    kmin, kmax, low, high = boxes(k, torch.tensor([64, 64, fill], dtype=torch.int32), piece)
    q, near = torch.randn(1, 5, 12, generator=rng), 2e-5 * size
    got = bounds(q, kmin[None], kmax[None], low[None], high[None]).view(3, 64 // piece)
    logits = torch.einsum("gd,sdw->sgw", q[0].double(), k.double()).amax(1)
    whole = torch.maximum(q[0] * kmin.float()[:, None], q[0] * kmax.float()[:, None]).sum(-1).amax(1)
    step = (kmax.float() - kmin.float()) / 255
    for s in range(3):
        for j in range(64 // piece):
            own = slice(j * piece, min((j + 1) * piece, fill if s == 2 else 64))
            if own.start >= own.stop:
                continue
            assert float(logits[s, own].max()) - near <= float(got[s, j]) <= float(whole[s]) + near
            slack = step[s] * 1.01 + k[s].abs().amax() * 2e-3 + 2e-7  # a code, and what fp16 rounds
            assert bool((kmin[s].float() + low[s, j] * step[s] >= k[s, :, own].amin(1) - slack).all())
            assert bool((kmax[s].float() - high[s, j] * step[s] <= k[s, :, own].amax(1) + slack).all())


def deserts(count: int, rng: torch.Generator) -> Tensor:
    """Keys of which long runs are alike, as in a text those are that hardly matter."""
    centres = torch.randn(-(-count // 300), 1, 16, generator=rng) * 2
    return centres.expand(-1, 300, -1).flatten(0, 1)[:count] + torch.randn(count, 16, generator=rng) / 16


@pytest.mark.parametrize("spans", [(0, 1), (0, 1, 2), (0, 3, 4)])
@pytest.mark.parametrize(("chunk", "least"), [(64, 16), (128, 32), (16, 16)])
def test_finds_the_pieces_with_the_highest_bounds(spans: tuple[int, ...], chunk: int, least: int) -> None:
    """As a search over all pieces does, of which it scores fewer; the first piece is always among them."""
    rng = torch.Generator().manual_seed(len(spans) + chunk)
    method, requests = LeoAM(budget=16 + 8 * least, window=16, chunk=chunk, least=least), len(spans) - 1
    lengths = [1900, 1900, 1000, 430][: 2 * requests]
    keys = [deserts(n, rng) for n in lengths]
    store, rows = summarised(method, keys, chunk)
    view, q = Sight(store, spans), torch.randn(spans[-1], 4, 16, generator=rng)
    q[0] = torch.stack([keys[h // 2][700] for h in range(4)])  # the first looks for one run
    picked = method.select(q, rows, view).rows
    assert picked.grain == least
    for r, k in enumerate(keys):
        own = q[spans[r // 2] : spans[r // 2 + 1], 2 * (r % 2) : 2 * (r % 2) + 2].flatten(0, 1).double()
        score = []
        for start in range(0, len(k), least):
            page, j = int(rows.table[r, start // chunk]), start % chunk // least
            kmin, kmax = store["kmin"][page].double(), store["kmax"][page].double()
            low, high = (store[name][page, j] * (kmax - kmin) / 255 for name in ("low", "high"))
            score.append(float(torch.maximum(own * (kmin + low), own * (kmax - high)).sum(-1).max()))
        score[0] = float("inf")
        best = sorted(sorted(range(len(score)), key=lambda i: -score[i])[:8])
        assert places(rows, picked, r) == [t for i in best for t in range(i * least, min((i + 1) * least, len(k)))]
    for b in range(requests):
        flat = sum(-(-n // least) for n in lengths[2 * b : 2 * b + 2])
        assert view.counted[b]["boxes_flat"] == flat
        if b == 0 and spans[1] == 1:
            assert (view.counted[b]["boxes_scored"] < flat) == (chunk > least)


def test_a_budget_that_holds_everything_reads_everything() -> None:
    method = LeoAM(budget=16 + 320, window=16)
    store, rows = summarised(method, [torch.randn(320, 16), torch.randn(100, 16)], 64)
    picked = method.select(torch.randn(1, 4, 16), rows, Sight(store, (0, 1))).rows
    assert [places(rows, picked, r) for r in (0, 1)] == [list(range(320)), list(range(100))]


def test_sees_what_it_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Watched(monkeypatch, LeoAM, RECIPE, IDS, 330, 120)
    torch.testing.assert_close(run.logits, run.expected(), atol=1e-4, rtol=0)
    assert len(run.picked) == 300 and all(len(row) == 112 for rows in run.picked for row in rows)
    assert len({str(rows) for rows in run.picked}) > 50, "selections change"


@pytest.mark.parametrize("more", ["", " + int8", " + int4", " + streaming(sinks=8, window=190)"])
def test_the_tiers_change_nothing(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same selection over pages that are all on the device."""
    rig, wishes = Rig(), {"max_tokens": 40, "temperature": 0.7, "seed": 5}
    away, memory = rig.run(Job(rig.plan(RECIPE + more), IDS, 330, 120))
    assert memory.tiers()["disk"] > 0 and memory.actions["leoam"]["device_hits"] > 0
    answer = tokens(rig.answer(rig.plan(RECIPE + more), IDS[:330], **wishes))
    monkeypatch.setattr(LeoAM, "home", "device")
    rig = Rig()
    near, memory = rig.run(Job(rig.plan(RECIPE + more), IDS, 330, 120))
    assert memory.tiers()["disk"] == memory.tiers()["host"] == 0
    # Staged pieces and pages that are picked from are attended by different kernels: rounding, bounded as in the contract.
    torch.testing.assert_close(away, near, atol=1e-4, rtol=0)
    assert tokens(rig.answer(rig.plan(RECIPE + more), IDS[:330], **wishes)) == answer and len(set(answer)) > 10


def test_reads_little_from_the_disk() -> None:
    """Beside the boxes, which are on the device, a step reads what is not near yet."""
    rig = Rig()
    memory = rig.read(rig.plan("leoam(budget=128, window=16, device=512, host=4096)", torch.float16), IDS[:400])
    before = dict(memory.actions["leoam"])
    rig.drip(memory, IDS[400:430])
    did = {name: n - before.get(name, 0) for name, n in memory.actions["leoam"].items()}
    assert did["tokens_read"] == 30 * 3 * 2 * 112 and did["device_hits"] > did["device_misses"] == did["host_misses"] > 0
    assert did["bytes_from_disk"] < memory.tiers()["disk"], "thirty steps read less than there is once"


def test_boxes_cost_two_halves_and_two_bytes_a_piece() -> None:
    rig = Rig()
    memory = rig.read(rig.plan("leoam(window=16)", torch.float16), IDS[:400])
    pages, recent = 3 * 2 * (384 // 64), 3 * 2 * 64 * 2 * 16 * 2
    sides = sum(z.side for layer in memory.layers for z in layer.zones)
    assert memory.tiers() == {
        "device": sides + recent + pages * (2 * 16 * 2 + 4 * 2 * 16),
        "host": 0,
        "disk": pages * (64 * 2 * 16 * 2 + 4 * 8),
    }


def test_wrong_parameters_are_said() -> None:
    said = " ".join(LeoAM(chunk=48, least=20, budget=10, device=-1).check(SHAPE))
    assert all(word in said for word in ("chunk=48", "least=20", "budget=10", "device=-1"))
    assert LeoAM().check(SHAPE) == []
