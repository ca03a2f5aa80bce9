"""The layer loop: one pass over the tokens of many requests, and the only caller of the seats of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import LongspoolError
from ..kernels import rope
from ..memory import LayerView, Memory, attend, write
from ..model.build import Model
from ..model.layers import Block
from ..model.rope import Rope
from ..plan import Plan
from ..roles import Evict, Prune, Skip
from ..values import Step
from ..values.flow import Ask

Angles = dict[int, tuple[Tensor, Tensor]]


class StepError(LongspoolError):
    """A method's mistake in the middle of a pass: the memories of the whole pass are half written."""

    def __init__(self, plan: Plan, cause: LongspoolError) -> None:
        super().__init__(str(cause))
        self.plan, self.cause = plan, cause


@dataclass
class Group:
    """Requests that share a plan and a phase: their memories, their common step and their slice of the pass."""

    plan: Plan
    memories: list[Memory]
    step: Step
    first: int = 0

    @property
    def where(self) -> slice:
        return slice(self.first, self.first + len(self.step.ids))


def forward(model: Model, asks: Sequence[Ask[Memory]]) -> list[Tensor]:
    """Run all asks in one pass and give each its reply, in order."""
    order = sorted(range(len(asks)), key=lambda i: (hash(asks[i].memory.plan), asks[i].step.phase, i))
    groups = _grouped([asks[i] for i in order])
    x = model.embed(_cat([g.step.ids for g in groups]))
    angles: Angles = {}
    for layer, block in enumerate(model.blocks):
        x = _layer(layer, block, x, groups, angles)
        if any(g.plan.layers[layer].chain(Prune) and g.step.phase == "prefill" for g in groups):
            x, angles = _pruned(layer, x, groups), {}
    for ask in asks:
        ask.memory.seen = int(ask.step.pos[-1]) + 1
    return _replies(model, x, groups, asks, order)


def _grouped(asks: list[Ask[Memory]]) -> list[Group]:
    """Neighbours with equal plans and phases together; a step with a token tree stays alone."""
    groups: list[Group] = []
    for ask in asks:
        last = groups[-1] if groups else None
        if last and last.plan == ask.memory.plan and last.step.phase == ask.step.phase and last.step.tree is None and ask.step.tree is None:
            last.memories.append(ask.memory)
            last.step = _joined(last.step, ask.step)
        else:
            groups.append(Group(ask.memory.plan, [ask.memory], ask.step))
    _place(groups)
    return groups


def _joined(a: Step, b: Step) -> Step:
    spans = (*a.spans, a.spans[-1] + len(b.ids))
    return Step(torch.cat([a.ids, b.ids]), torch.cat([a.pos, b.pos]), spans, a.total + b.total, a.phase, a.final + b.final)


def _place(groups: list[Group]) -> None:
    first = 0
    for g in groups:
        g.first = first
        first += len(g.step.ids)


def _layer(layer: int, block: Block, x: Tensor, groups: list[Group], angles: Angles) -> Tensor:
    """One block: project, write, attend, finish, settle. Groups that skip it only write their keys and values."""
    qk, v = block.project(x)
    turned = qk if block.rope is None else _rotated(block.rope, qk, groups, angles)
    out = torch.empty_like(qk[:, : block.queries]) if len(groups) > 1 else None
    skips = [_skips(layer, x, g) for g in groups]
    for g, skipped in zip(groups, skips, strict=True):
        mine, bare = [m[layer] for m in g.memories], g.plan.layers[layer].bare
        both, vs = (qk if bare else turned)[g.where], v[g.where]
        qs, ks = both[:, : block.queries], both[:, block.queries :]
        try:
            write(mine, qs, ks, vs, g.step)
            seen = None if skipped else attend(mine, qs, ks, vs, g.step)
        except LongspoolError as error:
            raise StepError(g.plan, error) from error
        if out is None:
            out = seen
        elif seen is not None:
            out[g.where] = seen
    new = x if out is None else block.finish(x, out) if not any(skips) else _finish_some(block, x, out, groups, skips)
    for g in groups:
        try:
            _settle(layer, g)
        except LongspoolError as error:
            raise StepError(g.plan, error) from error
    return new


def _rotated(rope_of: Rope, qk: Tensor, groups: list[Group], angles: Angles) -> Tensor:
    """Queries and keys at the step's positions; layers with the same embedding share the angles."""
    if id(rope_of) not in angles:
        pos = _cat([g.step.pos for g in groups])
        cos, sin = rope_of.angles(pos, _totals(groups))
        angles[id(rope_of)] = cos.to(qk.device), sin.to(qk.device)
    cos, sin = angles[id(rope_of)]
    return rope(qk, cos, sin)


def _totals(groups: list[Group]) -> Tensor | int:
    """The longest length known for each token's sequence; one number where there is one request."""
    if len(groups) == 1 and groups[0].step.requests == 1:
        return max(groups[0].step.total[0], int(groups[0].step.pos[-1]) + 1)
    totals = [t for g in groups for a, b, t in zip(g.step.spans, g.step.spans[1:], g.step.total, strict=False) for _ in range(b - a)]
    return torch.maximum(torch.tensor(totals), _cat([g.step.pos for g in groups]) + 1)


def _skips(layer: int, x: Tensor, group: Group) -> bool:
    method = group.plan.layers[layer].one(Skip)
    if method is None or not method.skip(layer, x[group.where], group.step):
        return False
    for memory, a, b in zip(group.memories, group.step.spans, group.step.spans[1:], strict=False):
        memory[layer].count(method, skipped=b - a)
    return True


def _finish_some(block: Block, x: Tensor, out: Tensor, groups: list[Group], skips: list[bool]) -> Tensor:
    """Only the groups that did not skip go through the block."""
    new = x.clone()
    for g, skipped in zip(groups, skips, strict=True):
        if not skipped:
            new[g.where] = block.finish(x[g.where], out[g.where])
    return new


def _settle(layer: int, group: Group) -> None:
    plan = group.plan.layers[layer]
    if not plan.settles and plan.window is None:
        return
    evicts = plan.chain(Evict)
    for b, memory in enumerate(group.memories):
        own = memory[layer]
        if not own.restless and not evicts:
            continue
        step = group.step if len(group.memories) == 1 else group.step.of(b)
        if own.restless or own.due(step):
            own.settle(LayerView(layer, own.shape, step, own.rows(), (own,)))


def _pruned(layer: int, x: Tensor, groups: list[Group]) -> Tensor:
    """Tokens that no method of their request wants in the later layers vanish from the step."""
    keeps = []
    for g in groups:
        keep = torch.cat([_survivors(layer, x, g, b) for b in range(g.step.requests)])
        keeps.append(keep + g.first)
        g.step = g.step.narrow(keep)
    _place(groups)
    return x[torch.cat(keeps)]


def _survivors(layer: int, x: Tensor, group: Group, request: int) -> Tensor:
    """Indices within the group of one request's surviving tokens; its last token always survives."""
    a, b = group.step.spans[request], group.step.spans[request + 1]
    alive = torch.arange(a, b)
    for method in group.plan.layers[layer].chain(Prune) if group.step.phase == "prefill" else ():
        own = group.memories[request][layer]
        step = group.step.of(request).narrow(alive - a)
        view = LayerView(layer, own.shape, step, own.rows(), (own,))
        try:
            keep = method.survivors(x[group.first + alive], view)
        except LongspoolError as error:
            raise StepError(group.plan, error) from error
        if keep is not None:
            view.count(method, pruned=len(alive) - len(keep))
            alive = alive[keep]
    return alive if len(alive) and alive[-1] == b - 1 else torch.cat([alive, torch.tensor([b - 1])])


def _replies(model: Model, x: Tensor, groups: list[Group], asks: Sequence[Ask[Memory]], order: list[int]) -> list[Tensor]:
    """Logits or states for what each ask wants, from one pass of the final norm and head."""
    ends = [(g.first + a, g.first + b) for g in groups for a, b in zip(g.step.spans, g.step.spans[1:], strict=False)]
    rows: dict[int, range] = {}
    for i, (a, b) in zip(order, ends, strict=True):
        rows[i] = {"none": range(0), "all": range(a, b)}.get(asks[i].want, range(b - 1, b))
    replies = [x[:0]] * len(asks)
    for want_state in (True, False):
        mine = [i for i in rows if len(rows[i]) and (asks[i].want == "state") == want_state]
        if not mine:
            continue
        h = model.final(x[torch.tensor([r for i in mine for r in rows[i]])])
        for i, reply in zip(mine, (h if want_state else model.logits(h)).split_with_sizes([len(rows[i]) for i in mine]), strict=True):
            replies[i] = reply
    return replies


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
