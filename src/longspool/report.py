"""What a run reports: the answer, the clock, the bytes, and the counters that prove what each method did."""

from __future__ import annotations

import resource
import sys
from dataclasses import asdict, dataclass, field

from . import kernels
from .engine.request import Finish, Request
from .memory import Fits, Ledger, Pools, dense_bytes
from .memory.view import acted

_DROPPED = ("evicted", "dropped", "pruned")
"""The engine's counters of tokens that a seat has taken away."""


@dataclass(frozen=True)
class Bytes:
    """Bytes of one request's memory when it ended, the peak of the device tier while it ran, and the process's peak."""

    kv_bytes: int
    kv_peak_bytes: int
    kv_dense_bytes: int
    host_bytes: int
    disk_bytes: int
    rss_peak_bytes: int
    fitted_bytes: int = 0
    """What its methods were fitted to the model, which all requests share; no part of the KV bytes."""


@dataclass(frozen=True)
class Report:
    """The facts of one answer. Times are in seconds, speeds in tokens a second."""

    prompt_tokens: int
    completion_tokens: int
    finish_reason: Finish
    ttft_s: float
    prefill_tok_s: float
    decode_tok_s: float
    memory: Bytes
    recipe: str
    actions: dict[str, dict[str, float]]
    kernels: dict[str, str]
    seed: int
    reused_tokens: int = 0
    preempted: int = 0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Result:
    """An answer: its text, its tokens, and the report. `logprobs` holds (logprob, ((token, logprob), ...)) where asked for."""

    text: str
    tokens: tuple[int, ...]
    report: Report
    logprobs: tuple[tuple[float | None, tuple[tuple[int, float], ...]], ...] = field(default=(), repr=False)


def result(request: Request, pools: Pools) -> Result:
    """What came of a request that is done."""
    first = request.clock.first_token or request.clock.now()
    last = request.clock.last_token or first
    count, prompt = len(request.choices), request.asked
    report = Report(
        prompt_tokens=prompt,
        completion_tokens=count,
        finish_reason=request.finish or "error",
        ttft_s=first,
        prefill_tok_s=(prompt - request.reused) / first if first else 0.0,
        decode_tok_s=(count - 1) / (last - first) if last > first and count > 1 else 0.0,
        memory=_bytes(request, pools.ledger, pools.fits),
        recipe=str(request.plan),
        actions={name: dict(counters) for name, counters in request.actions.items()},  # plain, as asdict wants them
        kernels=kernels.picked(),
        seed=request.sampler.seed,
        reused_tokens=request.reused,
        preempted=request.preempted,
        notes=_notes(request),
    )
    logprobs = tuple((c.logprob, c.top) for c in request.choices) if request.sampling.logprobs is not None else ()
    return Result(request.answer.text if request.answer else "", tuple(c.token for c in request.choices), report, logprobs)


def _bytes(request: Request, ledger: Ledger, fits: Fits) -> Bytes:
    held = request.held
    return Bytes(
        held.get("device", 0),
        ledger.peak["device"],
        dense_bytes(request.plan, request.asked + len(request.choices)),
        held.get("host", 0),
        held.get("disk", 0),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        sum(fit.nbytes for fit in fits.of(request.plan.methods)),
    )


def _notes(request: Request) -> tuple[str, ...]:
    """What must not stay hidden: a method that was asked for and did nothing, and one whose choices suit this question only."""
    did = {m: request.actions.get(m.slug, {}) for m in request.plan.methods}
    idle = [m.slug for m, counted in did.items() if not acted(counted)]
    partial = [m.slug for m, counted in did.items() if m.aware() and any(counted.get(name) for name in _DROPPED)]
    damaged = (
        (f"A page of its memory on the disk was damaged ({request.damaged}x); the memory was dropped and computed again.",)
        if request.damaged
        else ()
    )
    return (
        damaged
        + tuple(
            f"{slug} did nothing in this run: the text was too short for it to act, or its parameters leave everything as it is."
            for slug in idle
        )
        + tuple(
            f"{slug} chose what to keep by the question in this prompt: another question on the same memory may miss what was dropped."
            for slug in partial
        )
    )
