"""chain(x, chain, rest, angles) -> outs: a straight line of moves over each token's registers; see values/chain.py.

x        fp32 [N, W], the first register that is given
chain    Chain
rest     list of the other given registers, fp32 [N, width] each
angles   (cos, sin) fp32 [N, r] each, or None: moves that rotate are then left out
outs     list of the wanted registers, fp32 [N, width] each; the given ones stay as they are
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...values.chain import Add, Chain, Gate, Norm, Product, Turn
from ..activations import ACTIVATIONS
from ..matmul.spec import packed

TOLERANCE = (1e-4, 1e-4)
WIDTH, INNER, HEADS, KV, DIM = 96, 160, 4, 2, 16


def layer(kinds: tuple[str, str, str], act: str = "silu", bias: bool = False, normed: bool = False, sandwich: bool = False) -> Chain:
    """From an attention to the next one, as in a decoder with matrices of these kinds."""
    seeds = iter(range(100))

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(next(seeds)))

    def product(source: int, to: int, kind: str, rows: int, cols: int, first: int = 0) -> Product:
        w = noise(rows, cols) * 0.1 if kind == "dense" else packed(kind, rows, cols, next(seeds))
        return Product(source, to, w, noise(rows) if bias else None, first)

    def norm(source: int, to: int, parts: int = 1, size: int = WIDTH) -> Norm:
        return Norm(source, to, noise(parts, size) * 0.1 * size**0.5, (size * 1e-5) ** 0.5)

    heads = HEADS * DIM
    widths = (WIDTH, heads, WIDTH, 2 * INNER, INNER, WIDTH, heads + 2 * KV * DIM)
    return Chain(
        widths,
        (0, 1),
        (0, 6),
        (
            product(1, 5, kinds[0], WIDTH, heads),
            *([norm(5, 5)] if sandwich else []),
            Add(5, 0),
            norm(0, 2),
            product(2, 3, kinds[1], 2 * INNER, WIDTH),
            Gate(3, 4, act),
            product(4, 5, kinds[2], WIDTH, INNER),
            *([norm(5, 5)] if sandwich else []),
            Add(5, 0),
            norm(0, 2),
            product(2, 6, kinds[0], heads, WIDTH),
            product(2, 6, kinds[1], 2 * KV * DIM, WIDTH, heads),
            *([norm(6, 6, HEADS + KV, DIM)] if normed else []),
            Turn(6, HEADS + KV, DIM),
        ),
    )


def samples() -> Iterator[tuple[str, tuple[Tensor, Chain, list[Tensor], tuple[Tensor, Tensor] | None], dict[str, int]]]:
    g = torch.Generator().manual_seed(4)
    chains = [
        ("4-bit", layer(("q4_1", "q4_1", "q4_0"))),
        ("8-bit, biased", layer(("q8_0", "int8", "q8_0"), "gelu", bias=True)),
        ("2-byte floats, normed heads", layer(("bf16", "bf16", "f16"), "gelu_pytorch_tanh", normed=True)),
        ("sandwich, mixed", layer(("q8_0", "q4_0", "f16"), "relu", bias=True, normed=True, sandwich=True)),
        ("dense", layer(("dense", "dense", "dense"))),
        ("f32", layer(("f32", "q4_1", "q4_1"), normed=True)),
    ]
    assert {move.act for _, c in chains for move in c.moves if isinstance(move, Gate)} == set(ACTIVATIONS)
    for name, chain in chains:
        for n, turned in ((1, True), (1, False), (3, True), (7, True), (65, True), (600, False), (0, True)):
            angle = torch.rand(n, DIM // 2 if n < 7 else DIM // 4, generator=g) * 100
            x = torch.randn(n, WIDTH, generator=g)
            attended = torch.randn(n, HEADS * DIM, generator=g)
            yield f"{name}, {n} tokens, turned: {turned}", (x, chain, [attended], (angle.cos(), angle.sin()) if turned else None), {}
