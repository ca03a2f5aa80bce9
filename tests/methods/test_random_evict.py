"""Random eviction draws as splitmix64 does, keeps a uniform sample, and keeps the same one however often it is asked."""

from __future__ import annotations

from evicting import check_keeps, recent

from toolbox import Rig, Trace, words

N, BUDGET = 200, 100
OLD = N - recent(N, 0)
IDS = words(N + 8, 3)
MASK = (1 << 64) - 1


def draw(x: int, *salts: int) -> int:
    """splitmix64 of each salt after the last, in Python's unbounded integers."""
    for salt in (*salts, None):
        z = (x * 0x9E3779B97F4A7C15 + 1234567) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        x = z ^ (z >> 31)
        if salt is not None:
            x = (x + salt) & MASK
    return x & 0xFFFFFF


def choose(seed: int):  # type: ignore[no-untyped-def]
    def rows(layer: int, prompt: list[Trace]) -> list[list[int]]:
        room = BUDGET - (N - OLD)
        return [sorted(range(OLD), key=lambda j: (-draw(j, r, layer, seed), j))[:room] for r in (0, 1)]

    return rows


def test_keeps_what_the_numbers_say() -> None:
    for seed in (0, 7):
        check_keeps(Rig(), f"random_evict(budget={BUDGET}, seed={seed})", IDS, N, OLD, choose(seed))


def test_rows_layers_and_seeds_differ() -> None:
    sets = [tuple(map(tuple, choose(seed)(layer, []))) for seed in (0, 1) for layer in range(3)]
    assert len({row for rows in sets for row in rows}) == 12


def test_evicting_after_every_chunk_leaves_the_same_sample() -> None:
    rig = Rig()
    once, often = (rig.read(rig.plan(f"random_evict(budget=80, when={when})"), IDS[:N], 64) for when in ("'prompt'", "'chunk'"))
    for layer in range(3):
        assert [p.tolist() for p in once.positions(layer)] == [p.tolist() for p in often.positions(layer)]
    assert often.actions["random_evict"]["evicted"] == once.actions["random_evict"]["evicted"]


def test_the_sample_is_uniform() -> None:
    """Over many seeds each position is kept about as often; the bound is five standard deviations of a binomial count."""
    runs, size, room = 400, 64, 16
    kept = [0] * size
    for seed in range(runs):
        for j in sorted(range(size), key=lambda j: -draw(j, 0, 0, seed))[:room]:
            kept[j] += 1
    mean = runs * room / size
    assert max(abs(count - mean) for count in kept) < 5 * (mean * (1 - room / size)) ** 0.5
