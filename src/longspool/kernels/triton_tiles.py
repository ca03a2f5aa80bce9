"""What the Triton kernels over pages share: a tile's queries, its sight, its keys, and the running softmax.

The G query heads of a row stand stacked in a query tile: stacked row i of a request is its token i // G under head i % G, so that a
page is read once for all of them. Keys come in tiles of T tokens made of whole pages, or of parts of S tokens where a page is longer.
Logits are in units of log2(e), so that every exponential is an exp2.

Tensor cores multiply 2-byte numbers, and queries and weights are fp32: these are cut into two or three 2-byte pieces, whose products with
the stored numbers are exact, so that results stay within rounding of fp32 at half or a third of the 2-byte speed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

STORED = (torch.float32, torch.float16, torch.bfloat16)
PAGES = (16, 32, 64, 128)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Three tf32 products come within rounding of fp32 on NVIDIA's tensor cores; AMD's multiply fp32 as it is.
PRECISION = tl.constexpr("ieee" if torch.version.hip else "tf32x3")
# The interpreter multiplies the bits of bf16 as if they were integers.
BRAIN = tl.constexpr(tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16)
# Softmax weights run up to 2 ** LIFT, so that small ones keep their digits in fp16.
LIFT = tl.constexpr(12.0)


# ---- the host's side


def unreachable(x: Tensor) -> str | None:
    """Why Triton can't run on this tensor, or None."""
    if x.device.type == "cuda" or (x.device.type == "cpu" and triton.knobs.runtime.interpret):
        return None
    return f"Triton computes on CUDA and ROCm devices, and on the CPU under TRITON_INTERPRET=1; this tensor is on {x.device.type}"


def pages_problem(q: Tensor, dim: int, page: int, table: Tensor, requests: int) -> str | None:
    """Why the kernels can't serve these shapes, or None."""
    if why := unreachable(q):
        return why
    if page not in PAGES:
        return f"pages of {page} tokens have no kernel (16, 32, 64 and 128 have)"
    if dim > 512:
        return f"head_dim {dim} has no kernel (up to 512)"
    return rows_problem(q, table, requests)


def rows_problem(q: Tensor, table: Tensor, requests: int) -> str | None:
    rows, heads = table.shape[0], requests * q.shape[1]
    return None if rows and heads and heads % rows == 0 else f"{rows} rows don't divide {requests} x {q.shape[1]} query heads"


def pool_problem(kp: Tensor, vp: Tensor) -> str | None:
    if kp.dtype not in STORED or vp.dtype != kp.dtype:
        return f"pages of {kp.dtype} and {vp.dtype} have no kernel"
    return None if kp.is_contiguous() and vp.is_contiguous() else "the pool is not contiguous"


def near(x: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    """The others, contiguous, where x is: page tables, lengths and bounds may come from the CPU."""
    return tuple(None if t is None else t.to(x.device, non_blocking=True).contiguous() for t in others)


@functools.lru_cache(maxsize=256)
def ints(values: tuple[int, ...], device: torch.device) -> Tensor:
    """A tuple of the host as int32 on the device; all layers of a step ask for the same ones."""
    return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)


@functools.lru_cache(maxsize=16)
def cores(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few under the interpreter, so that work is split there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@dataclass(frozen=True)
class Tiling:
    """How attention over pages is cut up: M stacked queries a tile, key tiles of T tokens in parts of S, `splits` of a row's keys."""

    group: int
    m: int
    t: int
    s: int
    block_d: int
    tiles: int
    splits: int
    warps: int


def tiling(q: Tensor, rows: int, spans: tuple[int, ...], dim: int, page: int, longest: int, wide: bool) -> Tiling:
    """For q [N, H, D] over `rows` rows that hold at most `longest` tokens; `wide`: pages of fp32, which take more registers."""
    group = (len(spans) - 1) * q.shape[1] // rows
    stacked = max((b - a for a, b in pairwise(spans)), default=0) * group
    block_d = max(triton.next_power_of_2(dim), 16)
    slim = block_d > 128 or wide
    m = min(max(triton.next_power_of_2(stacked), 16), 32 if slim else 64)
    t = 32 if slim else 64
    tiles = -(-stacked // m)
    # Enough programs for two rounds over the device, of at least four key tiles each.
    splits = max(1, min(2 * cores(q.device) // max(tiles * rows, 1), -(-longest // (4 * t)), 64))
    return Tiling(group, m, t, min(page, t), block_d, tiles, splits, 4 if block_d <= 64 or m == 16 else 8)


def bend(scale: float, softcap: float) -> tuple[float, float | None]:
    """(gain of the queries, cap of the logits in units of log2(e) if there is one)."""
    return (scale / softcap, softcap * LOG2E.value) if softcap > 0 else (scale * LOG2E.value, None)


# ---- the device's side


@triton.jit
def stacked(spans, row, per, tile, heads_of, M: tl.constexpr):
    """The queries of a tile: token and head int32 [M], which are real bool [M], and the request's span."""
    request = row // per
    a, b = tl.load(spans + request), tl.load(spans + request + 1)
    i = tile * M + tl.arange(0, M)
    token, head = a + i // heads_of, row % per * heads_of + i % heads_of
    return token, head, token < b, a, b


@triton.jit
def sight(lo, hi, token, live, n):
    """First and past-the-last visible in-row index of each query int32 [M]; one that sees nothing gets (n, 0)."""
    first, last = tl.zeros_like(token), tl.zeros_like(token) + n
    if lo is not None:
        first = tl.maximum(tl.load(lo + token, mask=live, other=0), 0)
    if hi is not None:
        last = tl.minimum(tl.load(hi + token, mask=live, other=0), n)
    sees = live & (first < last)
    return tl.where(sees, first, n), tl.where(sees, last, 0)


@triton.jit
def load_queries(q, token, head, live, heads, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """fp32 [M, BLOCK_D]."""
    d = tl.arange(0, BLOCK_D)
    at = (token.to(tl.int64) * heads + head) * D
    return tl.load(q + at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def locate(pages, t, n, W: tl.constexpr, T: tl.constexpr, S: tl.constexpr):
    """Key tile t of a row's page list: page int64 [T/S], slot int32 [T/S, S] in it, and in-row index int32 [T/S, S]."""
    start = (t * (T // S) + tl.arange(0, T // S)) * S
    page = tl.load(pages + start // W, mask=start < n, other=0).to(tl.int64)
    part = tl.arange(0, S)
    return page, (start % W)[:, None] + part[None, :], start[:, None] + part[None, :]


@triton.jit
def load_keys(kp, page, slot, j, n, D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_D, T] as stored; what was never written is 0, whatever the pool holds there."""
    d = tl.arange(0, BLOCK_D)
    at = page[None, :, None] * (D * W) + d[:, None, None] * W + slot[None, :, :]
    k = tl.load(kp + at, mask=(d < D)[:, None, None] & (j < n)[None, :, :], other=0.0)
    return tl.reshape(k, (BLOCK_D, T))


@triton.jit
def load_values(vp, page, slot, j, n, D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr):
    """[T, BLOCK_D] as stored."""
    d = tl.arange(0, BLOCK_D)
    at = page[:, None, None] * (D * W) + slot[:, :, None] * D + d[None, None, :]
    v = tl.load(vp + at, mask=(j < n)[:, :, None] & (d < D)[None, None, :], other=0.0)
    return tl.reshape(v, (T, BLOCK_D))


@triton.jit
def levelled(q, gain):
    """q * gain with every row scaled to a largest value of 4096, where fp16 keeps the most digits, and what undoes it [M]."""
    level = 4096.0 / tl.maximum(tl.max(tl.abs(q), 1), 1e-30)
    return q * level[:, None], gain / level


@triton.jit
def product(a, b):
    """a @ b for a in fp32 and b as stored, in fp32."""
    if b.dtype == tl.float32:
        y = tl.dot(a, b, input_precision=PRECISION)
    elif b.dtype == tl.float16:
        head = a.to(tl.float16)
        y = tl.dot(head, b, tl.dot((a - head.to(tl.float32)).to(tl.float16), b))
    else:
        head = a.to(tl.bfloat16)
        rest = a - head.to(tl.float32)
        mid = rest.to(tl.bfloat16)
        tail, b = (rest - mid.to(tl.float32)).to(tl.bfloat16), b.to(BRAIN)
        y = tl.dot(head.to(BRAIN), b, tl.dot(mid.to(BRAIN), b, tl.dot(tail.to(BRAIN), b)))
    return y


@triton.jit
def weighed(s, weight, page, slot, j, n, W: tl.constexpr, T: tl.constexpr):
    """Add the log-weights of a key tile, fp32 [Pages, W], to its logits."""
    w = tl.load(weight + page[:, None] * W + slot, mask=j < n, other=0.0)
    return s + tl.reshape(w, (T,))[None, :] * LOG2E


@triton.jit
def capped(s, cap):
    """cap * tanh(s), or s without a cap."""
    if cap is not None:
        s = cap * (1 - 2 / (1 + tl.exp2(s * (2 * LOG2E))))
    return s


@triton.jit
def soften(s, seen, top, total):
    """One step of a running softmax: weights [M, T], what the past shrinks by [M], and the new base and sum."""
    s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1) - LIFT)
    base = tl.where(new == float("-inf"), 0.0, new)  # exp2(-inf - -inf) would be NaN
    p, keep = tl.exp2(s - base[:, None]), tl.exp2(top - base)
    return p, keep, new, total * keep + tl.sum(p, 1)


@triton.jit
def natural(top, total):
    """The natural log-sum-exp from a running softmax in base 2; what it is where total is 0 does not matter."""
    return (top + tl.log2(tl.where(total > 0, total, 1.0))) * LN2


@triton.jit
def share(begin, end, split, T: tl.constexpr, SPLITS: tl.constexpr):
    """The key tiles of this split: its even share of those that hold the in-row indices begin to end."""
    first, last = begin // T, (end + T - 1) // T
    each = (tl.maximum(last - first, 0) + SPLITS - 1) // SPLITS
    first += split * each
    return first, tl.minimum(last, first + each)


@triton.jit
def finish(out, lse, acc, total, logsum, at, live, d, D: tl.constexpr):
    """Write acc / total, whose columns are the dims d, and logsum at the flat (split, token, head) places `at` int64 [M]."""
    some = total > 0
    result = acc / tl.where(some, total, 1.0)[:, None]
    tl.store(out + at[:, None] * D + d[None, :], result, mask=live[:, None] & (d < D)[None, :])
    tl.store(lse + at, tl.where(some, logsum, float("-inf")), mask=live)


@triton.jit
def heap(acc, top, total, out, lse, at, live, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Add one part's out and its natural lse at `at` to a running merge; a part that saw nothing is not read."""
    d = tl.arange(0, BLOCK_D)
    s = tl.load(lse + at, mask=live, other=float("-inf"))
    new = tl.maximum(top, s)
    base = tl.where(new == float("-inf"), 0.0, new)
    keep, share = tl.exp(top - base), tl.exp(s - base)
    x = tl.load(out + at[:, None] * D + d[None, :], mask=(s > float("-inf"))[:, None] & (d < D)[None, :], other=0.0)
    return acc * keep[:, None] + share[:, None] * x, new, total * keep + share


@triton.jit
def join(outs, lses, out, lse, count, splits, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    """Merge the splits of outs [splits, count, D]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    acc, top, total = tl.zeros((BLOCK, BLOCK_D), tl.float32), tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        acc, top, total = heap(acc, top, total, outs, lses, split * count + at, live, D, BLOCK_D)
    finish(out, lse, acc, total, top + tl.log(tl.where(total > 0, total, 1.0)), at, live, tl.arange(0, BLOCK_D), D)


@triton.jit
def owner(offset, at, rows, BLOCK: tl.constexpr):
    """The row int32 [T] of the entries `at` of a list in row order, whose bounds are offset [rows + 1]."""
    r = tl.arange(0, BLOCK)
    ends = tl.load(offset + 1 + r, mask=r < rows, other=2147483647)
    return tl.sum((ends[None, :] <= at[:, None]).to(tl.int32), 1)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 to a stored type, to nearest, ties to even; bf16 by its bits, since the interpreter only cuts them off."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        y = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y


# ---- the host's side of splits


def parts(q: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Room for what each split finds: out [splits, N, H, D] and lse [splits, N, H]."""
    return q.new_empty(splits, *q.shape), q.new_empty(splits, *q.shape[:2])


def merged(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The merge of the splits."""
    if len(outs) == 1:
        return outs[0], lses[0]
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    block, dim = 4, out.shape[-1]
    block_d = triton.next_power_of_2(dim)
    join[(triton.cdiv(lse.numel(), block),)](outs, lses, out, lse, lse.numel(), len(outs), D=dim, BLOCK_D=block_d, BLOCK=block)
    return out, lse
