"""key_scores on the GPU: a program per row and page, whose keys are read once for all queries of the row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..triton_tiles import PAGES, STORED, ints, near, rows_problem, unreachable


def can(q: Tensor, kp: Tensor, table: Tensor, length: Tensor, spans: tuple[int, ...], dims: Tensor | None = None) -> str | None:
    if kp.dtype not in STORED or kp.shape[2] not in PAGES or not kp.is_contiguous():
        return f"pages of {kp.shape[2]} tokens in {kp.dtype}, or not contiguous, have no kernel"
    return unreachable(q) or rows_problem(q, table, len(spans) - 1)


@triton.jit
def kernel(
    q, kp, table, length, spans, dims, score, heads, pages, per, used,
    G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p, row, w, u = tl.program_id(0), tl.program_id(1), tl.arange(0, W), tl.arange(0, BLOCK)
    live, asked = p * W + w < tl.load(length + row), u < used
    x = u
    if dims is not None:
        x = tl.load(dims + row * used + u, mask=asked, other=0)
    page = tl.maximum(tl.load(table + row * pages + p), 0).to(tl.int64) * (D * W)
    k = tl.load(kp + page + x[:, None] * W + w[None, :], mask=asked[:, None] & live[None, :], other=0.0).to(tl.float32)
    for token in range(tl.load(spans + row // per), tl.load(spans + row // per + 1)):
        for g in range(G):
            head = token * heads + row % per * G + g
            y = tl.load(q + head * D + x, mask=asked, other=0.0)
            s = tl.sum(y[:, None] * k, 0)
            tl.store(score + head.to(tl.int64) * (pages * W) + p * W + w, tl.where(live, s, float("-inf")))


def run(q: Tensor, kp: Tensor, table: Tensor, length: Tensor, spans: tuple[int, ...], dims: Tensor | None = None) -> Tensor:
    (n, heads, dim), (rows, pages), page = q.shape, table.shape, kp.shape[2]
    score = q.new_empty(n, heads, pages * page)
    used = dim if dims is None else dims.shape[1]
    requests = len(spans) - 1
    if pages:
        kernel[(pages, rows)](
            q.contiguous(), kp, *near(q, table, length), ints(spans, q.device), *near(q, dims), score, heads, pages, rows // requests, used,
            G=requests * heads // rows, D=dim, W=page, BLOCK=triton.next_power_of_2(used),
        )  # fmt: skip
    return score
