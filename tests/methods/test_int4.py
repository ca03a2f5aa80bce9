"""int4 codes: numpy's rounding, half a step of error, and the bytes they say."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspool.memory import Ledger, Pool
from longspool.methods.encode.int4 import Int4
from longspool.values import Shape, Span
from toolbox import Rig, words

SHAPE = Shape(1, 4, 2, 16, 32, 10, 4096, 1.0, (None,))
PAGE = 64


def stored(seed: int, size: float, fill: int) -> tuple[Pool, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two pages of keys whose channels differ in scale, the second one partly filled."""
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(2, 16, PAGE, generator=rng) * torch.logspace(-2, 1, 16)[:, None] * size
    v = torch.randn(2, PAGE, 16, generator=rng) * size
    store = Pool(Int4().fields(SHAPE, PAGE, 1), PAGE, "device", Ledger(), 1 << 16)
    pages = torch.from_numpy(store.take(2)).long()
    for name in store.fields:
        store[name][:] = 77
    Int4().write(store, pages, torch.tensor([PAGE, fill], dtype=torch.int32), k, v, Span((0,)))
    return store, pages, k, v


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1e-3, 1.0, 50.0]), st.integers(1, PAGE))
def test_codes_are_numpys_and_half_a_step_off_at_most(seed: int, size: float, fill: int) -> None:
    store, pages, k, v = stored(seed, size, fill)
    k_read, v_read = Int4().read(store, pages, Span((0,)))
    for page, n in ((0, PAGE), (1, fill)):
        for x, back, axis in ((k[page, :, :n], k_read[page, :, :n], 1), (v[page, :n], v_read[page, :n], 1)):
            exact = x.numpy()
            low = exact.min(axis).astype(np.float16).astype(np.float32)
            step = ((exact.max(axis) - low) / np.float32(15)).astype(np.float16)
            scale = np.maximum(step, np.float16(2**-14)).astype(np.float32)[:, None]
            codes = np.clip(np.rint((exact - low[:, None]) / scale), 0, 15)
            np.testing.assert_array_equal(back.numpy(), codes.astype(np.float32) * scale + low[:, None])
            # The fp16 zero point may lie above the lowest value, and the fp16 scale may clip the highest.
            slip = np.abs(exact).max(axis)[:, None] * 2.0**-11 + 2.0**-24
            assert (np.abs(back.numpy() - exact) <= scale * (0.5 + 15 * 2.0**-11) + slip).all()


def test_takes_half_a_byte_a_value_and_four_a_group() -> None:
    rig = Rig()
    memory = rig.read(rig.plan("int4(window=0)", torch.float16), words(192))
    page = 64 * 16 + 2 * (2 * 16 + 2 * 64)
    zones = [memory[layer].settled for layer in range(3)]
    assert all(z is not None and z.bytes == 2 * 3 * page for z in zones)
    assert sum(layer.recent.bytes for layer in memory.layers) == 0


def test_keeps_the_window_raw() -> None:
    rig = Rig()
    memory = rig.read(rig.plan("int4(window=40)", torch.float16), words(200))
    assert [len(layer.pos) for layer in memory.layers] == [200 - 128] * 3
    assert memory.actions["int4"] == {"tokens": 3 * 2 * 128}
