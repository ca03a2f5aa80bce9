"""The two default flows: the prompt in chunks, then one token a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..memory import Memory
from ..values import Step
from ..values.flow import Ask, Emit, Flow, Want

if TYPE_CHECKING:
    from .request import Request


def ask(
    request: Request, ids: list[int], phase: Literal["prefill", "decode", "verify"], memory: Memory | None = None, want: Want = "last"
) -> Ask:
    """An Ask for tokens that follow what the memory has seen."""
    memory = memory or request.memory
    pos = torch.arange(memory.seen, memory.seen + len(ids))
    total = max(len(request.prompt), memory.seen + len(ids))
    return Ask(Step(torch.tensor(ids), pos, (0, len(ids)), (total,), phase, (True,)), memory, want)


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


def sampled(request: Request, reply: Tensor) -> Flow:
    """The default decode: draw, emit, ask for the next; one token a step."""
    while (yield Emit((choice := request.pick(reply),))):
        reply = yield ask(request, [choice.token], "decode", want=request.want)  # type: ignore[assignment]
    return None
