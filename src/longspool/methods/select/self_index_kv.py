"""Self-indexing KV cache: the keys' signs are a part of what is stored, and the index.

A page keeps the median m of each key channel and the largest distance a from it; a key is sign (1 bit) x magnitude |k - m| / a (2 bits,
a minimum and a step for each token's 32 channels), a value 2 bits likewise. The signs of four channels are a code 0..15, and when the
prompt has been read the mean c[g, code] of the 4-vectors that have it is tabled for each KV head. A token's score takes its signs only:
s_t = q . m + sum_g q_g . c[g, code_tg],  q the mean of the group's queries;  the `budget` best of the prompt's tokens and all later ones
are decoded and attended. The paper takes m, a and the table from the whole prompt's raw keys, and keeps its 64 most salient tokens in full
precision; here m and a belong to a page, the table is made of decoded keys, only the recent `window` is raw, and decoding is not fused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels import topk_rows
from ...kernels.bits import TINY, packed, quantised, restored, unpacked
from ...method import Cost, Paper, Trial
from ...roles import Encode, Field, Seen, Store, View
from ...values import Rows, Shape, Span
from .base import Picks, as_many, known, per_request, span, together


@dataclass(frozen=True)
class SelfIndexKV(Picks, Encode):
    budget: int = 320
    page: int = 64

    paper: ClassVar[Paper] = Paper(
        "S013",
        "Self-Indexing KVCache",
        "https://github.com/LfieLike/selfindexingkv",
        "near full KV at 3-bit keys with 7.5% of the tokens read",
    )
    identity: ClassVar[float] = 0.6
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "self_index_kv(budget=320)",
            control="random_select(budget=320, page=64, sinks=4)",
            beats=("quest(budget=336, dense=0) + int4",),
            claim="Near dense with 7.5% of the tokens read at a quarter of the memory.",
        ),
    )

    def check(self, shape: Shape) -> list[str]:
        return super().check(shape) + ([] if shape.head_dim % 8 == 0 else [f"head_dim {shape.head_dim} must be a multiple of 8."])

    def fields(self, shape: Shape, page: int, layers: int = 0) -> dict[str, Field]:
        """What it stores as a codec, which is told of layers, or looks at when it selects: of that, the signs and their centre."""
        dim, half, code = shape.head_dim, torch.float16, torch.uint8
        near = {"signs": Field((page, dim // 8), code, resident=True), "median": Field((dim,), half, resident=True)}
        scales = {f"{x}_{y}": Field((page, dim // _block(dim)), half) for x in "kv" for y in ("low", "step")}
        whole = near | {"reach": Field((dim,), half), "k": Field((page, dim // 4), code), "v": Field((page, dim // 4), code), **scales}
        return whole if layers else near

    def write(self, store: Store, pages: Tensor, fill: Tensor, k: Tensor, v: Tensor, span: Span) -> None:
        past = (torch.arange(k.shape[2], device=k.device) >= fill[:, None])[:, None]
        median = k.masked_fill(past, torch.nan).nanmedian(2).values.to(torch.float16)
        away = (k - median[..., None].float()).masked_fill(past, 0).transpose(1, 2)  # [S, W, D]
        reach = away.abs().amax(1).clamp_min(TINY).to(torch.float16)
        store["median"][pages], store["reach"][pages], store["signs"][pages] = median, reach, packed((away >= 0).to(torch.uint8), 1)
        for name, x in (("k", away.abs() / reach[:, None].float()), ("v", v)):
            store[name][pages], store[f"{name}_low"][pages], store[f"{name}_step"][pages] = quantised(x, 2, _block(x.shape[2]))

    def read(self, store: Store, pages: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        page = store["signs"].shape[1]
        slots = (pages[:, None] * page + torch.arange(page, device=pages.device)).flatten()
        k, v = (x.reshape(len(pages), page, -1) for x in self.take(store, slots, span))
        return k.transpose(1, 2).contiguous(), v

    def take(self, store: Store, slots: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        at, sign = slots // store.page, unpacked(store["signs"].flatten(0, 1)[slots], 1).float() * 2 - 1
        parts = {name: store[name].flatten(0, 1)[slots] for name in ("k", "k_low", "k_step", "v", "v_low", "v_step")}
        size, v = (restored(parts[x], parts[f"{x}_low"], parts[f"{x}_step"], 2) for x in ("k", "v"))
        return sign * size * store["reach"][at].float() + store["median"][at].float(), v

    def index(self, old: dict[str, Tensor], view: View) -> dict[str, Tensor]:
        """The table of 4-vectors by their signs, and how many tokens were in the prompt."""
        if (old or view.step.phase == "prefill") and not (view.step.phase == "prefill" and view.step.final[0]):
            return old
        signs, median = (view.summary(name) for name in ("signs", "median"))
        table = []
        for r, (k, _) in enumerate(view.settled([0] * view.rows.count)):
            slots = view.rows.slots(r)
            away = (k - median[slots // view.rows.grain].to(k.device)).reshape(len(k), -1, 4)
            code = unpacked(signs.flatten(0, 1)[slots], 4).to(k.device).long()  # [T, D/4]
            place = code + 16 * torch.arange(code.shape[1], device=k.device)
            count = torch.bincount(place.flatten(), minlength=16 * code.shape[1])
            total = k.new_zeros(len(count), 4).index_add_(0, place.flatten(), away.flatten(0, 1))
            table.append((total / count.clamp_min(1)[:, None]).view(-1, 16, 4))
        return {"table": torch.stack(table), "done": view.rows.length.to(table[0].device, copy=True)}

    def index_bytes(self, shape: Shape, tokens: int) -> int:
        return shape.kv_heads * (64 * shape.head_dim + 4)

    def select(self, q: Tensor, rows: Rows, view: View) -> Seen:
        if self.budget >= rows.table.shape[1] * rows.grain:
            return Seen(rows)
        heads, dim = view.shape.kv_heads, view.shape.head_dim
        mean, none = per_request(q, view).reshape(rows.count, -1, dim).mean(1), q.new_zeros(heads, dim // 4, 16, 4)  # [R, D]
        done = known(view, "done", torch.zeros(heads, dtype=torch.int32, device=q.device)).cpu()
        part = torch.einsum("rgi,rgci->rgc", mean.reshape(rows.count, -1, 4), known(view, "table", none))
        both = (part[:, 1::2, :, None] + part[:, ::2, None]).flatten(2)  # [R, D/8, 256]: a byte has the signs of two groups
        at = rows.table.clamp_min(0).long()
        signs, median = view.summary("signs")[at].to(q.device), view.summary("median")[at].to(q.device)
        score = both.gather(2, signs.flatten(1, 2).transpose(1, 2).long()).sum(1)
        score = score + torch.einsum("rd,rpd->rp", mean, median.float()).repeat_interleave(rows.grain, 1)
        index, _ = topk_rows(score, done.to(q.device), as_many(rows.count, self.budget).to(q.device))
        return Seen(rows.at(together(index.long(), span(done, rows.length))))

    def cost(self, shape: Shape) -> Cost:
        return Cost(device=shape.head_dim * 5 / 8 + 16 * shape.head_dim // _block(shape.head_dim) / 2, moved=shape.head_dim / 8)


def _block(dim: int) -> int:
    """Channels that share a minimum and a step."""
    return 32 if dim % 32 == 0 else dim
