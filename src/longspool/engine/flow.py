"""The two default flows: the prompt in chunks, then one token a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..values import Step
from ..values.flow import Ask, Emit, Flow

if TYPE_CHECKING:
    from .request import Request


def chunked(request: Request) -> Flow:
    """The default ingest: the prompt in chunks whose size the engine names; returns the last chunk's reply."""
    reply: object = None
    while request.memory.seen < len(request.prompt):
        first = request.memory.seen
        ids = request.prompt[first : first + request.chunk]
        end = first + len(ids)
        final = end == len(request.prompt)
        step = Step(torch.tensor(ids), torch.arange(first, end), (0, len(ids)), (len(request.prompt),), "prefill", (final,))
        reply = yield Ask(step, request.memory, request.want if final else "none")
    return reply


def sampled(request: Request, reply: object) -> Flow:
    """The default decode: draw, emit, ask for the next; one token a step."""
    while (yield Emit((choice := request.pick(reply),))):
        reply = yield request.ask([choice.token], "decode", want=request.want)
    return None
