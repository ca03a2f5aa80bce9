"""A step that is played again gives what the layers would give, and is dropped when it no longer fits."""

from __future__ import annotations

import pytest
import torch

from longspool.engine import replay as module
from longspool.engine.engine import Engine
from longspool.engine.forward import forward
from longspool.kernels import record
from longspool.kernels.record import Tape, recording
from longspool.memory import Memory
from longspool.model.build import Model, assemble
from longspool.model.tiny import tiny
from longspool.model.weights import Noise
from longspool.plan import resolve
from longspool.recipe import parse
from longspool.values import Packed, Step
from longspool.values.flow import Ask

PROMPT, TOKENS = 300, 90


class PackedNoise(Noise):
    """Random weights in 8 bits: what is not packed is multiplied by torch, which no tape can play."""

    def matrix(self, name: str, rows: int, cols: int) -> torch.Tensor | Packed:
        w = super().matrix(name, rows, cols)
        return Packed.from_float(w, "int8") if isinstance(w, torch.Tensor) else w


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma2 without windows"])
def model(request: pytest.FixtureRequest) -> Model:
    family, *rest = request.param.split()
    over = {"layer_types": ["full_attention"] * 3} if rest else {}
    config = tiny(family, **over).config
    return assemble(config, PackedNoise(3, 1.0 - config.norm_shift))


def step(model: Model, memory: Memory, ids: list[int], phase: str = "decode") -> torch.Tensor:
    first = memory.seen
    pos = torch.arange(first, first + len(ids))
    (reply,) = forward(
        model,
        [Ask(Step(torch.tensor(ids), pos, (0, len(ids)), (PROMPT,), phase, (phase == "prefill",)), memory)],  # type: ignore[arg-type]
    )
    return reply[-1]


class Bench:
    """A model, a memory with a prompt in it, and how many steps were played."""

    def __init__(self, model: Model, recipe: str, monkeypatch: pytest.MonkeyPatch, replays: bool = True) -> None:
        self.model, self.played = model, 0
        self.memory = Engine(model, 1 << 28).empty(resolve(parse(recipe), model.shape, torch.float32))
        if not replays:
            monkeypatch.setattr(module, "TRIES", 0)
            monkeypatch.setattr("longspool.engine.forward.TRIES", 0)
        play = module.Replay.play

        def counted(*args: object) -> torch.Tensor:
            self.played += 1
            return play(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(module.Replay, "play", counted)
        ids = torch.randint(model.shape.vocab, (PROMPT,), generator=torch.Generator().manual_seed(2)).tolist()
        self.say(*ids, phase="prefill")

    def say(self, *ids: int, phase: str = "decode") -> torch.Tensor:
        return step(self.model, self.memory, list(ids), phase)


def told(model: Model, recipe: str, replays: bool) -> tuple[list[torch.Tensor], dict[str, dict[str, float]], int]:
    """Logits of each step, the counters at the end, and how many steps were played."""
    with pytest.MonkeyPatch.context() as patch:
        bench = Bench(model, recipe, patch, replays)
        logits = [bench.say(7 + i % 40) for i in range(TOKENS)]
        return logits, {slug: dict(names) for slug, names in bench.memory.actions.items()}, bench.played


@pytest.mark.parametrize(
    "recipe", ["", "int8", "int4", "streaming(window=64)", "quest(budget=128) + int8", "topk(budget=64)", "snapkv(budget=128) + int4"]
)
def test_played_steps_equal_run_ones(model: Model, recipe: str) -> None:
    """Through page ends and settling, bit by bit, with the same counters."""
    want, counted, none = told(model, recipe, replays=False)
    got, counts, played = told(model, recipe, replays=True)
    assert none == 0 and played > TOKENS * 3 // 4
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert counts == counted


def test_what_changes_a_memory_is_noticed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rolled back, forked, and asked for another number of threads, a memory answers as one that never played a step."""
    bench = Bench(model, "", monkeypatch)
    first = [bench.say(7 + i) for i in range(20)]
    before = bench.played
    assert before
    bench.memory.truncate(PROMPT + 5)
    assert all(torch.equal(bench.say(7 + i), first[i]) for i in range(5, 20))
    twin = bench.memory.fork()
    mine = [bench.say(50 + i) for i in range(8)]
    bench.memory, original = twin, bench.memory
    theirs = [bench.say(50 + i) for i in range(8)]
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    bench.memory = original
    threads, played = torch.get_num_threads(), bench.played
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        bench.say(1)
        assert bench.played == played
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("recipe", ["self_extend(group=2, window=64)", "headinfer"])
def test_what_python_computes_is_never_played(model: Model, recipe: str) -> None:
    logits, _, played = told(model, recipe, replays=True)
    assert played == 0 and all(row.isfinite().all() for row in logits)


WORK = {
    "sum": lambda x: x + 1,
    "in place": lambda x: x.add_(1),
    "function": lambda x: torch.softmax(x, -1),
    "gather": lambda x: x[torch.tensor([1, 0])],
    "mask": lambda x: x[x > 0],
    "copy": lambda x: x.T.contiguous(),
    "another type": lambda x: x.half(),
    "read": lambda x: x[0, 0].item(),
    "branch": lambda x: bool(x[0, 0]),
    "filled": lambda x: torch.zeros(3),
}


@pytest.mark.parametrize("name", WORK)
def test_what_torch_computes_spoils_a_tape(name: str) -> None:
    x = torch.ones(2, 4)
    with recording() as tape:
        WORK[name](x)
    assert tape.why.startswith("torch ran")


def test_what_moves_no_numbers_spoils_no_tape() -> None:
    x = torch.ones(2, 4)
    with recording() as tape:
        y = torch.empty(3).view(3, 1)[1:].as_strided((1,), (1,))
        assert y.shape == (1,) and y.is_contiguous() and y.data_ptr() and x.contiguous() is x and x.to(torch.float32) is x
        x.split_with_sizes((1, 3), 1)
        x[0:1, None].flatten(0, 1)
    assert not tape.why


def test_a_tape_is_closed_whatever_happens() -> None:
    with pytest.raises(RuntimeError), recording():
        raise RuntimeError
    assert record.now.tape is None


def test_an_op_without_a_recorded_kernel_spoils_the_tape() -> None:
    from longspool.kernels import rope

    x, angle = torch.ones(1, 1, 8), torch.ones(1, 4)
    with recording() as tape:
        rope(x, angle, angle)
    assert "rope" in tape.why


def test_rooms_of_a_tape_stay_its_own() -> None:
    tape = Tape()
    small = tape.room(100)
    large = tape.room(10_000)
    assert tape.room(200) is large and small.numel() == 100
