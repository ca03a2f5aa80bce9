"""DuoAttention: some heads retrieve and need every token; the others stream, and sinks and a recent window are enough for them.

A gate for each KV head mixes both kinds of attention, o = a * full + (1 - a) * streaming. All weights frozen, the gates are pushed down as
far as the final states at the answers of a recall task allow: texts that hide passkeys and end by telling them again.

    loss = MSE(states, states with all gates 1) at the answers + 0.05 * mean(a),   AdamW, a clamped to 0..1

Deployed, the share `sparsity` of the heads with the lowest gates forgets all old tokens but `sinks`. The paper trains 2,000 steps on books
of up to 32K tokens with 10 passkeys of 32 words, with 128 sinks and a window of 256; ours are `steps` steps on texts of `length` tokens
with fewer and shorter passkeys, and a streaming mask of a sixteenth and an eighth of the text. It also sorts the heads in the weights, to
slice instead of gather; our rows may differ in length anyway.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...method import Cost, Needs, Paper, Trial
from ...roles import Admit, Fitted, Samples, View
from ...values import Shape
from .base import recall, streams


@dataclass(frozen=True)
class DuoAttention(Fitted, Admit):
    sparsity: float = 0.5
    sinks: int = 64
    window: int = 256
    length: int = 512
    steps: int = 60

    paper: ClassVar[Paper] = Paper(
        "S035",
        "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads",
        "arXiv:2410.10819",
        "memory -1.67x with grouped queries, Llama-3-8B at 3.3M tokens on one GPU",
    )
    identity: ClassVar[dict[str, object]] = {"sparsity": 0.0}
    shaping: ClassVar[tuple[str, ...]] = ("length", "steps")
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(
            "duo_attention",
            control="random_evict(budget='58%')",
            beats=("streaming(sinks=64, window=256)",),
            on="agnostic",
            length=2048,
            claim="With half of the heads streaming it finds what it could find with all; all of them streaming don't.",
        ),
    )

    def needs(self) -> Needs:
        return Needs(recent=self.window, ragged=True, calibrated=("model",))

    def check(self, shape: Shape) -> list[str]:
        least = {"sinks": 0, "window": 1, "length": 64, "steps": 1}
        reasons = [f"{n}={getattr(self, n)} must be at least {low}." for n, low in least.items() if getattr(self, n) < low]
        return reasons if 0 <= self.sparsity <= 1 else [*reasons, f"sparsity={self.sparsity} must be between 0 and 1."]

    def fit(self, samples: Samples) -> dict[str, Tensor]:
        """The gates, fp32 [layers, Hkv]; a sliding-window layer's stay at 1."""
        shape, rng = samples.shape, torch.Generator().manual_seed(samples.seed)
        gates = torch.ones(shape.layers, shape.kv_heads, requires_grad=True)
        adam = torch.optim.AdamW([gates], lr=0.02)
        ramp = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: min(5 * (step + 1) / self.steps, 1, 5 * (1 - step / self.steps)))
        for step in range(self.steps):
            ids, answers = recall(samples, step, self.length, rng)
            near = streams(len(ids), self.length // 16, self.length // 8)

            def mixed(layer: int, q: Tensor, k: Tensor, v: Tensor, near: Tensor = near) -> Tensor:
                full = samples.attended(layer, q, k, v)
                if layer not in samples.layers:
                    return full
                gate = gates[layer].repeat_interleave(shape.group)[:, None]
                return gate * full + (1 - gate) * samples.attended(layer, q, k, v, near)

            with torch.no_grad():
                aim = samples.states(ids, samples.attended)[answers]
            loss = (samples.states(ids, mixed)[answers] - aim).square().mean() + 0.05 * gates[list(samples.layers)].mean()
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            ramp.step()
            gates.data.clamp_(0, 1)
        return {"gates": gates.detach()}

    def admit(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        served = tuple(window is None for window in view.shape.windows)
        full = retrieving(view.fitted(self)["gates"], self.sparsity, served)[view.layer]
        return full.to(pos.device)[:, None] | (pos < self.sinks)

    def cost(self, shape: Shape) -> Cost:
        return Cost(moved=(1 - self.sparsity) * shape.head_dim * 4)


@functools.lru_cache(maxsize=16)
def retrieving(gates: Tensor, sparsity: float, served: tuple[bool, ...]) -> Tensor:
    """Which heads keep every token, bool [layers, Hkv]: all but the share with the lowest gates, the earlier ones among equals."""
    own = torch.tensor(served)[:, None].expand(gates.shape)
    order = gates.cpu().masked_fill(~own, torch.inf).flatten().argsort(stable=True)
    full = torch.ones(gates.numel(), dtype=torch.bool)
    full[order[: round(sparsity * int(own.sum()))]] = False
    return full.view(gates.shape)
