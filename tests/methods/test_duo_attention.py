"""DuoAttention: the gates' gradient against a plain runner, which heads stream, and what each kind of head sees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspool.engine.samples import Runs
from longspool.memory import Fits
from longspool.methods.admit.base import recall, streams
from longspool.methods.admit.duo_attention import DuoAttention, retrieving
from longspool.model.build import Model
from longspool.model.tiny import tiny
from longspool.values.fit import Fit
from reference import rotate
from toolbox import Bytes, Job, Rig, causal, fitted, masked_logits, model, words

SINKS, WINDOW, PAGE, N = 5, 30, 64, 260
IDS = words(N + 60, 3)
GATES = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]])
METHOD = DuoAttention(0.5, SINKS, WINDOW)


def rig(kind: str = "llama", gates: Tensor = GATES, method: DuoAttention = METHOD) -> Rig:
    return Rig(kind, fits=Fits({method: Fit({"gates": gates})}))


def held(tokens: int) -> list[int]:
    """What a streaming head holds after so many tokens."""
    cut = max(tokens - WINDOW, 0) // PAGE * PAGE
    return [p for p in range(tokens) if p < SINKS or p >= cut]


def test_streaming_heads_hold_sinks_and_the_newest_and_the_others_all() -> None:
    bench = rig()
    memory = bench.read(bench.plan(METHOD), IDS[:N], 100)
    bench.drip(memory, IDS[N:])
    for layer in range(3):
        for head in range(2):
            whole = float(GATES[layer, head]) > 0.5
            assert memory.positions(layer)[head].tolist() == (list(range(len(IDS))) if whole else held(len(IDS)))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_sees_what_it_holds(kind: str) -> None:
    bench, chunk = rig(kind), 100
    near = causal(len(IDS))
    for i in range(len(IDS)):
        start = i // chunk * chunk if i < N else i
        near[i, :start] = torch.tensor([p in set(held(start)) for p in range(start)])
    whole = causal(len(IDS))

    def seen(layer: int, trace: object) -> Tensor:
        return torch.stack([whole if GATES[layer, h // 2] > 0.5 else near for h in range(4)])

    expected, _ = masked_logits(bench.model, IDS, seen)  # type: ignore[arg-type]
    torch.testing.assert_close(bench.run(Job(bench.plan(METHOD), IDS, N, chunk))[0], expected, atol=1e-4, rtol=0)
    assert float((expected - masked_logits(bench.model, IDS, lambda layer, trace: whole)[0]).abs().max()) > 0.05


def test_the_share_with_the_lowest_gates_streams() -> None:
    served = (True, True, True)
    assert retrieving(GATES, 0.5, served).tolist() == [[True, False], [False, True], [True, False]]
    assert retrieving(GATES, 0.0, served).all() and not retrieving(GATES, 1.0, served).any()
    assert int(retrieving(GATES, 0.34, served).sum()) == 4
    ties = torch.ones(3, 2)
    assert retrieving(ties, 0.5, served).flatten().tolist() == [False] * 3 + [True] * 3
    assert retrieving(GATES, 1.0, (True, False, True)).tolist() == [[False, False], [True, True], [False, False]]


def test_all_gates_open_is_dense() -> None:
    for method in (DuoAttention(0.0, SINKS, WINDOW), DuoAttention(1.0, SINKS, 1000), DuoAttention(1.0, 1000, WINDOW)):
        bench = rig(method=method)
        expected, _ = masked_logits(bench.model, IDS, lambda layer, trace: causal(len(IDS)))
        torch.testing.assert_close(bench.run(Job(bench.plan(method), IDS, N, 100))[0], expected, atol=1e-4, rtol=0)


def test_memory_is_what_the_heads_hold() -> None:
    bench, method = rig(), METHOD
    memory = bench.read(bench.plan(method, torch.float16), IDS[:N])
    pages = sum(-(-len(p[p < (N - WINDOW) // PAGE * PAGE]) // PAGE) for layer in range(3) for p in memory.positions(layer))
    assert sum(z.bytes for z in (layer.settled for layer in memory.layers) if z is not None) == pages * PAGE * (2 * 16 * 2 + 4)


def test_passkeys_are_told_where_they_are_asked_for() -> None:
    runs = Runs(model(), [words(500, 1)], ("model",), 0, Bytes().encode)
    ids, places = recall(runs, 0, 1200, torch.Generator().manual_seed(0))
    text = Bytes().decode(ids.tolist())
    told = "".join(chr(int(ids[p + 1])) for p in places)
    keys = told.split(".")[:-1]
    assert len(keys) == 4 and len(ids) == 1200
    for i, key in enumerate(keys):
        assert text.count(f"Passkey {i + 1} is{key}.") == 2 and len(key.split()) == 6
        assert text.index(f"Passkey {i + 1} is{key}.") < text.rindex("Passkey 1 is")


def test_streams_sees_sinks_and_a_window() -> None:
    mask = streams(50, 3, 7) & causal(50)
    for i in range(50):
        assert mask[i].nonzero()[:, 0].tolist() == [j for j in range(i + 1) if j < 3 or i - j < 7]


def mixed_states(of: Model, ids: Tensor, near: Tensor, gates: Tensor) -> Tensor:
    """Final states of a plain runner with each layer's attention mixed by its gates, in float64."""
    x, pos = of.embed(ids), torch.arange(len(ids))
    for layer, block in enumerate(of.blocks):
        q, k, v = block.qkv(x)
        if block.rope is not None:
            angles = block.rope.angles(pos, len(ids))
            q, k = rotate(q, *angles), rotate(k, *angles)
        seen, out = causal(len(ids), of.shape.windows[layer]), []
        for h in range(of.shape.heads):
            s = q[:, h].double() @ k[:, h // of.shape.group].double().T * of.shape.scale
            s = torch.tanh(s / of.shape.softcap) * of.shape.softcap if of.shape.softcap else s
            a, value = gates[layer, h // of.shape.group], v[:, h // of.shape.group].double()
            full = s.masked_fill(~seen, -torch.inf).softmax(-1) @ value
            part = s.masked_fill(~(seen & near), -torch.inf).softmax(-1) @ value
            out.append(full if of.shape.windows[layer] else a * full + (1 - a) * part)
        x = block.finish(x, torch.stack(out, 1).float())
    return of.final(x).double()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3"])
def test_the_gradient_is_that_of_the_mixture(kind: str) -> None:
    """Against differences of the loss in a plain runner."""
    of = model(kind)
    runs = Runs(of, [words(400, 91)], ("model",), 5, Bytes().encode)
    ids, places = recall(runs, 0, 160, torch.Generator().manual_seed(5))
    near = streams(len(ids), 10, 20)
    gates = torch.rand(of.shape.layers, of.shape.kv_heads, generator=torch.Generator().manual_seed(6)).mul_(0.6).add_(0.2).requires_grad_()

    def mixed(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        full = runs.attended(layer, q, k, v)
        gate = gates[layer].repeat_interleave(of.shape.group)[:, None]
        return gate * full + (1 - gate) * runs.attended(layer, q, k, v, near) if layer in runs.layers else full

    aim = mixed_states(of, ids, near, torch.ones(gates.shape))[places]
    torch.testing.assert_close(runs.states(ids, runs.attended)[places].double(), aim, atol=1e-4, rtol=0)
    states = runs.states(ids, mixed)
    torch.testing.assert_close(states.double(), mixed_states(of, ids, near, gates.detach().double()), atol=1e-4, rtol=0)
    (states[places] - aim.float()).square().mean().backward()
    assert gates.grad is not None
    for layer in runs.layers:
        for head in range(of.shape.kv_heads):
            step = torch.zeros(gates.shape, dtype=torch.float64)
            step[layer, head] = 0.01
            up, down = ((mixed_states(of, ids, near, gates.detach().double() + d)[places] - aim).square().mean() for d in (step, -step))
            slope = float(up - down) / 0.02
            assert abs(float(gates.grad[layer, head]) - slope) < 0.03 * abs(slope) + 1e-4
            assert abs(slope) > 1e-4


def test_the_first_step_is_that_of_the_price() -> None:
    """With all gates at 1 the states are as they should be, so that AdamW's first step is the learning rate down, and its decay."""
    of = model("gemma3")
    gates = DuoAttention(length=160, steps=1).fit(Runs(of, [words(400, 91)], ("model",), 5, Bytes().encode))["gates"]
    for layer, window in enumerate(of.shape.windows):
        expected = 1 - 0.02 * (1 + 0.01)
        if window is None:
            torch.testing.assert_close(gates[layer], torch.full((2,), expected), atol=1e-4, rtol=0)


def test_gates_that_matter_stay_open() -> None:
    """A model in which one head's old tokens can't matter (its output matrix is zero there): that head's gate falls, the others resist."""
    of = tiny(num_hidden_layers=1)
    weight = of.blocks[0].outward.weight
    assert isinstance(weight, Tensor)
    weight[:, :32] = 0  # the two query heads of KV head 0
    weight *= 6
    runs = Runs(of, [words(400, 91)], ("model",), 2, Bytes().encode)
    gates = DuoAttention(length=160, steps=25).fit(runs)["gates"]
    assert float(gates[0, 0]) < 0.75 < 0.8 < float(gates[0, 1])


def test_the_contract_suites_fit_is_a_fit() -> None:
    gates = fitted(model(), DuoAttention(length=128, steps=2))["gates"]
    assert gates.shape == (3, 2) and bool((gates < 1).all()) and bool((gates > 0.9).all())
