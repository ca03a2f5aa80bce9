"""Weights that stay as they are stored, shared where they are tied, and refused in one sentence where they do not fit."""

from __future__ import annotations

import pytest
import torch
from peer import SMALL, peer_logits, random_model
from torch import Tensor
from transformers import Gemma2Config, LlamaConfig, Qwen3Config

from longspool.errors import ModelError
from longspool.kernels import chain
from longspool.model.build import build
from longspool.model.config import Config
from longspool.model.layers import Apart, Linear, Norm
from longspool.values.chain import Chain
from longspool.values.packed import Packed
from reference import dense_logits

IDS = torch.randint(1, 101, (40,), generator=torch.Generator().manual_seed(1))
WIDE = {**SMALL, "hidden_size": 64, "intermediate_size": 96}


def weight(rows: int, cols: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def plain(linear: Tensor | Packed) -> Tensor:
    return linear if isinstance(linear, Tensor) else linear.unpack()


FORMS = [
    lambda w: w,
    lambda w: w.bfloat16(),
    lambda w: w.half(),
    lambda w: w.double(),
    lambda w: Packed.from_float(w, "int8"),
    lambda w: Packed.from_float(w, "int4"),
]


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("form", range(len(FORMS)))
def test_linear(form: int, tokens: int) -> None:
    stored, bias, x = FORMS[form](weight(50, 64)), weight(1, 50, 1)[0], weight(tokens, 64, 2)
    full = plain(stored).double()
    want = x.double() @ full.T
    torch.testing.assert_close(Linear(stored)(x), want.float(), atol=1e-4, rtol=0)
    torch.testing.assert_close(Linear(stored, bias)(x), (want + bias.double()).float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("forms", "products"),
    [((0, 0, 0), 1), ((1, 1, 1), 1), ((5, 5, 5), 1), ((5, 5, 4), 2), ((4, 5, 4), 3), ((0, 3, 5), 2)],
)
def test_stack(forms: tuple[int, ...], products: int) -> None:
    """One product for a run of one kind; the outputs stand side by side in any case, with biases where there are any."""
    rows = (64, 20, 33)
    parts = [Linear(FORMS[f](weight(n, 64, n)), weight(1, n, n + 1)[0] if n != 20 else None) for f, n in zip(forms, rows, strict=True)]
    stack, x = Linear.stack(parts), weight(5, 64, 9)
    assert stack.rows == sum(rows)
    assert (len(stack.parts) if isinstance(stack, Apart) else 1) == products
    chained = Chain((64, stack.rows), (0,), (1,), tuple(stack.moves(0, 1)))
    torch.testing.assert_close(chain(x, chained, [], None)[0], torch.cat([part(x) for part in parts], -1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(1, 64), (7, 64), (3, 5)])
def test_norm(shape: tuple[int, ...]) -> None:
    x, w = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 7, weight(1, shape[-1])[0]
    want = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    torch.testing.assert_close(Norm(w, 1e-5)(x), want.float(), atol=1e-5, rtol=1e-6)
    assert Norm(w, 1e-5)(torch.zeros(shape)).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [LlamaConfig, Gemma2Config, Qwen3Config])
def test_two_byte_checkpoints(kind: type, dtype: torch.dtype) -> None:
    """Two bytes stay two bytes, and the arithmetic is that of the same weights in fp32."""
    peer = random_model(kind(**WIDE))
    weights = {k: v.to(dtype) for k, v in peer.state_dict().items()}
    peer.load_state_dict(weights)  # rounds them; the model itself stays fp32
    model = build(Config.from_hf(peer.config.to_dict()), weights)
    matrix = model.blocks[0].gate_up.weight
    assert isinstance(matrix, Packed) and matrix.nbytes == 2 * 192 * 64
    assert torch.equal(matrix.unpack()[:96], weights["model.layers.0.mlp.gate_proj.weight"].float())
    torch.testing.assert_close(dense_logits(model, IDS), peer_logits(peer, IDS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["f32", "bf16", "int8", "int4"])
def test_packed_checkpoints(kind: str) -> None:
    """Packed weights give the logits of the weights that they stand for, table and tied head included."""
    peer = random_model(LlamaConfig(**WIDE, tie_word_embeddings=True))
    weights = {k: Packed.from_float(v, kind) if v.dim() == 2 else v for k, v in peer.state_dict().items()}  # type: ignore[arg-type]
    model = build(Config.from_hf(peer.config.to_dict()), weights)
    peer.load_state_dict({k: plain(v) for k, v in weights.items()})
    torch.testing.assert_close(dense_logits(model, IDS), peer_logits(peer, IDS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("pack", [False, True])
def test_a_tied_head_is_the_table(pack: bool) -> None:
    peer = random_model(LlamaConfig(**WIDE, tie_word_embeddings=True))
    weights = dict(peer.state_dict())
    if pack:
        weights["model.embed_tokens.weight"] = Packed.from_float(weights["model.embed_tokens.weight"], "int8")
    model = build(Config.from_hf(peer.config.to_dict()), {k: v for k, v in weights.items() if k != "lm_head.weight"})
    table = weights["model.embed_tokens.weight"]
    head = model.head.weight
    same = head is table if pack else isinstance(head, Tensor) and head.data_ptr() == table.data_ptr()
    assert same
    rows = model.embed(IDS)
    torch.testing.assert_close(rows, plain(table)[IDS], atol=0, rtol=0)


def good() -> tuple[Config, dict[str, Tensor | Packed]]:
    peer = random_model(LlamaConfig(**WIDE))
    return Config.from_hf(peer.config.to_dict()), dict(peer.state_dict())


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.post_attention_layernorm.weight",
    ],
)
def test_missing_tensor(name: str) -> None:
    config, weights = good()
    del weights[name]
    with pytest.raises(ModelError) as caught:
        build(config, weights)
    assert str(caught.value) == f"The checkpoint has no tensor {name!r}, which the model needs."


def test_missing_bias() -> None:
    peer = random_model(LlamaConfig(**WIDE, attention_bias=True))
    weights = {k: v for k, v in peer.state_dict().items() if k != "model.layers.1.self_attn.q_proj.bias"}
    with pytest.raises(ModelError, match=r"no tensor 'model.layers.1.self_attn.q_proj.bias'"):
        build(Config.from_hf(peer.config.to_dict()), weights)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("model.layers.1.mlp.up_proj.weight", torch.zeros(95, 64), r"has the shape \[95, 64\], where the config asks for \[96, 64\]"),
        ("model.norm.weight", torch.zeros(63), r"has the shape \[63\], where the config asks for \[64\]"),
        ("model.layers.0.mlp.down_proj.weight", Packed.from_float(torch.zeros(64, 64), "int8"), r"has the shape \[64, 64\]"),
        ("model.layers.0.mlp.down_proj.weight", torch.zeros(64, 96, dtype=torch.int8), r"holds torch.int8 values"),
        ("model.norm.weight", Packed.from_float(torch.zeros(1, 64), "f32"), r"is a packed matrix, where a vector of 64 is needed"),
    ],
)
def test_wrong_tensor(name: str, value: Tensor | Packed, says: str) -> None:
    config, weights = good()
    with pytest.raises(ModelError, match=f"{name}' {says}"):
        build(config, {**weights, name: value})
