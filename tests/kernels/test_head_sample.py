"""Fused sampling: exact in distribution, the same token whatever the tiles, and Philox as published."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from longspool.kernels import head_sample
from longspool.kernels.head_sample.ref import gumbel, philox
from longspool.values.packed import Packed


def draws(h: torch.Tensor, head: Packed, temperature: float, count: int, first: int = 0, **kw: object) -> torch.Tensor:
    """Tokens of `count` draws of one stream from one state [W]."""
    many = h.expand(count, -1).contiguous()
    return head_sample(many, head, torch.full((count,), temperature), torch.full((count,), 11), first + torch.arange(count), **kw)[0]


def test_philox_gives_the_known_answers() -> None:
    """The first words of the generator's published known-answer test, for all zeros and all ones."""
    zero, ones = torch.tensor(0), torch.tensor(0xFFFFFFFF)
    assert [int(w) for w in philox((zero,) * 4, (zero,) * 2)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(w) for w in philox((ones,) * 4, (ones,) * 2)] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("kind", ["f32", "f16"])
@pytest.mark.parametrize(("temperature", "cap"), [(1.0, 0.0), (0.6, 0.0), (1.7, 3.0)])
def test_draws_follow_the_softmax(temperature: float, cap: float, kind: str) -> None:
    """A head of plain floats takes the reference, a packed one the fused kernel."""
    g = torch.Generator().manual_seed(0)
    w, h = (torch.randn(40, 32, generator=g) * 0.3).half().float(), torch.randn(32, generator=g)
    z = (w.double() @ h.double()).numpy()
    z = cap * np.tanh(z / cap) if cap else z
    expected = np.exp(z / temperature) / np.exp(z / temperature).sum()
    seen = np.bincount(draws(h, Packed.from_float(w, kind), temperature, 20_000, cap=cap).numpy(), minlength=40)
    assert chisquare(seen, expected * 20_000).pvalue > 0.01
    wrong = np.exp(z / (1.2 * temperature)) / np.exp(z / (1.2 * temperature)).sum()
    assert chisquare(seen, wrong * 20_000).pvalue < 1e-6


def test_tiles_threads_and_batch_do_not_change_a_token() -> None:
    g = torch.Generator().manual_seed(1)
    w, h = torch.randn(1000, 64, generator=g) * 0.2, torch.randn(64, generator=g)
    head = Packed.from_float(w, "int8")
    whole, dense = draws(h, head, 0.9, 64), Packed.from_float(head.unpack(), "f32")
    assert len(set(whole.tolist())) > 8
    for tile in (32, 96, 512, 4096):
        assert torch.equal(draws(h, dense, 0.9, 64, tile=tile), whole)
    assert torch.equal(torch.cat([draws(h, head, 0.9, 7), draws(h, head, 0.9, 57, first=7)]), whole)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(draws(h, head, 0.9, 64), whole)
    finally:
        torch.set_num_threads(before)


def test_shards_of_the_vocabulary_agree_with_the_whole() -> None:
    """The noise of a token is a function of its number: the best over shards, each with its own numbers, is the best of all."""
    g = torch.Generator().manual_seed(4)
    head, h = Packed.from_float(torch.randn(640, 64, generator=g) * 0.2, "int4"), torch.randn(64, generator=g)
    seeds, offsets = torch.full((32, 1), 11), torch.arange(32)[:, None]
    for count in (2, 4):
        found = []
        for lo in range(0, 640, 640 // count):
            ids = torch.arange(lo, lo + 640 // count)
            noisy = (head.part(lo, lo + 640 // count).unpack() @ h) / 0.9 + gumbel(seeds, offsets, ids[None])
            found.append((noisy.amax(1), ids[noisy.argmax(1)]))
        best, token = (torch.stack(part) for part in zip(*found, strict=True))
        assert torch.equal(token.gather(0, best.argmax(0)[None])[0], draws(h, head, 0.9, 32))


@pytest.mark.parametrize("kind", ["f32", "int8"])
def test_temperature_zero_is_argmax_and_logprobs_are_those_of_the_softmax(kind: str) -> None:
    g = torch.Generator().manual_seed(2)
    head, h = Packed.from_float(torch.randn(300, 32, generator=g), kind), torch.randn(5, 32, generator=g)
    temperature = torch.tensor([0.0, 0.0, 0.5, 1.0, 2.0])
    token, logprob = head_sample(h, head, temperature, torch.arange(5), torch.zeros(5, dtype=torch.int64))
    z = h.double() @ head.unpack().double().T
    assert torch.equal(token[:2], z[:2].argmax(1))
    expected = (z / torch.where(temperature > 0, temperature, 1.0)[:, None]).log_softmax(1).gather(1, token[:, None])[:, 0]
    assert torch.allclose(logprob.double(), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_draws_over_a_real_vocabulary(kind: str) -> None:
    """200,000 draws from 49,152 tokens; tokens of small chance are pooled so that each cell expects enough."""
    g = torch.Generator().manual_seed(3)
    w, h = (torch.randn(49152, 32, generator=g) * 0.6).half(), torch.randn(32, generator=g)
    p = (w.double() @ h.double()).softmax(0).numpy()
    head = Packed.from_float(w, kind)
    tokens = torch.cat([draws(h, head, 1.0, 500, first=first) for first in range(0, 200_000, 500)])
    seen = np.bincount(tokens.numpy(), minlength=49152)
    order = np.argsort(-p)
    cells = np.cumsum(p[order]) * 500 // 1
    observed, expected = np.bincount(cells.astype(int), seen[order]), np.bincount(cells.astype(int), p[order]) * 200_000
    keep = expected > 5
    assert chisquare(observed[keep], expected[keep] * observed[keep].sum() / expected[keep].sum()).pvalue > 0.01
