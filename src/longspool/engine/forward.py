"""The layer loop: one pass over the tokens of many requests, and the only caller of the seats of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import LongspoolError
from ..kernels import chain, rope
from ..memory import LayerView, Memory, advance, attend, learn, write
from ..model.build import Model
from ..model.layers import Block
from ..plan import Plan
from ..roles import Evict, Pattern, Prune, Select, Skip
from ..values import Step
from ..values.flow import Ask, Want
from .angles import Angles
from .replay import TRIES, Replay, repeats, roomy


class StepError(LongspoolError):
    """A method's mistake in the middle of a pass: the memories of the whole pass are half written."""

    def __init__(self, plan: Plan, cause: LongspoolError) -> None:
        super().__init__(str(cause))
        self.plan, self.cause = plan, cause


@dataclass
class Group:
    """Requests that share a plan and a phase: their memories, what they want, their common step and their slice of the pass."""

    plan: Plan
    memories: list[Memory]
    wants: list[Want]
    step: Step
    first: int = 0

    @property
    def where(self) -> slice:
        return slice(self.first, self.first + len(self.step.ids))


def forward(model: Model, asks: Sequence[Ask[Memory]]) -> list[Tensor]:
    """Run all asks in one pass and give each its reply, in order."""
    order = sorted(range(len(asks)), key=lambda i: (hash(asks[i].memory.plan), asks[i].step.phase, i))
    groups = _grouped([asks[i] for i in order])
    for ask in asks:
        ask.memory.read(ask.step)
    x = _streamed(model, model.embed(_cat([g.step.ids for g in groups])), groups)
    for ask in asks:
        ask.memory.seen = int(ask.step.pos[-1]) + 1
    return _replies(model, x, groups, asks, order)


def _streamed(model: Model, x: Tensor, groups: list[Group]) -> Tensor:
    """The stream after all layers: for the next token of a single request as they ran for the last one, where they can."""
    angles = _angles(model, groups)
    if len(groups) > 1 or not _one_token(groups[0]) or groups[0].plan.watches(groups[0].step):
        return _layers(model, x, groups, angles)
    group, (memory,) = groups[0], groups[0].memories
    replay = memory.replay = memory.replay if isinstance(memory.replay, Replay) else Replay()
    if replay.fits(memory):
        x = replay.play(memory, x, group.step)
        for layer in range(len(model.blocks)):
            _settle(layer, group)
        return x
    if not (replay.begun and replay.failures < TRIES and roomy(memory) and repeats(group.plan)):
        replay.begun = True  # the first step of all makes what later ones find made
        return _layers(model, x, groups, angles)
    for block in model.blocks:
        if block.rope is not None:
            angles.of(block.rope)
    return replay.record(memory, x, angles, lambda: _layers(model, x, groups, angles))


def _one_token(group: Group) -> bool:
    """Whether this is one request's next token on the CPU."""
    step = group.step
    return step.phase == "decode" and len(group.memories) == 1 and len(step.ids) == 1 and step.tree is None and group.memories[0].on_cpu


def _layers(model: Model, x: Tensor, groups: list[Group], angles: Angles) -> Tensor:
    """All layers, and between them what they say to each other."""
    heads = None
    for layer, block in enumerate(model.blocks):
        if heads is None:
            x, heads = chain(x, block.entry, [], _turns(model, layer, groups, angles))
        if layer + 1 == len(model.blocks) and _ends_suffice(layer, groups):
            return _ends(layer, block, x, heads, groups[0])
        out, skips = _attended(layer, block, x, heads, groups, angles)
        prunes = any(g.plan.layers[layer].chain(Prune) and g.step.phase == "prefill" for g in groups)
        if out is not None and layer + 1 < len(model.blocks) and not (prunes or any(skips)):
            x, heads = chain(x, model.links[layer], [out.flatten(1)], _turns(model, layer + 1, groups, angles))
        else:
            x, heads = x if out is None else _finished(block, x, out, groups, skips), None
        for g in groups:
            _settle(layer, g)
        if prunes:
            x = _pruned(layer, x, groups)
            angles = _angles(model, groups)
    return x


def _ends_suffice(layer: int, groups: list[Group]) -> bool:
    """Whether nobody will see what the last layer makes of a prompt's tokens but of the last one of each chunk."""
    plan, group = groups[0].plan.layers[layer], groups[0]
    looks = plan.bare or plan.observers or any(plan.seats[seat] for seat in (Pattern, Prune, Skip))
    return len(groups) == 1 and group.step.phase == "prefill" and "all" not in group.wants and not looks


def _ends(layer: int, block: Block, x: Tensor, heads: Tensor, group: Group) -> Tensor:
    """The last layer of a prompt's chunks: all tokens are written, and the last one of each attends and goes on."""
    mine, keep = [m[layer] for m in group.memories], torch.tensor(group.step.spans[1:]) - 1
    (q, k, v), few = heads.view(x.shape[0], *block.heads).split_with_sizes(block.parts, 1), group.step.narrow(keep)
    try:
        write(mine, q, k, v, group.step)
        out = attend(mine, q[keep], k[keep], v[keep], few)
    except LongspoolError as error:
        raise StepError(group.plan, error) from error
    _settle(layer, group)
    group.step = few
    return block.finish(x[keep], out)


def _angles(model: Model, groups: list[Group]) -> Angles:
    return Angles(_cat([g.step.pos for g in groups]), _totals(groups), model.device)


def _grouped(asks: list[Ask[Memory]]) -> list[Group]:
    """Neighbours with equal plans and phases together; a step with a token tree stays alone."""
    groups: list[Group] = []
    for ask in asks:
        last = groups[-1] if groups else None
        if last and last.plan == ask.memory.plan and last.step.phase == ask.step.phase and last.step.tree is None and ask.step.tree is None:
            last.memories.append(ask.memory)
            last.wants.append(ask.want)
            last.step = _joined(last.step, ask.step)
        else:
            groups.append(Group(ask.memory.plan, [ask.memory], [ask.want], ask.step))
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


def _attended(layer: int, block: Block, x: Tensor, heads: Tensor, groups: list[Group], angles: Angles) -> tuple[Tensor | None, list[bool]]:
    """Write and attend: what attention gives [N, H, D], undefined for groups that skip and None for a single one; and who skips: they
    only write their keys and values.

    heads [N, (H + 2 Hkv) D] are rotated, but not where some group keeps its keys bare.
    """
    given = heads.view(x.shape[0], *block.heads).split_with_sizes(block.parts, 1)
    turned = _turned(block, given, angles) if _bare(layer, groups) else given
    out = torch.empty_like(given[0]) if len(groups) > 1 else None
    skips = [_skips(layer, x, g) for g in groups]
    for g, skipped in zip(groups, skips, strict=True):
        mine, parts = [m[layer] for m in g.memories], given if g.plan.layers[layer].bare else turned
        q, k, v = parts if len(groups) == 1 else (part[g.where] for part in parts)
        try:
            if skipped:
                write(mine, q, k, v, g.step)
                continue
            seen = advance(mine, q, k, v, g.step)
        except LongspoolError as error:
            raise StepError(g.plan, error) from error
        if out is None:
            out = seen
        else:
            out[g.where] = seen
    return out, skips


def _turned(block: Block, parts: tuple[Tensor, ...], angles: Angles) -> tuple[Tensor, ...]:
    """Queries, keys and values with the first two rotated."""
    if block.rope is None:
        return parts
    q, k, v = parts
    cos, sin = angles.of(block.rope)
    return rope(q, cos, sin), rope(k, cos, sin), v


def _bare(layer: int, groups: list[Group]) -> bool:
    return any(g.plan.layers[layer].bare for g in groups)


def _turns(model: Model, layer: int, groups: list[Group], angles: Angles) -> tuple[Tensor, Tensor] | None:
    """The angles that a layer's heads are rotated by at once, or None."""
    rope_of = model.blocks[layer].rope
    return None if rope_of is None or _bare(layer, groups) else angles.of(rope_of)


def _totals(groups: list[Group]) -> Tensor | int:
    """The longest length known for each token's sequence; one number where there is one request."""
    if len(groups) == 1 and groups[0].step.requests == 1:
        return groups[0].step.reach
    totals = [t for g in groups for a, b, t in zip(g.step.spans, g.step.spans[1:], g.step.total, strict=False) for _ in range(b - a)]
    return torch.maximum(torch.tensor(totals), _cat([g.step.pos for g in groups]) + 1)


def _skips(layer: int, x: Tensor, group: Group) -> bool:
    method = group.plan.layers[layer].one(Skip)
    if method is None or not method.skip(layer, x[group.where], group.step):
        return False
    for memory, a, b in zip(group.memories, group.step.spans, group.step.spans[1:], strict=False):
        memory[layer].count(method, skipped=b - a)
    return True


def _finished(block: Block, x: Tensor, out: Tensor, groups: list[Group], skips: list[bool]) -> Tensor:
    """The stream after the block, through which only the groups go that did not skip it."""
    if not any(skips):
        return block.finish(x, out)
    new = x.clone()
    for g, skipped in zip(groups, skips, strict=True):
        if not skipped:
            new[g.where] = block.finish(x[g.where], out[g.where])
    return new


def _settle(layer: int, group: Group) -> None:
    plan = group.plan.layers[layer]
    if not plan.settles and plan.window is None:
        return
    evicts, reads = plan.chain(Evict), plan.one(Select) is not None and group.step.phase == "prefill"
    for b, memory in enumerate(group.memories):
        own = memory[layer]
        if not own.restless and not evicts and not reads:
            continue
        step = group.step if len(group.memories) == 1 else group.step.of(b)
        try:
            if own.restless or own.due(step):
                memory.settle(layer, step)
            elif reads and step.final[0]:
                learn(own, step)
        except LongspoolError as error:
            raise StepError(group.plan, error) from error


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
