"""int8 codes: numpy's rounding, half a step of error, and the bytes they say."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspool.memory import Ledger, Pool
from longspool.methods.encode.int8 import Int8
from longspool.values import Shape, Span
from toolbox import Rig, words

SHAPE = Shape(1, 4, 2, 16, 32, 10, 4096, 1.0, (None,))
PAGE = 64


def stored(seed: int, size: float, fill: int) -> tuple[Pool, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two pages of keys whose channels differ in scale, the second one partly filled."""
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(2, 16, PAGE, generator=rng) * torch.logspace(-2, 1, 16)[:, None] * size
    v = torch.randn(2, PAGE, 16, generator=rng) * size
    store = Pool(Int8().fields(SHAPE, PAGE, 1), PAGE, "device", Ledger(), 1 << 16)
    pages = torch.from_numpy(store.take(2)).long()
    for name in store.fields:
        store[name][:] = 77
    Int8().write(store, pages, torch.tensor([PAGE, fill], dtype=torch.int32), k, v, Span((0,)))
    return store, pages, k, v


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1e-3, 1.0, 50.0]), st.integers(1, PAGE))
def test_codes_are_numpys_and_half_a_step_off_at_most(seed: int, size: float, fill: int) -> None:
    store, pages, k, v = stored(seed, size, fill)
    k_read, v_read = Int8().read(store, pages, Span((0,)))
    for page, n in ((0, PAGE), (1, fill)):
        for x, back, axis in ((k[page, :, :n], k_read[page, :, :n], 1), (v[page, :n], v_read[page, :n], 1)):
            exact = x.numpy()
            scale = np.maximum((np.abs(exact).max(axis) / np.float32(127)).astype(np.float16), np.float16(2**-14)).astype(np.float64)[
                :, None
            ]
            codes = np.clip(np.rint(exact / scale.astype(np.float32)), -127, 127)
            np.testing.assert_array_equal(back.numpy(), (codes.astype(np.float32) * scale.astype(np.float32)))
            # Rounding the scale to fp16 may clip the largest value by 127 * 2^-11 of a step more.
            assert (np.abs(back.numpy() - exact) <= scale * (0.5 + 127 * 2.0**-11)).all()


def test_takes_a_byte_a_value_and_two_a_scale() -> None:
    rig = Rig()
    memory = rig.read(rig.plan("int8(window=0)", torch.float16), words(192))
    page = 2 * 64 * 16 + 2 * 16 + 2 * 64
    zones = [memory[layer].settled for layer in range(3)]
    assert all(z is not None and z.bytes == 2 * 3 * page for z in zones)
    assert sum(layer.recent.bytes for layer in memory.layers) == 0


def test_keeps_the_window_raw() -> None:
    rig = Rig()
    memory = rig.read(rig.plan("int8(window=40)", torch.float16), words(200))
    assert [len(layer.pos) for layer in memory.layers] == [200 - 128] * 3
    assert memory.actions["int8"] == {"tokens": 3 * 2 * 128}
