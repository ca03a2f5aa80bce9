"""VeriCache: draft on a lossy copy of the memory, verify on the full one.

`horizon` tokens are drafted with the same model over a memory under the inner methods, then one pass over the full memory checks them
all; the longest correct prefix and the verifier's own next token are out, and their exact keys and values replace the drafted ones.
Drafting and verifying draw with the same noise, so sampled answers equal plain decoding's too. The paper keeps the full memory off
the device between verifications; add headinfer for that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ...method import LOSSLESS, Method, Needs, Paper, Trial
from ...roles import Admit, Decode, Encode, Evict, Request, Select
from ...values import Shape
from ...values.flow import Choice, Emit, Flow


@dataclass(frozen=True)
class VeriCache(Method, Decode):
    inner: tuple[Method, ...] = field(metadata={"wraps": "many"})
    horizon: int = 16

    paper: ClassVar[Paper] = Paper(
        "S086", "VeriCache: lossless speculation on a compressed KV cache", "arXiv:2605.17613", "up to 4x throughput with identical output"
    )
    identity: ClassVar[str] = LOSSLESS
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial("vericache(snapkv(budget=512) + int4)", on="exact", length=1500, claim="Drafts on a lossy memory, answers of the full one."),
    )
    example: ClassVar[str] = "vericache(snapkv)"

    def needs(self) -> Needs:
        drafts = [m.needs() for m in self.inner]
        keys = next((need.keys for need in drafts if need.keys), None)
        return Needs(
            recent=self.horizon + 1,
            queries=max((need.queries for need in drafts), default=0),
            keys=keys,
            mass=any(need.mass for need in drafts),
            whole=True,
            drawn=any(need.drawn for need in drafts),
            text=any(need.text for need in drafts),
        )

    def check(self, shape: Shape) -> list[str]:
        reasons = [] if self.horizon >= 1 else [f"horizon={self.horizon} must be at least 1."]
        if not self.inner:
            reasons.append(
                "it drafts on a compressed memory and needs methods that compress, for example vericache(snapkv(budget=1024) + int4)."
            )
        idle = [m.slug for m in self.inner if not isinstance(m, Admit | Evict | Encode | Select)]
        return reasons + [f"{slug} does not compress the memory and can't be drafted on." for slug in idle]

    def beside(self) -> tuple[Method, ...]:
        return self.inner

    def flow(self, request: Request, reply: Tensor) -> Flow:
        last = request.pick(reply)
        if not (yield Emit((last,))):
            return None
        draft = request.draft(self.inner, self.needs().recent)
        try:
            going: object = True
            while going:
                base, guesses = request.memory.seen, []
                sampler, token = request.sampler.fork(), last.token
                for _ in range(self.horizon):
                    logits = yield request.ask([token], "decode", draft)
                    assert isinstance(logits, Tensor)
                    token = sampler.pick(logits[-1]).token
                    sampler.commit(token)
                    guesses.append(token)
                logits = yield request.ask([last.token, *guesses], "verify", want="all")
                out = _accept(request, logits, guesses)
                request.count(self, rounds=1, drafted=len(guesses), accepted=len(out) - 1)
                request.memory.truncate(base + len(out))
                draft.adopt(request.memory, base)
                last = out[-1]
                going = yield Emit(tuple(out))
        finally:
            draft.free()
        return None


def _accept(request: Request, logits: object, guesses: list[int]) -> list[Choice]:
    """The verifier's tokens up to and including the first that differs from its guess."""
    assert isinstance(logits, Tensor)
    out = []
    for row, guess in zip(logits, [*guesses, None], strict=True):
        out.append(request.pick(row[None]))
        if out[-1].token != guess:
            break
    return out
