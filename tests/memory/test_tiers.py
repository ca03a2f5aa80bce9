"""Pages that live elsewhere: what is stored there, what is resident, and the copies that are kept near."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspool.errors import OutOfMemory
from longspool.memory.cache import Cache
from longspool.memory.disk import CHECK, DamagedPage, PageFile
from longspool.memory.pool import Ledger, Pool
from longspool.method import Method
from longspool.recipe import parse
from longspool.roles import Field
from longspool.values import Rows
from memory.test_layer import Bench, as_double
from toolbox import Rig, words
from toys import Every, Ram, Tiers

PAGE = 8
FIELDS = {
    "k": Field((3, PAGE), torch.float16, tokens=1),
    "v": Field((PAGE, 5), torch.bfloat16, tokens=0),
    "scale": Field((3,), torch.float32),
    "code": Field((3, PAGE // 2), torch.uint8, tokens=1),
    "mark": Field((2,), torch.float32, resident=True),
}
AWAY = 3 * PAGE * 2 + PAGE * 5 * 2 + 3 * 4 + 3 * PAGE // 2
MARK = 8


def pool(tier: str, piece: int = 0, folder: str = "") -> Pool:
    return Pool(FIELDS, PAGE, tier, Ledger(), 64 * 400, piece=piece, reserve=1 << 16, folder=folder)


def content(count: int, seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randint(0, 200, (count, *f.shape), generator=rng) - (0 if f.dtype == torch.uint8 else 100)).to(f.dtype)
        for name, f in FIELDS.items()
    }


# ---- pools


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("piece", [2, 4, 8])
def test_every_tier_gives_back_pages_and_pieces(tier: str, piece: int) -> None:
    p, want = pool(tier, piece), content(6)
    pages = p.take(9)[[7, 1, 2, 3, 8, 0]]
    p.put(torch.from_numpy(pages).long(), want)
    order = torch.tensor([4, 0, 5, 5, 2])
    got = p.get(torch.from_numpy(pages).long()[order])
    assert got.keys() == FIELDS.keys() and all(torch.equal(got[name], want[name][order]) for name in FIELDS)
    per = PAGE // piece
    entries = [(s, j) for s in (3, 0, 5) for j in reversed(range(per))]
    got = p.get(torch.tensor([int(pages[s]) * per + j for s, j in entries]), piece)
    for i, (s, j) in enumerate(entries):
        assert torch.equal(got["k"][i], want["k"][s][:, j * piece : (j + 1) * piece])
        assert torch.equal(got["v"][i], want["v"][s][j * piece : (j + 1) * piece])
        assert torch.equal(got["code"][i], want["code"][s][:, j * piece // 2 : (j + 1) * piece // 2])
        assert torch.equal(got["scale"][i], want["scale"][s]) and torch.equal(got["mark"][i], want["mark"][s])


def test_each_tier_books_what_lies_on_it() -> None:
    for tier, home in (("device", 0), ("host", AWAY), ("disk", AWAY + CHECK)):
        p = pool(tier)
        p.take(5)
        near = MARK + (AWAY if tier == "device" else 0)
        assert p.ledger.now == {"device": 5 * near, "host": 0, "disk": 0} | ({tier: 5 * home} if home else {})
        assert p.page_bytes == near + home
    p = pool("disk", 2)
    p.take(1)
    assert p.ledger.now["disk"] == 4 * (2 * (3 * 2 + 5 * 2) + 3 * 4 + 3 + CHECK), "each piece has the scale and a checksum"


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_shared_page_is_copied_wherever_it_lies(tier: str) -> None:
    p, want = pool(tier), content(1)
    (page,) = p.take(1)
    p.put(torch.tensor([page]), want)
    p.share(np.array([page]))
    copy = p.own(int(page))
    p.put(torch.tensor([page]), content(1, 1))
    assert all(torch.equal(value, want[name]) for name, value in p.get(torch.tensor([copy])).items())
    p.check()


def test_what_is_resident_is_there_without_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    p, want = pool("disk"), content(3)
    pages = torch.from_numpy(p.take(3)).long()
    p.put(pages, want)
    monkeypatch.setattr(PageFile, "get", lambda *args: pytest.fail("the disk was read"))
    assert torch.equal(p["mark"][pages], want["mark"]) and torch.equal(p.get(pages, names=["mark"])["mark"], want["mark"])


# ---- the file


def test_a_damaged_page_is_noticed() -> None:
    p = pool("disk")
    pages = torch.from_numpy(p.take(4)).long()
    p.put(pages, content(4))
    assert p.disk is not None
    fd, record = p.disk._file.fileno(), p.disk.record
    at = 2 * record + 11
    (byte,) = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([byte ^ 4]), at)
    p.get(pages[[0, 1, 3]])
    with pytest.raises(DamagedPage, match="does not match its checksum") as damage:
        p.get(pages)
    assert damage.value.file is p.disk and damage.value.record == 2
    p.put(pages[2:3], content(1))
    p.get(pages)


def test_a_page_in_the_place_of_another_is_noticed() -> None:
    p = pool("disk")
    pages = torch.from_numpy(p.take(2)).long()
    p.put(pages, content(2))
    assert p.disk is not None
    os.pwrite(p.disk._file.fileno(), os.pread(p.disk._file.fileno(), p.disk.record, 0), p.disk.record)
    with pytest.raises(DamagedPage):
        p.get(pages[1:])


def test_a_page_that_was_never_written_is_damaged() -> None:
    p = pool("disk")
    with pytest.raises(DamagedPage):
        p.get(torch.from_numpy(p.take(1)).long())


def test_freed_pages_give_their_room_back(tmp_path: Path) -> None:
    fields = {"x": Field((1 << 14,), torch.float32, tokens=0)}
    p = Pool(fields, PAGE, "disk", Ledger(), 1 << 26, folder=str(tmp_path))
    pages = p.take(32)
    p.put(torch.from_numpy(pages).long(), {"x": torch.ones(32, 1 << 14)})
    assert p.disk is not None and p.disk.room >= 32 << 16
    full = p.disk.room
    p.give(pages[4:28])
    assert p.disk.room <= full - (23 << 16)
    assert bool((p.get(torch.from_numpy(pages[:4]).long())["x"] == 1).all()) and p.ledger.now["disk"] == 8 * p.disk.record
    p.give(np.r_[pages[:4], pages[28:]])
    assert p.disk.room == 0 and list(tmp_path.iterdir()) == [], "the file has no name"


def test_a_full_disk_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    p = pool("disk")
    pages = torch.from_numpy(p.take(2)).long()

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutOfMemory, match=r"The disk of .* takes no more pages: No space left on device"):
        p.put(pages, content(2))


def test_a_directory_that_takes_no_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"No pages can be kept in .*/none: No such file or directory; name another directory"):
        pool("disk", folder=str(tmp_path / "none"))


# ---- caches


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 11), min_size=1, max_size=5)), max_size=30), st.integers(0, 6))
def test_a_cache_lets_go_of_what_was_not_read_for_longest(history: list[tuple[bool, set[int]]], most: int) -> None:
    """Against a dict of when each page was last read; `forget` drops pages."""
    near = Pool({"x": Field((1,), torch.float32)}, 1, "device", Ledger(), 4 * 200)
    cache, read = Cache(near, most), {}
    for now, (forget, pages) in enumerate(history):
        ids = np.array(sorted(pages))
        if forget:
            cache.forget(ids)
            read = {page: then for page, then in read.items() if page not in pages}
        else:
            slots = cache.find(ids)
            assert [page for page, slot in zip(ids.tolist(), slots, strict=True) if slot >= 0] == sorted(pages & read.keys())
            missing = ids[slots < 0]
            cache.keep(missing, near.take(len(missing)))
            read |= dict.fromkeys(pages, now)
            times = sorted(read.values(), reverse=True)
            kept = set(cache.pages.tolist())
            assert len(kept) == min(most, len(read)) and kept <= read.keys()
            assert all(read[page] >= times[len(kept) - 1] for page in kept)
            read = {page: read[page] for page in kept}
        assert near.used == len(cache) == len(read) and near.ledger.now["device"] == cache.bytes
        cache.check()


CACHES = [(0, 0), (0, 64), (64, 128), (10_000, 10_000)]


@pytest.mark.parametrize(("device", "host"), CACHES)
@pytest.mark.parametrize("more", ["", "snapkv(budget=60, window=8, when=16)", "streaming(sinks=3, window=40)", "every"])
def test_copies_are_never_stale(device: int, host: int, more: str) -> None:
    """Every step sees exactly what the memory holds, while pages are filled up, dropped, taken again and rewritten."""
    check_fresh([*([Every(recent=8)] if more == "every" else [item.method for item in parse(more)]), Tiers(device, host)])


def check_fresh(methods: list[Method]) -> None:
    bench = Bench(*methods)
    for i, n in enumerate((64, 64, 67)):
        torch.testing.assert_close(*as_double(bench.feed(n, final=i == 2)), atol=2e-5, rtol=0)
    for i in range(100):
        torch.testing.assert_close(
            *as_double(bench.feed(5 if i % 40 == 39 else 1, "verify" if i % 40 == 39 else "decode")), atol=2e-5, rtol=0
        )
        assert bench.pools.ledger.now == bench.memory.tiers


def test_a_stale_copy_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "forget", lambda self, pages: None)
    with pytest.raises(AssertionError):
        check_fresh([*[item.method for item in parse("snapkv(budget=60, window=8, when=16)")], Tiers(10_000)])


@pytest.mark.parametrize("toy", [Tiers, Ram])
def test_what_was_read_in_the_last_step_is_not_copied_again(toy: type[Tiers]) -> None:
    bench = Bench(toy(10_000, 10_000))
    bench.feed(200)
    bench.feed(1, "decode")
    first = dict(bench.actions[bench.plan.methods[0].slug])
    for _ in range(5):
        bench.feed(1, "decode")
    last = bench.actions[bench.plan.methods[0].slug]
    pages = 2 * (192 // 64)
    assert last["bytes_fetched"] == first["bytes_fetched"] and last["device_misses"] == first["device_misses"] == pages
    assert last["device_hits"] == 5 * pages
    if toy is Tiers:
        assert last["host_misses"] == pages and last["bytes_from_disk"] == first["bytes_from_disk"] > 0


def test_the_host_serves_what_the_device_has_no_room_for() -> None:
    bench = Bench(Tiers(64, 10_000))
    bench.feed(200)
    for _ in range(4):
        bench.feed(1, "decode")
    did, pages = bench.actions["tiers"], 2 * (192 // 64)
    assert did["host_misses"] == pages and did["host_hits"] == did["device_misses"] - pages > 0
    record = bench.memory.store.disk.record if bench.memory.store.disk else 0
    assert did["bytes_from_disk"] == pages * record, "each page came from the disk once"
    assert bench.memory.tiers["host"] == pages * (record - CHECK)


def test_a_fork_has_caches_of_its_own() -> None:
    rig = Rig()
    left = rig.read(rig.plan([Tiers(10_000, 10_000)]), words(200), 64)
    rig.drip(left, words(3, 1))
    right = left.fork()
    right.check()
    held = rig.drip(left.fork(), words(90, 2))
    torch.testing.assert_close(rig.drip(right, words(90, 2)), held)
    rig.drip(left, words(90, 3))
    for memory in (left, right):
        memory.check()
        memory.free()
    assert right.tiers() == {"device": 0, "host": 0, "disk": 0}


# ---- pieces of rows


def test_rows_are_cut_into_pieces() -> None:
    rows = Rows(torch.tensor([[5, 2, 9], [7, -1, -1]], dtype=torch.int32), torch.tensor([20, 6], dtype=torch.int32), 8)
    small = rows.cut(4)
    assert small.table.tolist() == [[10, 11, 4, 5, 18, -1], [14, 15, -1, -1, -1, -1]] and small.length.tolist() == [20, 6]
    picked = small.pages(torch.tensor([[1, 4], [1, -1]], dtype=torch.int32))
    assert picked.table.tolist() == [[11, 18], [15, -1]] and picked.length.tolist() == [8, 2]
    assert picked.cut(2).table.tolist() == [[22, 23, 36, 37], [30, -1, -1, -1]] and picked.cut(2).length.tolist() == [8, 2]
