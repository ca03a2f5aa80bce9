"""KVTC: a transform coder for memories that wait between uses: decorrelate, give bits where variance is, code without loss.

The keys before rotation of all layers and heads of a token are one long vector, and so are its values. Fitted to the model once, PCA
turns them, D = (x - mean) V, and dynamic programming cuts D's coordinates, in order of variance, into groups of 1, 2, 4 .. 1024, each with
2, 4 or 8 bits and a scale and a shift of 2 bytes for each token, or leaves out all that follow, so that the square error on the text is
least within 16/ratio bits a number. A memory that is saved to disk has its codes go through DEFLATE as well. The first `sinks` tokens
and the newest `window` stay raw.

The paper fits on 100K and more tokens, has fp8 among its types and decodes a stored prefix before it is used; here codes are decoded by
pages as attention reads them, which is slow: this is a codec for keeping, not for speed. An answer's tokens are encoded too, page by page.
Limited to some layers it takes their rows of the basis and as many coordinates as they have room for, at a loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels.transform import allot, pca, transform
from ...method import Cost, Needs, Paper, Trial
from ...roles import Encode, Field, Fitted, Samples, Store
from ...values import Shape, Span

EVERY = 1 << 20  # layers


@dataclass(frozen=True)
class KVTC(Fitted, Encode):
    ratio: float = 8.0
    sinks: int = 4
    window: int = 128

    paper: ClassVar[Paper] = Paper(
        "S100", "KV Cache Transform Coding for Compact Storage in LLM Inference", "arXiv:2511.01815", "20x with less than a point lost"
    )
    identity: ClassVar[float] = 1.0
    shaping: ClassVar[tuple[str, ...]] = ("ratio",)
    joins: ClassVar[bool] = True
    packs: ClassVar[bool] = True
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "kvtc(ratio=8)", beats=("xkv(layers=5, keys=0.125, values=0.125)",), claim="8 times smaller, it loses less than shared ranks."
        ),
    )

    def needs(self) -> Needs:
        return Needs(recent=self.window, keys="bare", calibrated=("bare", "values"))

    def check(self, shape: Shape) -> list[str]:
        least = {"ratio": 1, "sinks": 0, "window": 0}
        return [f"{n}={getattr(self, n)} must be at least {low}." for n, low in least.items() if getattr(self, n) < low]

    def across(self) -> int:
        return EVERY

    def fit(self, samples: Samples) -> dict[str, Tensor]:
        """Of keys and of values the mean fp32 [P], the basis fp16 [P, r] and the groups int32 [n, 2] of (coordinates, bits)."""
        found, kept = {"layers": torch.tensor(samples.layers)}, samples.pos >= self.sinks
        for name, look in (("k", samples.bare), ("v", samples.values)):
            x = torch.cat([look(layer)[kept].flatten(1) for layer in samples.layers], 1)
            mean, basis = pca(x, int(x.shape[1] * 8 / self.ratio))
            groups = allot((x[:: -(-len(x) // 1024)] - mean) @ basis, self._room(x.shape[1]))
            used = int(groups[:, 0].sum())
            found |= {f"{name}.mean": mean, f"{name}.basis": basis[:, :used].to(torch.float16), f"{name}.groups": groups}
        return found

    def _room(self, width: int) -> int:
        """Bytes of a token's keys, or values, of so many numbers."""
        return max(int(2 * width / self.ratio), 8)

    def fields(self, shape: Shape, page: int, layers: int) -> dict[str, Field]:
        codes = Field((page, self._room(layers * shape.kv_heads * shape.head_dim)), torch.uint8)
        return {"k": codes, "v": codes}

    def learns(self, shape: Shape, layers: int) -> dict[str, Field]:
        raw = Field((self.sinks, layers * shape.kv_heads * shape.head_dim), torch.float16)
        return {"k": raw, "v": raw} if self.sinks else {}

    def learn(self, k: list[Tensor], v: list[Tensor], span: Span) -> dict[str, Tensor]:
        """The sinks as they are."""
        return {name: torch.stack([x[: self.sinks] for x in rows]) for name, rows in (("k", k), ("v", v))}

    def write(self, store: Store, pages: Tensor, fill: Tensor, k: Tensor, v: Tensor, span: Span) -> None:
        fit = store.fitted(self)
        for name, x in (("k", k.transpose(1, 2)), ("v", v)):
            how = transform(fit, name, span.layers, store[name].shape[2])
            codes = how.layout.encode((x.flatten(0, 1) - how.mean.to(x)) @ how.basis.to(x))
            store[name][pages, :, : codes.shape[1]] = codes.view(len(pages), -1, codes.shape[1])

    def read(self, store: Store, pages: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        k, v = (self._decoded(store, name, pages, span) for name in ("k", "v"))
        return k.transpose(1, 2).contiguous(), v

    def _decoded(self, store: Store, name: str, pages: Tensor, span: Span) -> Tensor:
        """One layer's vectors [S, W, Hkv * D]."""
        fit, codes = store.fitted(self), store[name][pages]
        how = transform(fit, name, span.layers, codes.shape[2])
        d = how.layout.decode(codes.flatten(0, 1))
        x = d @ span.own(how.back, 0).to(d).T + span.own(how.mean, 0).to(d)
        x = x.view(len(pages), -1, x.shape[1])
        if self.sinks:
            begins = (store.booked(pages)[:, 1] == 0).nonzero()[:, 0]
            x[begins, : self.sinks] = span.own(store.learnt(name, pages[begins]), 2).to(x)
        return x

    def cost(self, shape: Shape) -> Cost:
        return Cost(device=4 * shape.head_dim / self.ratio, moved=4 * shape.head_dim / self.ratio)
