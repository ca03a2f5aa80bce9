"""Packed matrices: the bits of GGUF blocks, the error of packing, parts and stacks, and products against float64."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from longspool.errors import ModelError
from longspool.kernels import implementation, matmul, unpack
from longspool.values import Packed
from longspool.values.packed import FLOATS, FORMS, Kind

BLOCKS: dict[Kind, gguf.GGMLQuantizationType] = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
}
KINDS: tuple[Kind, ...] = (*FORMS, *FLOATS)  # type: ignore[assignment]


def random(rows: int, cols: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def blocks(kind: Kind, rows: int, cols: int) -> tuple[Packed, Tensor]:
    """A matrix quantized by the gguf package, and what that package reads from it."""
    raw = gguf.quants.quantize(random(rows, cols).numpy(), BLOCKS[kind])
    return Packed.from_blocks(kind, torch.from_numpy(raw), cols), torch.from_numpy(gguf.quants.dequantize(raw, BLOCKS[kind]))


def make(kind: Kind, rows: int, cols: int, seed: int = 0) -> Packed:
    if kind == "q4_0":
        return blocks(kind, rows, cols)[0]
    return Packed.from_float(random(rows, cols, seed), kind)


@pytest.mark.parametrize("rows", [1, 31, 32, 70])
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_read_to_the_bit(kind: Kind, rows: int) -> None:
    w, expected = blocks(kind, rows, 96)
    assert torch.equal(w.unpack(), expected)
    assert torch.equal(unpack(w), expected)
    ids = torch.tensor([rows - 1, 0, rows // 2, 0])
    assert torch.equal(w.take(ids), expected[ids])
    assert w.take(torch.empty(0, dtype=torch.int64)).shape == (0, 96)


@pytest.mark.parametrize("kind", BLOCKS)
def test_storage_is_that_of_the_blocks(kind: Kind) -> None:
    w = blocks(kind, 64, 96)[0]
    assert w.nbytes == 64 * 3 * FORMS[kind].block == sum(t.untyped_storage().nbytes() for t in (w.codes, w.scale, w.low) if t is not None)


def test_a_view_into_a_file_may_start_at_any_byte() -> None:
    raw = gguf.quants.quantize(random(3, 32).numpy(), BLOCKS["q4_0"])
    shifted = torch.zeros(raw.size + 1, dtype=torch.uint8)
    shifted[1:] = torch.from_numpy(raw).flatten()
    w = Packed.from_blocks("q4_0", shifted[1:].view(3, -1), 32)
    assert np.array_equal(w.unpack().numpy(), gguf.quants.dequantize(raw, BLOCKS["q4_0"]))


def test_eight_bits_err_by_half_a_step() -> None:
    w = random(40, 128) * torch.logspace(-3, 2, 40)[:, None]
    step = w.view(40, 4, 32).abs().amax(-1, keepdim=True) / 127
    error = (Packed.from_float(w, "int8").unpack() - w).view(40, 4, 32).abs()
    assert (error <= step * (0.5 + 127 * 2**-11)).all(), "half a step, and the rounding of the scale to fp16"
    assert error.max() > 0


def test_four_bits_err_less_than_the_plain_range_does() -> None:
    w = random(64, 512)
    groups = w.view(64, 16, 32)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    plain = (((groups - low) / (high - low) * 15).round() / 15 * (high - low) + low - groups).norm()
    ours = (Packed.from_float(w, "int4").unpack() - w).norm()
    assert 0.5 * plain < ours < 0.96 * plain


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_the_codes_can_express_is_kept(kind: Kind) -> None:
    w = torch.zeros(3, 64)
    w[1] = 0.5
    w[2, :32] = torch.arange(32) % 16 * 0.25 - 2
    kept = Packed.from_float(w, kind).unpack()
    assert torch.equal(kept[0], w[0])
    assert torch.allclose(kept, w, atol=0 if kind == "int4" else 0.01)
    assert torch.isfinite(Packed.from_float(torch.full((1, 32), 1e-9), kind).unpack()).all()


@pytest.mark.parametrize("kind", FLOATS)
def test_floats_keep_their_type(kind: Kind) -> None:
    w = random(45, 37)
    packed = Packed.from_float(w, kind)
    assert torch.equal(packed.unpack(), w.to(FLOATS[kind]).float())
    assert torch.equal(packed.take(torch.tensor([44, 3])), w[[44, 3]].to(FLOATS[kind]).float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [(64, 32, 50), (20, 33, 5)])
def test_stacked_rows_stay_in_order(kind: Kind, rows: tuple[int, ...]) -> None:
    parts = [make(kind, n, 64, seed) for seed, n in enumerate(rows)]
    whole = Packed.concat(parts)
    assert whole.rows == sum(rows)
    assert torch.equal(whole.unpack(), torch.cat([p.unpack() for p in parts]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_shares_the_storage(kind: Kind) -> None:
    w = make(kind, 150, 64)
    for lo, hi in ((0, 64), (32, 96), (96, 150)):
        part = w.part(lo, hi)
        assert part.rows == hi - lo
        assert torch.equal(part.unpack(), w.unpack()[lo:hi])
        assert part.codes.untyped_storage().data_ptr() == w.codes.untyped_storage().data_ptr()


def test_mistakes_are_said_in_a_sentence() -> None:
    w = make("int8", 64, 64)
    with pytest.raises(ModelError, match=r"multiples of 32 rows, not at 10 and 64\."):
        w.part(10, 64)
    with pytest.raises(ModelError, match=r"one kind and width .* int8 \[64, 64\], f16 \[3, 64\]\."):
        Packed.concat([w, make("f16", 3, 64)])
    with pytest.raises(ModelError, match=r"int4 packs groups of 32 columns, and 40 is no multiple"):
        make("int4", 8, 40)
    with pytest.raises(ModelError, match=r"q4_1 rows of 64 columns are uint8 \[rows, 40\], not torch.uint8 \[2, 36\]\."):
        Packed.from_blocks("q4_1", torch.zeros(2, 36, dtype=torch.uint8), 64)
    with pytest.raises(ModelError, match="no GGUF blocks of kind 'int4'"):
        Packed.from_blocks("int4", torch.zeros(2, 40, dtype=torch.uint8), 64)
    with pytest.raises(ModelError, match="can't be packed as 'q4_0'"):
        Packed.from_float(random(2, 32), "q4_0")


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7, 13, 50])
@pytest.mark.parametrize("kind", KINDS)
def test_product_is_exact_up_to_fp32_rounding(kind: Kind, tokens: int) -> None:
    """Activations that differ by orders of magnitude would show any quantization of them."""
    w = make(kind, 100, 1024)
    x = random(tokens, 1024, 5) * torch.logspace(-4, 1, 1024)
    exact = x.double() @ w.unpack().double().T
    size = x.double().abs() @ w.unpack().double().abs().T
    assert ((matmul(x, w) - exact).abs() <= 1e-6 * size).all()
    assert exact.std() > 1


def test_product_goes_by_sweeps_over_many_tokens() -> None:
    w, x = make("int4", 40, 2048), random(600, 2048, 6)
    assert torch.allclose(matmul(x, w), x @ w.unpack().T, atol=2e-3)


def test_the_kernels_serve_every_packed_kind() -> None:
    for kind in KINDS:
        for op, args in (("matmul", (random(1, 64), make(kind, 40, 64))), ("unpack", (make(kind, 40, 64),))):
            assert implementation(op, "cpu").can(*args) is None, (op, kind)
    assert "float64" in implementation("matmul", "cpu").can(random(1, 64).double(), make("int8", 40, 64))
