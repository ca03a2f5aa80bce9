"""head_sample(h, head, temperature, seed, offset, cap=0, tile=8192) -> (token, logprob): exact sampling fused into the head.

h            fp32 [B, W], final states
head         Packed [V, W]
temperature  fp32 [B]; 0 takes the best token
seed         int64 [B], the stream; offset int64 [B], the draw within it
cap          c > 0 bends the logits, c tanh(z / c)
token        int64 [B] = argmax_v (z_v / temperature + g_v), g Gumbel noise from Philox4x32-10 keyed by the seed and counted by (offset, v)
logprob      fp32 [B], of the token under softmax(z / temperature); at temperature 0 under softmax(z)

The noise depends on nothing else, so neither tiles nor shards nor the batch change a token. Logits [B, V] are never held, only
`tile` rows of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...values.packed import Packed

TOLERANCE = (2e-5, 2e-5)


def samples() -> Iterator[tuple[str, tuple, dict]]:
    g = torch.Generator().manual_seed(6)
    for kind, batch, vocab, width, more in (
        ("f32", 1, 50, 32, {}),
        ("f32", 3, 700, 64, {"tile": 128}),
        ("int8", 4, 333, 64, {"tile": 96, "cap": 5.0}),
        ("int4", 1, 3000, 64, {}),
        ("bf16", 7, 100, 37, {"cap": 3.0}),
    ):
        head = Packed.from_float(torch.randn(vocab, width, generator=g) * 0.3, kind)
        temperature = torch.tensor([0.0, 0.7, 1.0, 2.5, 0.1, 0.0, 9.0])[-batch:]
        seed, offset = torch.arange(batch) * 7_000_000_011 + 3, torch.arange(batch) * 5
        yield f"{kind} {batch}x{vocab}x{width} {more}", (torch.randn(batch, width, generator=g), head, temperature, seed, offset), more
