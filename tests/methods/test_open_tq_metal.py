"""Open-TQ-Metal: numpy's codes by group, attention that equals decoding first, and what a model's logit scale does to polar codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from longspool.kernels.codes import decode_groups, encode_groups
from longspool.memory import Ledger, Pool
from longspool.methods.encode.open_tq_metal import LEVELS, OpenTQMetal
from longspool.values import Shape, Span
from reference import dense_logits
from toolbox import Job, Rig, model, words

SHAPE = Shape(1, 4, 2, 64, 128, 10, 4096, 0.125, (None,))
PAGE, N = 64, 200
IDS = words(N + 40, 8)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def back(method: OpenTQMetal, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Pool]:
    """k [S, D, W] and v [S, W, D] written and read again."""
    pool = Pool(method.fields(SHAPE, PAGE, 1), PAGE, "device", Ledger(), 1 << 20)
    pages = torch.from_numpy(pool.take(len(k))).long()
    fill = torch.full((len(k),), PAGE, dtype=torch.int32)
    method.write(pool, pages, fill, k, v, Span((0,)))
    return *method.read(pool, pages, Span((0,))), pool


@pytest.mark.parametrize("group", [16, 32, 64])
def test_codes_are_numpys_by_group(group: int) -> None:
    k, v = noise(1, 2, 64, PAGE) * torch.logspace(-2, 1, 64)[:, None], noise(2, 2, PAGE, 64)
    k_read, v_read, _ = back(OpenTQMetal(group), k, v)
    for x, read in ((k.transpose(1, 2), k_read.transpose(1, 2)), (v, v_read)):
        exact = x.reshape(-1, 64 // group, group).numpy()
        low = exact.min(-1, keepdims=True).astype(np.float16).astype(np.float32)
        step = ((exact.max(-1, keepdims=True) - low) / np.float32(15)).astype(np.float16)
        scale = np.maximum(step, np.float16(2**-14)).astype(np.float32)
        codes = np.clip(np.rint((exact - low) / scale), 0, 15)
        np.testing.assert_array_equal(read.reshape(exact.shape).numpy(), codes * scale + low)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_fused_equals_decoding_first(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(kind)
    fused = rig.run(Job(rig.plan("open_tq_metal(window=16)"), IDS, N, 64))[0]
    monkeypatch.setattr(OpenTQMetal, "attend", lambda self, *args: None)
    plain = rig.run(Job(rig.plan("open_tq_metal(window=16)"), IDS, N, 64))[0]
    torch.testing.assert_close(fused, plain, atol=1e-4, rtol=0)
    assert float((fused - dense_logits(rig.model, torch.tensor(IDS))).abs().max()) > 0.02, "the loss is seen"


def test_takes_five_bits_a_number_in_groups_of_32() -> None:
    method = OpenTQMetal(32)
    _, _, pool = back(method, noise(1, 1, 64, PAGE), noise(2, 1, PAGE, 64))
    assert pool.page_bytes * 8 == 2 * PAGE * 64 * 5 and method.cost(SHAPE).device == pool.page_bytes / PAGE
    polar = OpenTQMetal(form="polar")
    _, _, pool = back(polar, noise(1, 1, 64, PAGE), noise(2, 1, PAGE, 64))
    assert pool.page_bytes == 2 * PAGE * (32 + 2) == polar.cost(SHAPE).device * PAGE


def test_smaller_groups_lose_less() -> None:
    x = noise(3, 4, PAGE, 64) * torch.logspace(-1, 0.5, 64)
    errors = [float((decode_groups(*encode_groups(x, g)) - x).norm()) for g in (16, 32, 64)]
    assert errors[0] < 0.8 * errors[1] < 0.8 * 0.9 * errors[2]


def test_the_levels_are_those_of_the_least_error() -> None:
    """Each level is the mean of a normal distribution between the two middles next to it, and the error is Max's 0.009497."""
    half = torch.tensor(LEVELS, dtype=torch.float64)
    levels = torch.cat([-half.flip(0), half])
    cuts = torch.cat([torch.tensor([-torch.inf]), (levels[1:] + levels[:-1]) / 2, torch.tensor([torch.inf])])
    density = torch.exp(-cuts.square() / 2) / (2 * torch.pi) ** 0.5
    share = torch.special.ndtr(cuts).diff()
    torch.testing.assert_close(-density.diff() / share, levels, atol=3e-4, rtol=0)
    assert abs(float(1 - (share * levels.square()).sum()) - 0.009497) < 1e-5


def test_polar_keeps_lengths_and_loses_what_theory_says() -> None:
    k, v = noise(4, 3, 64, PAGE), noise(5, 3, PAGE, 64) * 7
    _, v_read, _ = back(OpenTQMetal(form="polar"), k, v)
    relative = ((v_read - v).norm(dim=-1) / v.norm(dim=-1)).square().mean()
    assert 0.0085 < float(relative) < 0.0105
    hot = torch.zeros(1, PAGE, 64)
    hot[..., 5] = 100.0
    _, read, _ = back(OpenTQMetal(form="polar"), k[:1], hot)
    assert 0.0 < float((read - hot).norm() / hot.norm()) < 0.2, "a single loud dim is spread over all"


def test_a_larger_scale_of_logits_hurts_directions_more() -> None:
    """The paper's analysis: a logit's error is scale * |q| |k| * (error of the direction). At scale 1, without 1/sqrt(D), it is sqrt(D)
    times as large, for either codec, and the weights diverge far more. On even keys five affine bits beat four and a quarter polar ones."""
    d, t, heads = 64, 4096, 32
    k, q = noise(6, t // PAGE, PAGE, d) * 1.5, noise(7, heads, d)
    keys = k.reshape(t, d)
    read = {f: back(OpenTQMetal(form=f), k.transpose(1, 2), k)[0].transpose(1, 2).reshape(t, d) for f in ("affine", "polar")}  # type: ignore[arg-type]
    exact = q @ keys.T

    def error(form: str, scale: float) -> float:
        return float((scale * (q @ read[form].T - exact)).square().mean().sqrt())

    def divergence(form: str, scale: float) -> float:
        p, r = (scale * exact).log_softmax(-1), (scale * (q @ read[form].T)).log_softmax(-1)
        return float((p.exp() * (p - r)).sum(-1).mean())

    direction = float(((read["polar"] - keys).norm(dim=1) / keys.norm(dim=1)).mean())
    for scale in (d**-0.5, 1.0):
        predicted = scale * float(q.norm(dim=1).square().mean().sqrt()) * float(keys.norm(dim=1).mean()) * direction / d**0.5
        assert 0.8 < error("polar", scale) / predicted < 1.25
        assert error("polar", scale) > 1.1 * error("affine", scale)
    assert abs(error("polar", 1.0) / error("polar", d**-0.5) - d**0.5) < 1e-2
    assert divergence("polar", 1.0) > 10 * divergence("polar", d**-0.5)
    assert divergence("polar", 1.0) > 1.2 * divergence("affine", 1.0)


@pytest.mark.parametrize("recipe", ["open_tq_metal(form='polar', window=16)", "open_tq_metal(form='polar', window=16, seed=3)"])
def test_polar_codes_are_attended(recipe: str) -> None:
    rig = Rig()
    logits, dense = rig.run(Job(rig.plan(recipe), IDS, N))[0][N:], dense_logits(model(), torch.tensor(IDS))[N:]
    assert 0.01 < float((logits - dense).norm() / dense.norm()) < 0.3


def test_codes_of_enough_bits_would_be_dense() -> None:
    """Values on a grid that four bits can tell are kept but for the rounding of the scale."""
    codes = torch.randint(0, 16, (1, PAGE, 64), generator=torch.Generator().manual_seed(1)).float()
    codes[..., ::32], codes[..., 1::32] = 0.0, 15.0
    x = codes * 0.25 - 2
    k_read, v_read, _ = back(OpenTQMetal(), x.transpose(1, 2).contiguous(), x)
    torch.testing.assert_close(v_read, x, atol=0, rtol=0)
    torch.testing.assert_close(k_read.transpose(1, 2), x, atol=0, rtol=0)
