"""Zones and positions against plain lists."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspool.memory.pool import Ledger, Pool
from longspool.memory.positions import Positions
from longspool.memory.tiles import tile
from longspool.memory.zone import Zone
from longspool.roles import Field

PAGE = 4


def pool() -> Pool:
    return Pool({"x": Field((PAGE,), torch.int64)}, PAGE, "device", Ledger(), 4000 * PAGE * 8)


def write(zone: Zone, add: list[int], lists: list[list[int]], fresh: int) -> int:
    """Grow rows and write new numbers to their ends, through the table."""
    start = zone.length.copy()
    zone.grow(np.array(add))
    for r, n in enumerate(add):
        for i in range(n):
            at = int(start[r]) + i
            zone.pool["x"][int(zone.table[r, at // PAGE]), at % PAGE] = fresh
            lists[r].append(fresh)
            fresh += 1
    return fresh


def read(zone: Zone) -> list[list[int]]:
    rows = zone.rows()
    return [zone.pool["x"].view(-1)[rows.slots(r)].tolist() for r in range(rows.count)]


OPS = st.tuples(st.sampled_from(["grow", "same", "cut", "front", "fork", "free"]), st.integers(0, 9), st.integers(0, 9), st.integers(0, 3))


@settings(max_examples=80, deadline=None)
@given(st.lists(OPS, max_size=25))
def test_any_history_of_zones_and_forks(history: list[tuple[str, int, int, int]]) -> None:
    shared, fresh = pool(), 1
    zones: list[tuple[Zone, list[list[int]]]] = [(Zone(shared, 2), [[], []])]
    for what, a, b, which in history:
        if not zones:
            break
        zone, lists = zones[which % len(zones)]
        if what == "grow":
            fresh = write(zone, [a, b], lists, fresh)
        elif what == "same":  # the quick way, by a plain number
            start = zone.length.copy()
            zone.grow(a)
            zone.truncate(start)
            fresh = write(zone, [a, a], lists, fresh)
        elif what == "cut":
            zone.truncate(np.array([a, b]))
            lists[:] = [row[:n] for row, n in zip(lists, (a, b), strict=True)]
        elif what == "front":
            full = min(len(row) for row in lists) // PAGE
            if full:
                zone.drop_front(full)
                lists[:] = [row[full * PAGE :] for row in lists]
        elif what == "fork":
            twin = Zone(shared, 2)
            twin.take_over(zone)
            zones.append((twin, [row.copy() for row in lists]))
        else:
            zone.free()
            zones = [z for z in zones if z[0] is not zone]
        for z, rows in zones:
            assert read(z) == rows
        shared.check()
        sides = sum(z.side for z, _ in zones)
        assert shared.ledger.now["device"] == shared.used * shared.page_bytes + sides
    for zone, _ in zones:
        zone.free()
    assert not any(shared.ledger.now.values()) and shared.used == 0


def test_growing_by_number_copies_a_shared_page() -> None:
    shared = pool()
    zone = Zone(shared, 1)
    zone.grow(1)
    shared["x"][int(zone.table[0, 0])] = 5
    twin = Zone(shared, 1)
    twin.take_over(zone)
    zone.grow(1)
    assert zone.table[0, 0] != twin.table[0, 0] and bool((shared["x"][int(zone.table[0, 0])] == 5).all())
    twin.grow(1)
    assert shared.used == 2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 40), st.integers(0, 40))
def test_positions_are_a_sorted_list(gaps: list[int], drop: int, keep: int) -> None:
    """Gap 0 goes on with the next position, others leave a hole."""
    positions, plain, at = Positions(), [], 10
    for gap in gaps:
        at += gap
        positions.append(np.arange(at, at + 2))
        plain += [at, at + 1]
        at += 2
    for change in (lambda: None, lambda: positions.drop(min(drop, len(positions))), lambda: positions.keep(keep)):
        change()
        held = positions.array().tolist()
        assert len(positions) == len(held) and held == sorted(set(held))
        for pos in (0, 11, 25, 200):
            assert int(positions.below(pos)) == sum(p < pos for p in held)
        assert positions.below(np.array([5, 30])).tolist() == [sum(p < x for p in held) for x in (5, 30)]
    assert held == plain[min(drop, len(plain)) :][:keep]
    twin = positions.copy()
    twin.append(np.array([500]))
    assert positions.array().tolist() == held and twin.last == 500


def test_positions_cost_nothing_while_they_are_contiguous() -> None:
    positions = Positions()
    positions.append(np.arange(5, 100))
    positions.append(np.array([100]))
    assert positions.nbytes == 0 and positions.last == 100
    positions.append(np.array([103]))
    assert positions.nbytes == 97 * 8


def test_tiles_are_rows_cut_into_pages() -> None:
    rows = []
    for n in (5, 0, 8):
        k = torch.randn(n, 3)
        rows.append((k, k + 1, torch.arange(n) * 2, torch.ones(n) * n))
    tiles = tile(rows, PAGE)
    assert tiles.fill.tolist() == [4, 1, 4, 4] and tiles.k.shape == (4, 3, 4) and tiles.v.shape == (4, 4, 3)
    assert torch.equal(tiles.k[1, :, 0], rows[0][0][4]) and not tiles.k[1, :, 1:].any()
    assert torch.equal(tiles.v[3], rows[2][1][4:]) and tiles.pos[3].tolist() == [8, 10, 12, 14]
    assert tiles.weight is not None and tiles.weight[1].tolist() == [5, 0, 0, 0]
