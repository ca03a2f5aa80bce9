"""One job in one process, so that its peak memory is its own: load a peer, warm it up, do the task, write a JSON file.

python -m benchmarks.worker JOB.json OUT.json
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from . import machine, peers, prompts

if TYPE_CHECKING:
    import numpy as np

    from .peers import Peer

Fact = float | int | str | list[float] | list[int] | list[str] | None


@dataclass(frozen=True)
class Job:
    """What to measure. `length` is a name in prompts.LENGTHS; the needle task has its own length."""

    peer: str
    variant: str
    task: str
    length: str
    model: str
    prompts: str
    threads: int
    tokens: int


def main(job: Job) -> dict[str, Fact | dict[str, object]]:
    driver = peers.driver(job.peer)
    start = time.perf_counter()
    try:
        peer = driver.open(Path(job.model), driver.VARIANTS[job.variant], job.threads)
    except ModuleNotFoundError as error:
        if "." in (error.name or "."):  # the package is there and broken
            raise
        return {"missing": driver.INSTALL, "why": str(error)}
    loaded = time.perf_counter() - start
    given = prompts.read(Path(job.prompts))
    peak = machine.peak_mb()
    peer.stream(given.warm, 4, lambda token: None)
    machine.forget_peak()
    facts = TASKS[job.task](peer, job, given)
    return {
        "settings": asdict(driver.VARIANTS[job.variant]),
        "versions": machine.versions(driver.PACKAGES),
        "load_s": round(loaded, 3),
        "peak_mb": max(peak, machine.peak_mb()),
        **facts,
    }


def speed(peer: Peer, job: Job, given: prompts.Prompts) -> dict[str, Fact]:
    """Time to the first token, then each further token's own time."""
    ids = given.prompt(prompts.LENGTHS[job.length])
    loaded = machine.memory_mb("VmRSS")
    stamps, tokens = [time.perf_counter()], list[int]()

    def seen(token: int) -> None:
        stamps.append(time.perf_counter())
        tokens.append(token)

    peer.stream(ids, job.tokens, seen)
    gaps = [round((b - a) * 1e3, 3) for a, b in pairwise(stamps[1:])]
    return {
        "ttft_s": round(stamps[1] - stamps[0], 4),
        "decode_ms": gaps,
        "tokens": tokens,
        "loaded_mb": loaded,
        "prompt_tokens": len(ids),
        "report": report(peer),
    }


def forced(peer: Peer, job: Job, given: prompts.Prompts) -> dict[str, Fact]:
    """The peer's top choices on real text, and where it gives logits, how far they are from the reference's."""
    length = prompts.LENGTHS[job.length]
    out = peer.forced(given.prompt(length), given.forced(length))
    if out is None:
        return {"tops": None}
    if out.ndim == 1:
        return {"tops": [int(t) for t in out]}
    tops = [int(t) for t in out.argmax(-1)]
    return {"tops": tops, "kl": divergence(out, Path(job.prompts).with_suffix(f".{job.length}.npy"), job.peer == "transformers")}


def divergence(logits: np.ndarray, kept: Path, reference: bool) -> list[float] | None:
    """KL(reference || peer) in nats at each position; the reference itself keeps its log-probabilities for the others."""
    import numpy as np

    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    logp = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    if reference:
        np.save(kept, logp.astype(np.float32))
    if not kept.exists():
        return None
    truth = np.load(kept).astype(np.float64)
    return [float(f"{k:.4g}") for k in (np.exp(truth) * (truth - logp)).sum(-1)]


def needle(peer: Peer, job: Job, given: prompts.Prompts) -> dict[str, Fact]:
    """What the model says where each hidden number is asked for, and how often it is the number itself."""
    said = []
    for one in given.needles:
        tokens = list[int]()
        peer.stream(one.ids, prompts.ANSWER, tokens.append)
        said.append(given.decode(tokens))
    right = [int(first_number(text) == one.answer) for text, one in zip(said, given.needles, strict=True)]
    return {"said": said, "right": right, "score": sum(right), "prompt_tokens": [len(n.ids) for n in given.needles]}


def first_number(text: str) -> str:
    """The first run of digits."""
    digits = "".join(c if c.isascii() and c.isdigit() else " " for c in text).split()
    return digits[0] if digits else ""


def report(peer: Peer) -> dict[str, Fact] | None:
    """What the peer itself says of its last run, where it does."""
    tell: Callable[[], dict[str, Fact]] | None = getattr(peer, "report", None)
    return tell() if tell else None


TASKS = {"speed": speed, "forced": forced, "needle": needle}

if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    result = main(Job(**json.loads(source.read_text())))
    target.write_text(json.dumps(result))
