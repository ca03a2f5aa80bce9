"""Disks that fail: a damaged page costs time and no answer, a full or missing one is said in a sentence."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from longspool.engine.engine import RENEWALS
from longspool.engine.request import Request
from longspool.errors import OutOfMemory
from longspool.memory import DamagedPage
from longspool.memory.disk import PageFile
from longspool.method import Method
from longspool.report import result
from toolbox import Rig, tokens, words
from toys import Tiers


def alone(methods: list[Method], prompt: list[int], **wishes: object) -> list[int]:
    rig = Rig()
    return tokens(rig.answer(rig.plan(methods), prompt, **wishes))


def spoil(request: Request, layer: int = 1) -> None:
    """Turn a bit of the first page that a layer of the request has on the disk."""
    zone = request.memory[layer].settled
    assert zone is not None and zone.pool.disk is not None
    fd, at = zone.pool.disk._file.fileno(), int(zone.pages()[0]) * zone.pool.disk.record + 5
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)


def until(rig: Rig, request: Request, count: int) -> None:
    while len(request.choices) < count:
        rig.engine.step()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_request_survives_a_damaged_page(temperature: float) -> None:
    rig, prompt = Rig(), words(200, 4)
    request = rig.request(rig.plan([Tiers()]), prompt, max_tokens=20, temperature=temperature, seed=3)
    rig.engine.submit(request)
    until(rig, request, 7)
    spoil(request)
    while not request.done:
        rig.engine.step()
    assert request.error is None and request.damaged == 1 and request.preempted == 1
    assert tokens(request) == alone([], prompt, max_tokens=20, temperature=temperature, seed=3)
    assert any("damaged (1x)" in note for note in result(request, rig.pools).report.notes)
    assert not any(rig.pools.ledger.now.values())


def test_the_neighbours_of_a_damaged_page_go_on() -> None:
    rig = Rig()
    plans = [rig.plan([Tiers()]), rig.plan([Tiers()]), rig.plan()]
    made = [rig.request(plan, words(150 + 9 * i, i), i, max_tokens=15) for i, plan in enumerate(plans)]
    for request in made:
        rig.engine.submit(request)
    until(rig, made[1], 5)
    spoil(made[1])
    while rig.engine.busy:
        rig.engine.step()
    assert [r.damaged for r in made] == [0, 1, 0] and all(r.error is None for r in made)
    for i, request in enumerate(made):
        assert tokens(request) == alone([], words(150 + 9 * i, i), max_tokens=15)


def test_a_disk_that_always_fails_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    request, other = rig.request(rig.plan([Tiers()]), words(200), max_tokens=8), rig.request(rig.plan(), words(90), 1, max_tokens=8)
    read = PageFile._read

    def worn(self: PageFile, into: memoryview, record: int) -> None:
        read(self, into, record)
        into[0] ^= 1

    monkeypatch.setattr(PageFile, "_read", worn)
    rig.engine.submit(request)
    rig.engine.submit(other)
    while rig.engine.busy:
        rig.engine.step()
    assert isinstance(request.error, DamagedPage) and request.damaged == RENEWALS + 1
    assert other.error is None and tokens(other) == alone([], words(90), max_tokens=8)
    assert not any(rig.pools.ledger.now.values())


def test_a_disk_that_fills_up_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    request, other = rig.request(rig.plan([Tiers()]), words(100), max_tokens=90), rig.request(rig.plan(), words(90), 1, max_tokens=30)
    rig.engine.submit(request)
    rig.engine.submit(other)
    until(rig, request, 3)

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    while rig.engine.busy:
        rig.engine.step()
    assert isinstance(request.error, OutOfMemory) and "No space left" in str(request.error)
    assert other.error is None and tokens(other) == alone([], words(90), max_tokens=30)
    assert not any(rig.pools.ledger.now.values())


def test_what_the_disk_can_never_hold_is_said_at_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    with pytest.raises(OutOfMemory, match=r"No pages can be kept in .*none: No such file"):
        rig.engine.submit(rig.request(rig.plan([Tiers(directory=str(tmp_path / "none"))]), words(50)))
    plan = rig.plan([Tiers(directory=str(tmp_path))])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(OutOfMemory, match=r"needs up to [\d,]+ bytes on the disk and .* has 1,000"):
        rig.engine.submit(rig.request(plan, words(50)))
    assert not rig.engine.busy
