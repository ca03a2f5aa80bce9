"""Pages: taken, shared, copied before a shared one is written, given back, and booked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspool.errors import OutOfMemory
from longspool.memory.pool import Ledger, Pool
from longspool.roles import Field

FIELDS = {"k": Field((4, 8), torch.float16), "pos": Field((8,), torch.int32)}
PAGE_BYTES = 4 * 8 * 2 + 8 * 4


def pool(pages: int = 20, tier: str = "device") -> Pool:
    return Pool(FIELDS, 8, tier, Ledger(), pages * PAGE_BYTES)


def test_bytes_are_those_of_the_storage() -> None:
    p = pool()
    assert p.page_bytes == PAGE_BYTES == sum(p[name][0].nbytes for name in FIELDS)
    p.take(3)
    assert p.ledger.now == {"device": 3 * PAGE_BYTES, "host": 0, "disk": 0}
    assert p["k"].shape == (20, 4, 8) and p["pos"].dtype == torch.int32


def test_says_what_is_missing_when_full() -> None:
    p = pool(pages=4)
    p.take(3)
    with pytest.raises(OutOfMemory, match=f"{4 * PAGE_BYTES:,}.*{5 * PAGE_BYTES:,}"):
        p.take(2)
    assert p.used == 3 and p.ledger.now["device"] == 3 * PAGE_BYTES
    p.take(1)


def test_a_shared_page_is_copied_and_an_own_one_is_not() -> None:
    p = pool()
    (page,) = p.take(1)
    p["k"][page], p["pos"][page] = 1.5, 7
    assert p.own(page) == page
    p.share(np.array([page]))
    copy = p.own(page)
    assert copy != page and p.refs[page] == p.refs[copy] == 1
    p["k"][page] = 0
    assert bool((p["k"][copy] == 1.5).all()) and bool((p["pos"][copy] == 7).all())
    p.check()


def test_freed_memory_goes_back_to_the_system() -> None:
    """An anonymous page that was handed back reads as zeros when it is touched again."""
    p = Pool({"k": Field((1024,), torch.float32)}, 8, "device", Ledger(), 64 * 4096)
    pages = p.take(64)
    p["k"][:] = 1
    p.give(pages[:32])
    assert not p["k"][:32].any() and bool(p["k"][32:].all())


def test_peaks_are_measured_from_a_mark() -> None:
    ledger = Ledger()
    ledger.add("device", 100)
    ledger.add("host", 30)
    ledger.add("device", -60)
    assert ledger.peak == {"device": 100, "host": 30, "disk": 0} and ledger.total_peak == 130
    ledger.mark()
    ledger.add("device", 5)
    assert ledger.peak == {"device": 45, "host": 30, "disk": 0} and ledger.total_peak == 75


def test_the_books_notice_a_page_given_back_twice() -> None:
    p = pool()
    pages = p.take(2)
    p.give(pages)
    p.refs[pages[0]] -= 1
    with pytest.raises(AssertionError, match="twice"):
        p.check()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "give", "own"]), st.integers(0, 5)), max_size=40))
def test_any_history_keeps_the_books(history: list[tuple[str, int]]) -> None:
    """Against a plain dict of owners: a page is used while it has one."""
    p, owners = pool(), {}
    for what, n in history:
        live = sorted(owners)
        if what == "take" and len(live) + n <= 20:
            for page in p.take(n).tolist():
                assert page not in owners
                owners[page] = 1
        elif live and what == "share":
            p.share(np.array([live[n % len(live)]]))
            owners[live[n % len(live)]] += 1
        elif live and what == "give":
            page = live[n % len(live)]
            p.give(np.array([page]))
            owners[page] -= 1
            owners = {k: v for k, v in owners.items() if v}
        elif live and what == "own" and len(live) < 20:
            page = live[n % len(live)]
            mine = p.own(page)
            assert (mine == page) == (owners[page] == 1)
            if mine != page:
                owners[page] -= 1
                owners[mine] = 1
        assert p.used == len(owners) and p.ledger.now["device"] == len(owners) * PAGE_BYTES
        assert all(p.refs[page] == count for page, count in owners.items())
        p.check()
