"""A memory goes to disk and comes back whole, or is refused with a reason."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from longspool.errors import MemoryFileError
from longspool.memory import Memory
from longspool.memory.file import FORMAT, load, save
from longspool.method import Method
from longspool.recipe import parse
from toolbox import Rig, words

IDS = words(150)
RECIPE = "snapkv(budget=60, window=16) + int4(window=16)"


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig()


@pytest.fixture(scope="module")
def memory(rig: Rig) -> Memory:
    return rig.read(rig.plan(RECIPE, torch.float16), IDS)


@pytest.fixture
def path(memory: Memory, tmp_path: Path) -> Path:
    save(memory, tmp_path / "prompt.mem", "model-1")
    return tmp_path / "prompt.mem"


def read(rig: Rig, path: Path, recipe: str = RECIPE, dtype: torch.dtype = torch.float16, fingerprint: str = "model-1") -> Memory:
    return load(path, rig.plan(recipe, dtype), rig.pools, rig.engine._rotates, fingerprint)


def refused(rig: Rig, path: Path, *said: str, **given: object) -> None:
    before = dict(rig.pools.ledger.now)
    with pytest.raises(MemoryFileError) as error:
        read(rig, path, **given)  # type: ignore[arg-type]
    assert all(part in str(error.value) for part in said), str(error.value)
    assert rig.pools.ledger.now == before, "a refused file leaves nothing in memory"


def test_is_a_safetensors_file_at_the_methods_size(memory: Memory, path: Path) -> None:
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == FORMAT and file.metadata()["recipe"] == RECIPE
        stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    pages = sum(z.bytes for layer in memory.layers for z in (layer.recent, layer.settled) if z is not None)
    kept = sum(q.nbytes for layer in memory.layers for q in layer.past)
    assert pages + kept < stored < pages + kept + 3 * 2000
    assert stored < path.stat().st_size < stored + 8192
    assert os.listdir(path.parent) == [path.name]


def test_comes_back_the_same(rig: Rig, memory: Memory, path: Path) -> None:
    other, twin = Rig(), memory.fork()
    again = read(other, path)
    assert again.seen == memory.seen
    for layer in range(3):
        assert all(map(torch.equal, again.positions(layer), memory.positions(layer)))
    again.check()
    assert torch.equal(other.drip(again, words(70, 3)), rig.drip(twin, words(70, 3)))
    again.free()
    assert not any(other.pools.ledger.now.values())
    twin.free()


def test_notes_come_back(rig: Rig, tmp_path: Path) -> None:
    memory = rig.read(rig.plan(), IDS[:20])
    memory.notes["quest"] = {"pick": torch.arange(5), "share": 0.25, "layer": 2}
    save(memory, tmp_path / "m", "x")
    notes = read(rig, tmp_path / "m", "", torch.float32, "x").notes["quest"]
    assert torch.equal(notes.pop("pick"), torch.arange(5)) and notes == {"share": 0.25, "layer": 2}  # type: ignore[arg-type]
    memory.notes["quest"] = {"what": object()}
    with pytest.raises(MemoryFileError, match="notes hold"):
        save(memory, tmp_path / "n", "x")
    assert os.listdir(tmp_path) == ["m"]


def test_refuses_what_does_not_belong(rig: Rig, path: Path) -> None:
    refused(rig, path, "the model", "model-1", "model-2", fingerprint="model-2")
    refused(rig, path, "the recipe", RECIPE, "int8", recipe="int8")
    refused(rig, path, "the recipe", "budget=60", "budget=61", recipe=RECIPE.replace("60", "61"))
    refused(rig, path, "storage type", "float16", "bfloat16", dtype=torch.bfloat16)
    newer = path.with_name("newer")
    newer.write_bytes(path.read_bytes().replace(FORMAT.encode(), b"longspool-memory-2"))
    refused(rig, newer, "longspool-memory-2", FORMAT)


def test_refuses_every_damage(rig: Rig, path: Path) -> None:
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    hurt = path.with_name("hurt")
    for at in [0, 3, 7, 8, 20, 8 + whole[8:].index(b"recipe"), 8 + size // 2, 8 + size, len(whole) // 2, len(whole) - 1]:
        hurt.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        refused(rig, hurt, str(hurt))
    for end in [0, 5, 8, 100, 8 + size, len(whole) - 1]:
        hurt.write_bytes(whole[:end])
        refused(rig, hurt, str(hurt))
    hurt.write_bytes(whole + b"\0")
    refused(rig, hurt, "damaged")
    refused(rig, path.with_name("absent"), "can't be read", "No such file")
    refused(rig, path.parent, "can't be read")
    hurt.write_bytes(len(b'{"a": 1}').to_bytes(8, "little") + json.dumps({"a": 1}).encode())
    refused(rig, hurt, "no saved memory")


def test_refuses_another_form_of_the_same_recipe(rig: Rig, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that stores something else under the same name, as a later version may."""
    int4 = type(parse("int4")[0].method)
    fields = int4.fields

    def wider(self: Method, shape: object, page: int, layers: int) -> object:
        return {**fields(self, shape, page, layers), "v_scale": fields(self, shape, page * 2, layers)["v_scale"]}

    monkeypatch.setattr(int4, "fields", wider)
    refused(rig, path, "v_scale", "is expected")


def test_a_failed_write_leaves_the_old_file(memory: Memory, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MemoryFileError, match="No space left"):
        save(memory, path, "model-1")
    assert path.read_bytes() == whole and os.listdir(path.parent) == [path.name]
    with pytest.raises(MemoryFileError, match="can't be written"):
        save(memory, path.parent / "nowhere" / "m", "model-1")
