"""The paged ops against a dense formula in float64 over the slots of the pool, for random ragged rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from longspool.kernels import implementation
from longspool.kernels.codes import decode_k, decode_v, encode_k, encode_v
from longspool.values import Blocks

KINDS = ("ref", "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Case:
    """A random step over random rows. Free slots of the pool hold NaN."""

    q: Tensor
    kp: Tensor
    vp: Tensor
    table: Tensor
    length: Tensor
    spans: tuple[int, ...]
    lo: Tensor | None
    hi: Tensor | None
    page: int

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
        return self.q, self.table, self.length, self.spans

    def slots(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """(page, slot) of each token of a row."""
        j = np.arange(int(self.length[row]))
        return self.table[row].numpy()[j // self.page], j % self.page

    def keys(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V of a row, float64 [n, D]."""
        pages, slot = self.slots(row)
        kp, vp = self.kp.double().numpy(), self.vp.double().numpy()
        return kp[pages, :, slot], vp[pages, slot]


def make(seed: int, dim: int, page: int, dtype: torch.dtype, longest: int = 180) -> Case:
    rng = np.random.default_rng(seed)
    requests, kv, group = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 4, 5, 7, 8]))
    counts = rng.choice([0, 1, 2, 3, 7, 20, 45], requests)
    counts[0] += not counts.any()
    lengths = rng.integers(0, longest, requests * kv)
    spans = tuple(int(x) for x in np.cumsum([0, *counts]))
    pages = [-(-int(n) // page) for n in lengths]
    order = rng.permutation(sum(pages) + 2).astype(np.int32)
    table = np.full((len(lengths), max(*pages, 1)), -1, np.int32)
    kp, vp = np.full((len(order), dim, page), np.nan, np.float32), np.full((len(order), page, dim), np.nan, np.float32)
    first = 0
    for row, n in enumerate(lengths):
        table[row, : pages[row]] = order[first : first + pages[row]]
        first += pages[row]
        j = np.arange(n)
        kp[table[row][j // page], :, j % page] = rng.normal(size=(n, dim))
        vp[table[row][j // page], j % page] = rng.normal(size=(n, dim))
    lo = hi = None
    if seed % 3:
        at = np.sort(rng.integers(-5, longest, (2, spans[-1])), axis=0).astype(np.int32)
        lo, hi = torch.from_numpy(at[0]) if seed % 3 == 1 else None, torch.from_numpy(at[1] + 8)
    q = torch.from_numpy(rng.normal(size=(spans[-1], kv * group, dim)).astype(np.float32))
    stored = [torch.from_numpy(x).to(dtype) for x in (kp, vp)]
    return Case(q, *stored, torch.from_numpy(table), torch.from_numpy(lengths.astype(np.int32)), spans, lo, hi, page)


def request_of(case: Case, token: int) -> int:
    return next(b for b, (_, end) in enumerate(pairwise(case.spans)) if token < end)


def sees(case: Case, token: int, row: int) -> np.ndarray:
    """bool [n]: lo, hi and the row's length."""
    j = np.arange(int(case.length[row]))
    lo = 0 if case.lo is None else int(case.lo[token])
    hi = len(j) if case.hi is None else int(case.hi[token])
    return (j >= lo) & (j < hi)


def logit(case: Case, token: int, head: int, k: np.ndarray, scale: float, softcap: float) -> np.ndarray:
    s = k @ case.q[token, head].double().numpy() * scale
    return softcap * np.tanh(s / softcap) if softcap else s


def dense(
    case: Case,
    keys: Callable[[int], tuple[np.ndarray, np.ndarray]],
    seen: Callable[[int, int, int], np.ndarray],
    scale: float,
    softcap: float = 0.0,
    more: Callable[[int], np.ndarray] = lambda row: np.zeros(()),
) -> tuple[np.ndarray, np.ndarray]:
    """out and lse by the book, one query at a time; seen(token, head, row) and more(row) are the mask and the log-weights."""
    (n, heads, dim), rows = case.q.shape, case.table.shape[0]
    out, lse = np.zeros((n, heads, dim)), np.full((n, heads), -np.inf)
    per = rows // (len(case.spans) - 1)
    for token in range(n):
        for head in range(heads):
            row = request_of(case, token) * per + head // (heads // per)
            k, v = keys(row)
            s = (logit(case, token, head, k, scale, softcap) + more(row))[seen(token, head, row)]
            if len(s):
                p = np.exp(s - s.max())
                out[token, head] = p @ v[seen(token, head, row)] / p.sum()
                lse[token, head] = np.log(p.sum()) + s.max()
    return out, lse


def close(got: Tensor, want: np.ndarray, bound: float = 1e-5) -> None:
    assert want.size == 0 or np.ptp(np.where(np.isfinite(want), want, 0)) > 0 or want.size < 20, "the reference says nothing"
    torch.testing.assert_close(got.double(), torch.from_numpy(want), atol=bound, rtol=bound)


def served(op: str, kind: str, *args: object, **kw: object):  # type: ignore[no-untyped-def]
    module = implementation(op, kind)
    if kind == "cpu":
        assert module.can(*args, **kw) is None
    return module.run(*args, **kw)


SHAPES = [(64, 64), (64, 16), (128, 32), (80, 16), (8, 128), (40, 64), (96, 128), (256, 16)]
CASES = [(seed, *SHAPES[seed % len(SHAPES)], DTYPES[seed % 3]) for seed in range(24)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seed", "dim", "page", "dtype"), CASES)
def test_rows(kind: str, seed: int, dim: int, page: int, dtype: torch.dtype) -> None:
    case = make(seed, dim, page, dtype)
    softcap = 6.0 if seed % 4 == 1 else 0.0
    weight = torch.randn(case.kp.shape[0], page, generator=torch.Generator().manual_seed(seed)) if seed % 4 == 2 else None

    def more(row: int) -> np.ndarray:
        pages, slot = case.slots(row)
        return np.zeros(()) if weight is None else weight.double().numpy()[pages, slot]

    out, lse = dense(case, case.keys, lambda token, head, row: sees(case, token, row), dim**-0.5, softcap, more)
    args = (case.q, case.kp, case.vp, case.table, case.length, case.spans, case.lo, case.hi, dim**-0.5, softcap, weight)
    got = served("attend_rows", kind, *args)
    close(got[0], out)
    close(got[1], lse)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_trees(kind: str, seed: int) -> None:
    case = make(seed, 64, 16, torch.float16)
    rng = np.random.default_rng(seed)
    counts = [b - a for a, b in pairwise(case.spans)]
    ends = [max(n, int(rng.integers(0, 200))) for n in counts]
    case.lo, case.hi = None, None if seed == 0 else torch.tensor(np.repeat(ends, counts), dtype=torch.int32)
    tree = torch.from_numpy(rng.random((case.spans[-1], max(counts))) < 0.4)

    def seen(token: int, head: int, row: int) -> np.ndarray:
        b = request_of(case, token)
        end = int(case.length[row]) if case.hi is None else ends[b]
        j = np.arange(int(case.length[row]))
        own = j - (end - counts[b])
        return sees(case, token, row) & ((own < 0) | tree[token].numpy()[np.clip(own, 0, max(counts) - 1)])

    out, lse = dense(case, case.keys, seen, 0.125)
    args = (case.q, case.kp, case.vp, case.table, case.length, case.spans, case.lo, case.hi, 0.125)
    got = served("attend_rows", kind, *args, tree=tree)
    close(got[0], out)
    close(got[1], lse)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(9))
def test_blocks(kind: str, seed: int) -> None:
    dim, page = SHAPES[seed % len(SHAPES)]
    case = make(seed, dim, page, DTYPES[seed % 3])
    rng = np.random.default_rng(seed)
    size, requests = int(rng.choice([8, 16, 32, 64, 128])), len(case.spans) - 1
    base, first = tuple(rng.integers(0, 90, requests).tolist()), tuple(rng.integers(60, 250, requests).tolist())
    start = np.cumsum([0, *(-(-(b - a) // size) for a, b in pairwise(case.spans))])
    mask = rng.random((case.q.shape[1], int(start[-1]), 300 // size + 1)) < 0.4

    def seen(token: int, head: int, row: int) -> np.ndarray:
        b = request_of(case, token)
        own, ordinal = token - case.spans[b], np.arange(int(case.length[row])) + base[b]
        listed = mask[head, start[b] + own // size, ordinal // size]
        return sees(case, token, row) & listed & ((case.hi is not None) | (ordinal <= first[b] + own))

    out, lse = dense(case, case.keys, seen, 0.2, 9.0)
    blocks = Blocks.of(torch.from_numpy(mask), size)
    args = (case.q, case.kp, case.vp, case.table, case.length, case.spans, case.lo, case.hi, blocks, base, first, 0.2, 9.0)
    got = served("attend_blocks", kind, *args)
    close(got[0], out)
    close(got[1], lse)


def unpacked(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes in their order, by the written format alone."""
    if bits == 8:
        return codes.astype(np.float64)
    out = np.zeros((*codes.shape[:-1], codes.shape[-1] * 2))
    for i in range(out.shape[-1]):
        byte = codes[..., i // 16 * 8 + i % 8].astype(int)
        out[..., i] = byte >> 4 if i % 16 >= 8 else byte & 15
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("seed", range(8))
def test_codes(kind: str, bits: int, seed: int) -> None:
    dim, page = [(64, 64), (64, 16), (128, 32), (80, 16), (16, 128), (48, 64), (96, 128), (256, 16)][seed]
    case = make(seed, dim, page, torch.float32)
    fill = (~case.vp[:, :, 0].isnan()).sum(1)
    (kc, ks, kz), (vc, vs, vz) = encode_k(case.kp, bits, fill), encode_v(case.vp, bits, fill)

    def value(codes: Tensor, scale: Tensor, zero: Tensor | None) -> np.ndarray:
        x = unpacked(codes.numpy(), bits) * scale.double().numpy()[..., None]
        return x if zero is None else x + zero.double().numpy()[..., None]

    kd, vd = value(kc, ks, kz), value(vc, vs, vz)

    def keys(row: int) -> tuple[np.ndarray, np.ndarray]:
        pages, slot = case.slots(row)
        return kd[pages, :, slot], vd[pages, slot]

    out, lse = dense(case, keys, lambda token, head, row: sees(case, token, row), dim**-0.5, 11.0)
    coded = (kc, vc, ks, kz, vs, vz, bits)
    got = served("attend_codes", kind, case.q, *coded, *case.rows[1:], case.lo, case.hi, dim**-0.5, 11.0)
    close(got[0], out, 2e-5)
    close(got[1], lse, 2e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_encoding_is_as_close_as_its_step(bits: int) -> None:
    rng = torch.Generator().manual_seed(3)
    k, v = torch.randn(5, 64, 32, generator=rng) * 3, torch.randn(5, 32, 64, generator=rng) + 2
    k[0, 7] = 1.5  # a channel without any range
    fill = torch.tensor([32, 1, 17, 31, 5])
    kc, ks, kz = encode_k(k, bits, fill)
    vc, vs, vz = encode_v(v, bits, fill)
    token = torch.arange(32)
    for page, n in enumerate(fill.tolist()):
        # Half a step, and what rounding the fp16 scale and zero can add at the far end of the range.
        k_bound = ks[page].float() * 0.5 * 1.02 + 1e-3 * k[page, :, :n].abs().amax(-1)
        v_bound = vs[page, :n].float() * 0.5 * 1.02 + 1e-3 * v[page, :n].abs().amax(-1)
        assert (((decode_k(kc, ks, kz, bits) - k)[page, :, :n]).abs() <= k_bound[:, None]).all()
        assert (((decode_v(vc, vs, vz, bits) - v)[page, :n]).abs() <= v_bound[:, None]).all()
        assert (unpacked(kc.numpy(), bits)[page, :, token >= n] == 0).all()


def test_split_rows_equal_whole_ones() -> None:
    """A long row is cut into pieces for the threads; the merge must not show."""
    torch.manual_seed(0)
    kp, vp = torch.randn(300, 64, 64).half(), torch.randn(300, 64, 64).half()
    table = torch.randperm(300).to(torch.int32).view(2, 150)
    length, q = torch.tensor([9600, 5003], dtype=torch.int32), torch.randn(3, 6, 64) * 3
    args = (kp, vp, table, length, (0, 3), None, None, 0.3)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        out, lse = served("attend_rows", "cpu", q, *args)
        torch.set_num_threads(1)
        want = served("attend_rows", "cpu", q, *args)
    finally:
        torch.set_num_threads(before)
    k, v = (x[table[1].long()] for x in (kp, vp))
    s = torch.einsum("nd,pdw->npw", q[:, 5].double(), k.double()).flatten(1)[:, :5003] * 0.3
    close(lse[:, 5], torch.logsumexp(s, 1).numpy())
    close(out[:, 5], (torch.softmax(s, 1) @ v.double().flatten(0, 1)[:5003]).numpy())
    torch.testing.assert_close((out, lse), want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_appended_rows_are_gathered(kind: str, seed: int) -> None:
    dim, page = SHAPES[seed]
    case = make(seed, dim, page, DTYPES[seed % 3])
    rng = np.random.default_rng(seed)
    counts = [int(rng.integers(0, n + 1)) for n in case.length.tolist()]
    start = torch.tensor([int(rng.integers(0, n - c + 1)) for n, c in zip(case.length.tolist(), counts, strict=True)], dtype=torch.int32)
    offset = (
        torch.tensor([0, *counts], dtype=torch.int64 if seed % 2 else torch.int32).cumsum(0).to(torch.int32 if seed % 2 else torch.int64)
    )
    k, v = torch.randn(sum(counts), dim), torch.randn(sum(counts), dim)
    before = [case.keys(row) for row in range(len(counts))]
    served("append_rows", kind, case.kp, case.vp, case.table, start, k, v, offset)
    for row, (a, n) in enumerate(zip(start.tolist(), counts, strict=True)):
        first = int(offset[row])
        for new, old, fresh in zip(case.keys(row), before[row], (k, v), strict=True):
            old[a : a + n] = fresh[first : first + n].to(case.kp.dtype).double().numpy()
            np.testing.assert_array_equal(new, old)
    index = [torch.from_numpy(rng.integers(0, max(n, 1), 9 if n else 0)) for n in case.length.tolist()]
    offset = torch.tensor([0, *(len(i) for i in index)]).cumsum(0)
    got = served("gather_rows", kind, case.kp, case.vp, case.table, torch.cat(index), offset)
    for row, picked in enumerate(index):
        for x, want in zip(got, case.keys(row), strict=True):
            np.testing.assert_array_equal(x[offset[row] : offset[row + 1]].double().numpy(), want[picked.numpy()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduce", ["max", "sum"])
@pytest.mark.parametrize("seed", range(6))
def test_page_scores_bound_the_page(kind: str, reduce: str, seed: int) -> None:
    dim, page = SHAPES[seed]
    case = make(seed, dim, page, DTYPES[seed % 3])
    pages, fill = [], []
    for row, n in enumerate(case.length.tolist()):
        for p in range(-(-n // page)):
            pages.append(int(case.table[row, p]))
            fill.append(min(page, n - p * page))
    kmin, kmax = (torch.full(case.kp.shape[:2], float("nan")) for _ in range(2))
    bounds = served("page_bounds", kind, case.kp, torch.tensor(pages, dtype=torch.int64), torch.tensor(fill, dtype=torch.int32))
    for at, n, low, high in zip(pages, fill, *bounds, strict=True):
        assert torch.equal(low, case.kp[at, :, :n].float().amin(-1)) and torch.equal(high, case.kp[at, :, :n].float().amax(-1))
        kmin[at], kmax[at] = low, high
    if seed % 2:
        kmin, kmax = kmin.half(), kmax.half()
    score = served("page_scores", kind, case.q, kmin, kmax, case.table, case.length, page, case.spans, reduce=reduce)
    rows, heads = case.table.shape[0], case.q.shape[1]
    per = rows // (len(case.spans) - 1)
    want = np.full(score.shape, -np.inf)
    for row, n in enumerate(case.length.tolist()):
        a, b = case.spans[row // per], case.spans[row // per + 1]
        mine = case.q[a:b].double().numpy()[:, row % per * (heads // per) :][:, : heads // per]
        for p in range(-(-n // page) if b > a else 0):
            low, high = (x[int(case.table[row, p])].double().numpy() for x in (kmin, kmax))
            each = np.maximum(mine * low, mine * high).sum(-1)
            want[row, p] = (each.sum(-1) if reduce == "sum" else each.max(-1)).max()
    close(score, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(9))
def test_mass_is_the_attention_received(kind: str, seed: int) -> None:
    dim, page = SHAPES[seed % len(SHAPES)]
    case = make(seed, dim, page, DTYPES[seed % 3])
    weight = torch.randn(case.kp.shape[0], page, generator=torch.Generator().manual_seed(seed)) if seed % 2 else None
    softcap, scale = (4.0 if seed % 3 else 0.0), dim**-0.5

    def more(row: int) -> np.ndarray:
        pages, slot = case.slots(row)
        return np.zeros(()) if weight is None else weight.double().numpy()[pages, slot]

    _, lse = dense(case, case.keys, lambda token, head, row: sees(case, token, row), scale, softcap, more)
    lse += 0.25  # the other zones' share
    rows, heads = case.table.shape[0], case.q.shape[1]
    per = rows // (len(case.spans) - 1)
    want = np.zeros((rows, case.table.shape[1] * page))
    for row, n in enumerate(case.length.tolist()):
        for token in range(case.spans[row // per], case.spans[row // per + 1]):
            for head in range(row % per * (heads // per), (row % per + 1) * (heads // per)):
                s = logit(case, token, head, case.keys(row)[0], scale, softcap) + more(row)
                want[row, :n] += (
                    np.where(sees(case, token, row), np.exp(s - lse[token, head]), 0.0) if np.isfinite(lse[token, head]) else 0.0
                )
    args = (case.q, case.kp, *case.rows[1:], case.lo, case.hi, torch.from_numpy(lse).float(), scale, softcap, weight)
    close(served("row_mass", kind, *args), want, 2e-5)


def test_what_the_kernels_refuse() -> None:
    can = importlib.import_module("longspool.kernels.attend_rows.cpu").can
    case = make(1, 64, 16, torch.float16)
    args = (case.table, case.length, case.spans, None, None)
    assert "float64" in str(can(case.q, case.kp.double(), case.vp.double(), *args))
    assert "contiguous" in str(can(case.q, case.kp.transpose(1, 2).contiguous().transpose(1, 2), case.vp, *args))
    assert "int32" in str(can(case.q, case.kp, case.vp, case.table.long(), *args[1:]))
    assert "head_dim 60" in str(can(case.q[..., :60], case.kp[:, :60].contiguous(), case.vp[..., :60].contiguous(), *args))


def test_views_equal_copies() -> None:
    """The kernels see addresses: what is not contiguous must not be read as if it were."""
    case = make(1, 64, 16, torch.float16)
    wide = torch.cat([case.table, case.table], 1)[:, : case.table.shape[1]]
    length = torch.stack([case.length, case.length * 0], 1)[:, 0]
    hi = torch.tensor([90], dtype=torch.int32).expand(case.q.shape[0])
    q = torch.cat([case.q, case.q], 2)[..., :64]
    views = (q, case.kp, case.vp, wide, length, case.spans, None, hi, 0.125)
    assert not any(x.is_contiguous() for x in (q, wide, length, hi))
    got = served("attend_rows", "cpu", *views)
    want = served("attend_rows", "ref", *views)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    mass = [served("row_mass", kind, q, case.kp, wide, length, case.spans, None, hi, want[1], 0.125) for kind in KINDS]
    torch.testing.assert_close(*mass, atol=1e-5, rtol=1e-5)
