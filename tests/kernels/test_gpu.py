"""What the contract does not ask of the Triton kernels: hard numbers, refusals, and that they compile for real GPUs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longspool import kernels
from longspool.kernels.attend_rows.spec import case
from longspool.values import Packed
from toolbox import TRITON, send

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


def in_triton(op: str) -> bool:
    """Whether it has a kernel of its own for GPUs."""
    try:
        return "triton" in vars(kernels.implementation(op, "gpu"))
    except LookupError:
        return False


KERNELS = [op for op in kernels.names if in_triton(op)]
"""The ops with Triton kernels of their own; a chain calls those of others."""


def gpu(op: str, *args: object) -> object:
    """What an op's Triton kernel says, on the CPU."""
    module, args = kernels.implementation(op, "gpu"), send(args, TRITON)
    assert module.can(*args) is None
    return send(module.run(*args), "cpu")


def softmax64(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of q [H, D] over k, v [T, D] in float64."""
    s = q.double() @ k.double().T * scale
    return s.softmax(-1) @ v.double(), s.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_queries_of_any_size_keep_their_digits(dtype: torch.dtype) -> None:
    """Queries are cut into 2-byte pieces: neither one beyond fp16's range nor a tiny one may lose what fp32 holds."""
    q, kp, vp, table, length, spans = case(3, (0, 1), [50, 50], 4, 32, 16, dtype)
    size = torch.tensor([3e5, 1.0, 1e-6, 0.0])[None, :, None]
    q[..., 5] *= 200
    out, lse = gpu("attend_rows", q * size, kp, vp, table, length, spans, None, None, 1e-5)
    for h in range(4):
        pages = table[h // 2, :4].long()
        k, v = kp[pages].transpose(1, 2).reshape(-1, 32)[:50], vp[pages].reshape(-1, 32)[:50]
        want, want_lse = softmax64(q[0, h] * size[0, h], k, v, 1e-5)
        torch.testing.assert_close(out[0, h].double(), want, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(lse[0, h].double(), want_lse, atol=2e-6, rtol=2e-6)


def test_many_faint_keys_count() -> None:
    """One key with nearly all the weight and 400 that share a thousandth: what is below fp16's smallest number still adds up."""
    kp, vp = torch.zeros(26, 16, 16), torch.ones(26, 16, 16)
    kp[0, 0, 0], vp[0, 0] = 13.0, 0.0
    q = torch.zeros(1, 1, 16)
    q[..., 0] = 1.0
    table, length = torch.arange(26, dtype=torch.int32)[None], torch.tensor([401], dtype=torch.int32)
    out, _ = gpu("attend_rows", q, kp.half(), vp.half(), table, length, (0, 1), None, None, 1.0)
    faint = 400 * torch.tensor(-13.0, dtype=torch.float64).exp()
    torch.testing.assert_close(out[0, 0].double(), (faint / (1 + faint)).expand(16), atol=0.0, rtol=2e-6)


@pytest.mark.parametrize("kind", ["q4_1", "int8", "f16", "f32"])
def test_products_survive_an_activation_that_towers(kind: str) -> None:
    """Massive activations stand beside small ones. The error stays that of an fp32 sum, where fp16 or tf32 would be off by 1e-4."""
    g = torch.Generator().manual_seed(5)
    w, x = Packed.from_float(torch.randn(40, 96, generator=g), kind), torch.randn(3, 96, generator=g)
    x[:, 7], x[:, 9] = 2e4, 12345.6
    dense = w.unpack().double()
    got, want = gpu("matmul", x, w).double(), x.double() @ dense.T
    assert ((got - want).abs() / (x.double().abs().sum(1, keepdim=True) * dense.abs().amax(1))).max() < 1e-6
    assert want.std() > 1e3


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_product_counts_four_bits_from_their_middle(tokens: int) -> None:
    """The largest activations meet weights of 0, whose code is 8 here; counted from 0, they would drown the others in rounding."""
    g = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 16, (40, 2, 32), generator=g, dtype=torch.uint8)
    codes[:, 0, 7] = 8
    scale = (torch.rand(40, 2, 1, generator=g) + 0.1).half()
    blocks = [scale.view(torch.uint8), (scale * -8).view(torch.uint8), codes[..., :16] | codes[..., 16:] << 4]
    dense = (scale.double() * (codes.double() - 8)).flatten(1)
    x = torch.randn(tokens, 64, generator=g)
    x[:, 7] = 1e4
    got = gpu("matmul", x, Packed.from_blocks("q4_1", torch.cat(blocks, -1).flatten(1), 64)).double()
    want, size = x.double() @ dense.T, x.double().abs() @ dense.abs().T
    assert ((got - want).abs() <= 1e-6 * size).all()
    assert want.std() > 10


@pytest.mark.parametrize("kind", ["q4_1", "f16"])
def test_tokens_are_the_same_as_on_the_cpu(kind: str) -> None:
    """The noise is a function of seed, draw and id alone, so a draw does not depend on who computes it."""
    g = torch.Generator().manual_seed(8)
    head, batch = Packed.from_float(torch.randn(500, 64, generator=g) * 0.2, kind), 12
    args = (torch.randn(batch, 64, generator=g), head, torch.rand(batch, generator=g) * 2 + 0.2)
    args += (torch.arange(batch) * -12345678901, torch.arange(batch) + (1 << 33))
    token, logprob = gpu("head_sample", *args)
    want, want_logprob = kernels.implementation("head_sample", "ref").run(*args)
    assert token.tolist() == want.tolist() and len(set(token.tolist())) > 6
    torch.testing.assert_close(logprob, want_logprob, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("op", KERNELS)
def test_a_tensor_that_triton_cannot_reach_is_refused(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    spec = importlib.import_module(f"longspool.kernels.{op}.spec")
    _, args, kw = next(spec.samples())
    module = kernels.implementation(op, "gpu")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert "this tensor is on cpu" in module.can(*args, **kw)


def test_what_cannot_be_served_is_said() -> None:
    q, kp, vp, table, length, spans = send(case(1, (0, 1), [40, 40], 4, 16, 16, torch.float32), TRITON)
    can = kernels.implementation("attend_rows", "gpu").can
    assert can(q, kp, vp, table, length, spans, None, None, 1.0) is None
    assert "float64" in can(q, kp.double(), vp.double(), table, length, spans)
    assert "not contiguous" in can(q, kp.transpose(1, 2), vp, table, length, spans)
    assert "pages of 8 tokens" in can(q, kp[..., :8].contiguous(), vp[:, :8].contiguous(), table, length, spans)
    assert "head_dim 768" in can(q, kp.new_zeros(1, 768, 16), kp.new_zeros(1, 16, 768), table, length, spans)
    assert "3 rows don't divide" in can(q, kp, vp, table.new_zeros(3, 1), length, spans)


def compiled(target: str, *ops: str) -> None:
    """The interpreter takes what compilers refuse. Triton compiles for a GPU that is not there; only the driver is made up."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    program = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(program), target, *ops], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {line.split()[0] for line in done.stdout.splitlines()} == set(ops)


def test_some_kernels_compile() -> None:
    compiled("cuda:90", "page_scores", "rms_norm")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "hip:gfx942"])
def test_every_kernel_compiles(target: str) -> None:
    compiled(target, *KERNELS)
