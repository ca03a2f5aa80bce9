"""Scratch memory of kernels, kept from call to call: a fresh tensor for each costs a step of one token a tenth of its time."""

from __future__ import annotations

import threading

import torch

from .record import now

KEPT = 1 << 24  # bytes up to which a thread keeps its room


class _Room(threading.local):
    def __init__(self) -> None:
        self.bytes = torch.empty(1 << 16, dtype=torch.uint8)
        self.size, self.at = self.bytes.numel(), self.bytes.data_ptr()


_room = _Room()


def room(size: int) -> tuple[int, torch.Tensor]:
    """The address of `size` bytes that nobody else on this thread uses while the returned tensor is held and no other room is asked
    for; what they hold is undefined."""
    if now.tape is not None:
        own = now.tape.room(size)
        return own.data_ptr(), own
    if size > KEPT:
        own = torch.empty(size, dtype=torch.uint8)
        return own.data_ptr(), own
    if size > _room.size:
        _room.bytes = torch.empty(size, dtype=torch.uint8)
        _room.size, _room.at = size, _room.bytes.data_ptr()
    return _room.at, _room.bytes
