"""Chelsea: neighbouring tokens with like keys become one centroid.

Old tokens are cut into chunks of `chunk`. Within one, tokens at even places are matched with those at odd places by the cosine of their
keys; each even one takes its best partner, and the strongest pairs join until `ratio` of the chunk is gone, in rounds over what is left,
since one round at most halves it. A centroid is the mean of its members weighted by how many tokens each stands for, in keys and values,
at the odd one's place; its logit gets + log(count) unless `counted` is off (the paper's plain softmax). `sinks` first and `window` last
tokens stay. While decoding, each further chunk that has grown old is clustered once; centroids are not merged again. Keys are merged as
they are stored, rotated or bare. The card gives no default sizes: those here are our choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...method import Method, Needs, Paper, Trial
from ...roles import Evict, Kept, View
from ...values import Shape, Step

Row = tuple[Tensor, Tensor, Tensor, Tensor]
"""Index, keys, values and counts of the entries of many chunks, each [chunks, tokens, ...]."""


@dataclass(frozen=True)
class Chelsea(Method, Evict):
    ratio: float = 0.5
    chunk: int = 64
    sinks: int = 4
    window: int = 128
    counted: bool = True

    paper: ClassVar[Paper] = Paper(
        "S032", "Chelsea (CentroidKV): online clustering of the KV cache", "TMLR", "80% of the cache away, decoding up to 3.19x faster"
    )
    identity: ClassVar[dict[str, object]] = {"ratio": 0.0}
    merges: ClassVar[bool] = True
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial("chelsea(ratio=0.5)", "random_evict(budget='50%')", ("streaming(sinks=4, window=2044)",)),
        Trial("chelsea(ratio=0.75)", "random_evict(budget='25%')", ("streaming(sinks=4, window=1020)",)),
    )

    def needs(self) -> Needs:
        return Needs(recent=self.window)

    def check(self, shape: Shape) -> list[str]:
        reasons = [] if 0 <= self.ratio < 1 else [f"ratio={self.ratio} must be at least 0 and below 1."]
        least = {"chunk": (self.chunk, 2), "sinks": (self.sinks, 0), "window": (self.window, 0)}
        return reasons + [f"{name}={value} must be at least {low}." for name, (value, low) in least.items() if value < low]

    def due(self, step: Step) -> bool:
        return step.final[0] if step.phase == "prefill" else step.meets(self.chunk)

    def decodes(self) -> bool:
        return False

    def keep(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Kept:
        """`note` holds for each layer the position up to which each row is clustered."""
        note, weight = view.note(self), view.logweight
        done = note.get(str(view.layer), pos.new_full((len(pos),), self.sinks - 1))
        assert isinstance(done, Tensor)
        out, ends = [], done.clone()
        for r, row in enumerate(pos):
            real = torch.nonzero(row >= 0)[:, 0]
            fresh = real[row[real] > done[r]]
            fresh = fresh[: len(fresh) // self.chunk * self.chunk]
            if len(fresh):
                ends[r] = row[fresh[-1]]
            out.append(self.clustered(real, fresh, k[r], v[r], weight[r]))
        note[str(view.layer)] = ends
        return Kept(*(tuple(part) for part in zip(*out, strict=True)))

    def clustered(self, real: Tensor, fresh: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One row's entries after the chunks of `fresh` are clustered: ascending index, keys, values, log-weights."""
        at = fresh.view(-1, self.chunk)
        chunks: Row = at, k[at], v[at], weight[at].exp()
        gone = min(round(self.ratio * self.chunk), self.chunk - 1)
        while gone:
            size = chunks[0].shape[1]
            chunks = joined(chunks, min(gone, size // 2))
            gone -= min(gone, size // 2)
        index, keys, values, counts = (part.flatten(0, 1) for part in chunks)
        same = real[~torch.isin(real, fresh)]
        index = torch.cat([same, index])
        order = index.argsort()
        merged = counts.log() if self.counted else torch.zeros_like(counts)
        k, v, weight = torch.cat([k[same], keys]), torch.cat([v[same], values]), torch.cat([weight[same], merged])
        return index[order], k[order], v[order], weight[order]


def joined(chunks: Row, gone: int) -> Row:
    """Each chunk after one round of matching that takes `gone` entries away."""
    index, k, v, counts = chunks
    unit = normalize(k, dim=-1)
    likeness, partner = (unit[:, 0::2] @ unit[:, 1::2].transpose(1, 2)).max(-1)  # [chunks, even places]
    taken = likeness.argsort(dim=1, descending=True, stable=True)[:, :gone]
    source, target = 2 * taken, 2 * partner.gather(1, taken) + 1
    total = counts.scatter_add(1, target, counts.gather(1, source))

    def mean(x: Tensor) -> Tensor:
        wide = target[..., None].expand(-1, -1, x.shape[-1])
        part = (x * counts[..., None]).gather(1, source[..., None].expand_as(wide))
        return (x * counts[..., None]).scatter_add(1, wide, part) / total[..., None]

    stays = torch.ones_like(index, dtype=torch.bool).scatter(1, source, False)
    size = (len(index), index.shape[1] - gone)
    parts = index, mean(k), mean(v), total
    return tuple(part[stays].view(*size, *part.shape[2:]) for part in parts)  # type: ignore[return-value]
