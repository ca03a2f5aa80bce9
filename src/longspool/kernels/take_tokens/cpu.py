"""take_tokens on the CPU: each thread copies a part of every row's tokens. A token's key lies across its page, one value a line."""

from __future__ import annotations

from array import array
from functools import cache

import numpy as np
import torch
from numba.core.ccallback import CFunc
from torch import Tensor

from ..append_rows.cpu import SMALL
from ..append_rows.cpu import can as pool_can
from ..panels import callback, version
from ..record import run as call
from ..schedule import dense, launch
from ..simd import KIND, carry, carry_one, get64, prefetch, put, size, splat, store, whole
from ..threads import chunks, helper

AHEAD = 3  # tokens that are fetched before they are needed


def can(kp: Tensor, vp: Tensor, slots: Tensor, length: Tensor) -> str | None:
    if not slots.dtype == length.dtype == torch.int32:
        return f"slots and lengths are {slots.dtype} and {length.dtype}, not int32"
    return pool_can(kp, vp)


@helper
def fetch_token(kp, vp, slot, dim, page, width):  # type: ignore[no-untyped-def]
    """Ask for the lines of a token: its key has a value in each line of a small page, or in each of `dim` lines."""
    at = slot // page * dim * page * width
    for byte in range(0, dim * page * width, max(page * width, 64)):
        prefetch(kp + at + byte + slot % page * width)
    for byte in range(0, dim * width, 64):
        prefetch(vp + at + slot % page * dim * width + byte)


@cache
def taker(dtype: torch.dtype) -> CFunc:
    """(block, part): the tokens of one part of `parts`."""
    kind, sources = KIND[dtype], version()

    def take(block, part):  # type: ignore[no-untyped-def]
        kp, vp, slots, length = get64(block), get64(block + 8), get64(block + 16), get64(block + 24)
        k, v, rows, most, wide = get64(block + 32), get64(block + 40), get64(block + 48), get64(block + 56), get64(block + 64)
        dim, page, parts = get64(block + 72), get64(block + 80), get64(block + 88)
        room, width = wide * page, size(kind)
        for row in range(rows if sources else 0):
            n = whole(length + 4 * row)
            for i in range(room * part // parts, room * (part + 1) // parts):
                to = (row * wide + i // page) * dim * page * width
                key, value = k + to + i % page * width, v + to + i % page * dim * width
                if i < n:
                    slot = whole(slots + 4 * (row * most + i))
                    at = slot // page * dim * page * width
                    x, y = kp + at + slot % page * width, vp + at + slot % page * dim * width
                    if i + AHEAD < n:
                        fetch_token(kp, vp, whole(slots + 4 * (row * most + i + AHEAD)), dim, page, width)
                    for d in range(dim):
                        carry_one(key + d * page * width, x + d * page * width, kind)
                    for d in range(0, dim, 8):
                        carry(value + d * width, y + d * width, kind)
                else:
                    for d in range(dim):
                        put(key + d * page * width, np.float32(0), kind)
                    for d in range(0, dim, 8):
                        store(value + d * width, splat(np.float32(0)), kind)

    return callback(2, take)


def run(kp: Tensor, vp: Tensor, slots: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    slots, length = dense(slots), dense(length)
    (rows, most), (_, dim, page) = slots.shape, kp.shape
    wide = -(-most // page)
    k, v = torch.empty(rows * wide, dim, page, dtype=kp.dtype), torch.empty(rows * wide, page, dim, dtype=vp.dtype)
    parts = chunks() if k.numel() > SMALL else 1
    pools = (kp.data_ptr(), vp.data_ptr(), slots.data_ptr(), length.data_ptr(), k.data_ptr(), v.data_ptr())
    block = array("q", (*pools, rows, most, wide, dim, page, parts))
    call(launch, (0, 0, 0, taker(kp.dtype).address, 0, block.buffer_info()[0], parts, 0, 1), slots, length, k, v, block)
    return k, v
