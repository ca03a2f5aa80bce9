"""attend_codes on the CPU: the same core as attend_rows, over codes and their scales."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attend_rows.cpu import problem
from ..panels import calls
from ..schedule import at, attend, dense


def can(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    kscale: Tensor,
    kzero: Tensor | None,
    vscale: Tensor,
    vzero: Tensor | None,
    bits: int,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    *rest: object,
    **kw: object,
) -> str | None:
    dim, page = kscale.shape[1], vscale.shape[1]
    if kc.dtype != (torch.uint8 if bits == 4 else torch.int8):
        return f"{bits} bits in {kc.dtype} have no kernel"
    if not (kc.is_contiguous() and vc.is_contiguous()):
        return "the pool is not contiguous"
    if bits == 4 and dim % 16:
        return f"4 bits need a head_dim of a multiple of 16, and it is {dim}"
    return problem(q, dim, page, table, length, spans, lo, hi)


def run(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    kscale: Tensor,
    kzero: Tensor | None,
    vscale: Tensor,
    vzero: Tensor | None,
    bits: int,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    table, length = dense(table), dense(length)
    lo, hi = (None if x is None else dense(x) for x in (lo, hi))
    form = (table.shape[1], vscale.shape[1], 1, 8 // bits, *calls(kc.dtype))
    zeros = (kscale.data_ptr(), at(kzero), vscale.data_ptr(), at(vzero))
    keys = (kc.data_ptr(), vc.data_ptr(), table.data_ptr(), length.data_ptr(), *form, *zeros)
    return attend(q, spans, table.shape[0], keys, (at(lo), at(hi), 0, 0, 0), scale, softcap)
