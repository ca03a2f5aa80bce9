"""attend_rows on the CPU: tiles.py computes, schedule.py shares the work out."""

from __future__ import annotations

import torch
from torch import Tensor

from ..append_rows.cpu import SMALL, block_of, writer
from ..append_rows.cpu import run as append
from ..panels import calls
from ..record import now
from ..schedule import STORED, at, attend, dense, whole_numbers
from ..tiles import STACK, TILE


def can(
    q: Tensor,
    kp: Tensor,
    vp: Tensor,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    *rest: object,
    **kw: object,
) -> str | None:
    if kp.dtype not in STORED or vp.dtype != kp.dtype:
        return f"pages of {kp.dtype} and {vp.dtype} have no kernel"
    if not (kp.is_contiguous() and vp.is_contiguous()):
        return "the pool is not contiguous"
    return problem(q, kp.shape[1], kp.shape[2], table, length, spans, lo, hi)


def problem(
    q: Tensor, dim: int, page: int, table: Tensor, length: Tensor, spans: tuple[int, ...], lo: Tensor | None, hi: Tensor | None
) -> str | None:
    """Why the CPU kernels can't serve these shapes, or None."""
    if dim % 8 or page % 16 or TILE % page:
        return f"head_dim {dim} with pages of {page} has no kernel (multiples of 8; 16, 32, 64, 128 or 256)"
    if (len(spans) - 1) * q.shape[1] > STACK * table.shape[0]:
        return f"more than {STACK} query heads share a KV head"
    whole = all(x is None or x.dtype is torch.int32 for x in (table, length, lo, hi))
    return None if whole and q.dtype is torch.float32 else "q is not float32, or the table, length, lo or hi are not int32"


def run(
    q: Tensor,
    kp: Tensor,
    vp: Tensor,
    table: Tensor,
    length: Tensor,
    spans: tuple[int, ...],
    lo: Tensor | None,
    hi: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    weight: Tensor | None = None,
    tree: Tensor | None = None,
    fresh: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    table, length = dense(table), dense(length)
    lo, hi, weight, tree = (None if x is None else dense(x) for x in (lo, hi, weight, tree))
    sight = (at(lo), at(hi), at(tree), 0 if tree is None else tree.shape[1], at(weight))
    keys = keys_of(kp, vp, table, length)
    if fresh is None:
        return attend(q, spans, table.shape[0], keys, sight, scale, softcap)
    k, v, offset = dense(fresh[0]), dense(fresh[1]), whole_numbers(fresh[2])
    if k.numel() > SMALL:
        append(kp, vp, table, length, k, v, offset, ends=True)
        return attend(q, spans, table.shape[0], keys, sight, scale, softcap)
    block = block_of(kp, vp, table, length, k, v, offset, 1, True)
    if now.tape is not None:
        now.tape.held.append((table, length, k, v, offset, block))
    return attend(q, spans, table.shape[0], keys, sight, scale, softcap, first=(writer(kp.dtype).address, block.buffer_info()[0]))


def keys_of(kp: Tensor, vp: Tensor, table: Tensor, length: Tensor) -> tuple[int, ...]:
    """The numbers of `tiles.Keys` for raw pages."""
    pool = (kp.data_ptr(), vp.data_ptr(), table.data_ptr(), length.data_ptr(), table.shape[1])
    return (*pool, kp.shape[2], kp.element_size(), 1, *calls(kp.dtype), 0, 0, 0, 0)
