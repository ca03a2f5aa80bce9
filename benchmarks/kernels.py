"""Longspool's kernels alone: a time is printed only after the same arguments gave the reference's result.

python benchmarks/kernels.py [--lengths 1k,128k] [--ops attend_rows,matmul] [--quick]

As in a model, calls go round several layers' memories, so that short ones are not read from the caches more than they would be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
if __package__ in (None, ""):
    sys.path[0] = str(HERE.parent)

from benchmarks import machine, store  # noqa: E402

if TYPE_CHECKING:
    import torch

    from longspool.values import Packed

RESULT = store.RESULTS / "kernels.json"
LENGTHS = {"1k": 1024, "4k": 4096, "8k": 8192, "32k": 32768, "128k": 131072}
OPS = ("attend_rows", "attend_codes", "page_scores", "attend_blocks", "prefill", "matmul")
LAYERS, ENOUGH = 30, 512 << 20  # memories to go round: those of a whole model, or so many bytes
HEADS, GROUP, DIM, PAGE = 3, 3, 64, 64


@dataclass(frozen=True)
class Case:
    """One op on one set of shapes. `moved` bytes must be read from memory, `flops` be done; `args` holds one tuple a layer."""

    op: str
    label: str
    args: list[tuple]
    moved: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Timing:
    """What came of a case. `share` is of the measured read bandwidth, or of sgemm where the op is bound by arithmetic."""

    op: str
    label: str
    us: float
    moved: int
    gbs: float
    gflops: float
    share: float
    error: float
    note: str = ""


def pages(tokens: int, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """kp, vp, table, length: HEADS rows of this many random tokens whose pages lie in a shuffled order."""
    import torch

    g = torch.Generator().manual_seed(seed)
    count = -(-tokens // PAGE)
    k = torch.randn(HEADS * count, DIM, PAGE, generator=g).to(dtype)
    v = torch.randn(HEADS * count, PAGE, DIM, generator=g).to(dtype)
    table = torch.randperm(HEADS * count, generator=g).to(torch.int32).view(HEADS, count)
    return k, v, table, torch.full((HEADS,), tokens, dtype=torch.int32)


def rounds(size: int) -> int:
    """How many layers to go round."""
    return max(1, min(LAYERS, ENOUGH // max(size, 1)))


def query(tokens: int, seed: int = 5) -> torch.Tensor:
    import torch

    return torch.randn(tokens, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(seed))


def raw_decode(lengths: list[int]) -> Iterator[Case]:
    import torch

    for dtype, name, size in ((torch.float16, "f16", 2), (torch.float32, "f32", 4)):
        for n in lengths:
            moved = 2 * HEADS * n * DIM * size
            layers = [pages(n, i, dtype) for i in range(rounds(moved))]
            args = [(query(1), *layer, (0, 1), None, None, DIM**-0.5) for layer in layers]
            yield Case("attend_rows", f"{name}, {n} tokens", args, moved, 4 * DIM * HEADS * GROUP * n)


def code_decode(lengths: list[int]) -> Iterator[Case]:
    for bits in (8, 4):
        for n in lengths:
            coded = 2 * HEADS * n * DIM * bits // 8
            moved = coded + HEADS * n * 2 * (1 if bits == 8 else 2) + HEADS * (n // PAGE) * DIM * 2 * (1 if bits == 8 else 2)
            args = [_coded(n, i, bits) for i in range(rounds(moved))]
            yield Case("attend_codes", f"int{bits}, {n} tokens", args, moved, 4 * DIM * HEADS * GROUP * n)


def _coded(tokens: int, seed: int, bits: int) -> tuple:
    import torch

    from longspool.kernels.codes import encode_k, encode_v

    k, v, table, length = pages(tokens, seed, torch.float32)
    (kc, kscale, kzero), (vc, vscale, vzero) = encode_k(k, bits), encode_v(v, bits)
    return query(1), kc, vc, kscale, kzero, vscale, vzero, bits, table, length, (0, 1), None, None, DIM**-0.5


def scores(lengths: list[int]) -> Iterator[Case]:
    """Quest's bounds over pages of 16."""
    import torch

    for n in lengths:
        count = HEADS * (n // 16)
        moved = 2 * count * DIM * 2
        table = torch.arange(count, dtype=torch.int32).view(HEADS, -1)
        length = torch.full((HEADS,), n, dtype=torch.int32)
        args = []
        for seed in range(rounds(moved)):
            g = torch.Generator().manual_seed(seed)
            a, b = (torch.randn(count, DIM, generator=g).half() for _ in range(2))
            args.append((query(1), torch.minimum(a, b), torch.maximum(a, b), table, length, 16, (0, 1)))
        yield Case("page_scores", f"{n} tokens, pages of 16", args, moved, 4 * count * DIM * GROUP)


def prefill(lengths: list[int]) -> Iterator[Case]:
    """A chunk of 512 tokens after n - 512 earlier ones."""
    import torch

    for n in [x for x in lengths if x <= 8192]:
        hi = torch.arange(n - 511, n + 1, dtype=torch.int32)
        args = [(query(512), *pages(n, 1, torch.float16), (0, 512), None, hi, DIM**-0.5)]
        yield Case("attend_rows", f"prefill 512 of {n}, f16", args, 0, 4 * DIM * HEADS * GROUP * int(hi.sum()))


def blocks(lengths: list[int]) -> Iterator[Case]:
    """The same chunk with a share of the key blocks left out; flops are those of the blocks that remain."""
    import torch

    from longspool.values import Blocks

    for n in [x for x in lengths if 4096 <= x <= 8192]:
        hi = torch.arange(n - 511, n + 1, dtype=torch.int32)
        for share in (1.0, 0.25):
            mask = torch.rand(HEADS * GROUP, 4, n // 128, generator=torch.Generator().manual_seed(3)) < share
            mask[..., -4:] |= torch.eye(4, dtype=torch.bool)  # every query keeps its own block
            seen = mask.repeat_interleave(128, 1)[:, :512].repeat_interleave(128, 2) & (torch.arange(n) < hi[:, None])
            args = [(query(512), *pages(n, 1, torch.float16), (0, 512), None, hi, Blocks.of(mask, 128), (0,), (n - 512,), DIM**-0.5)]
            yield Case("attend_blocks", f"prefill 512 of {n}, {share:.0%} of blocks", args, 0, 4 * DIM * int(seen.sum()))


def products(lengths: list[int]) -> Iterator[Case]:
    """One token and a chunk of 512 through SmolLM2's largest matrices and a 1B model's."""
    import torch

    from longspool.values import Packed

    for rows, cols in ((3072, 576), (8192, 2048)):
        w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1)) / cols**0.5
        for kind in ("q8_0", "q4_1", "f16", "bf16", "f32"):  # int8 and int4 are stored as q8_0 and q4_1
            packed = Packed.from_float(w, kind)
            many = [_copy(packed) for _ in range(rounds(packed.nbytes))]
            for tokens in (1, 512):
                x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(2))
                moved = packed.nbytes if tokens == 1 else 0
                yield Case("matmul", f"{kind}, {tokens} x {rows} x {cols}", [(x, p) for p in many], moved, 2 * tokens * rows * cols)


def _copy(w: Packed) -> Packed:
    parts = (None if t is None else t.clone() for t in (w.codes, w.scale, w.low))
    return replace(w, **dict(zip(("codes", "scale", "low"), parts, strict=True)))


MAKERS: dict[str, Callable[[list[int]], Iterator[Case]]] = dict(
    zip(OPS, (raw_decode, code_decode, scores, blocks, prefill, products), strict=True)
)


def gate(case: Case) -> tuple[Callable[..., object], float, str]:
    """The op as the engine calls it, its error against the reference in units of the tolerance, and why it has no speed to show."""
    from importlib import import_module

    from longspool.kernels.op import Op, implementation

    try:
        fast = implementation(case.op, "cpu")
    except LookupError as reason:
        return lambda *args: None, 0.0, str(reason)
    first = case.args[0]
    if why := fast.can(*first):
        return lambda *args: None, 0.0, why
    absolute, relative = import_module(f"longspool.kernels.{case.op}.spec").TOLERANCE
    got, want = fast.run(*first), implementation(case.op, "ref").run(*first)
    pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
    error = max(_gap(a, b, absolute, relative) for a, b in pairs)
    return Op(case.op), error, "" if error <= 1 else "differs from the reference"


def _gap(got: torch.Tensor, want: torch.Tensor, absolute: float, relative: float) -> float:
    """The largest error in units of the tolerance; a NaN is infinitely wrong, equal infinities are right."""
    gap = (got - want).abs() / (absolute + relative * want.abs())
    gap[got == want] = 0.0
    return float(gap.nan_to_num(float("inf")).max())


def measure(case: Case, ceiling: machine.Ceiling) -> Timing:
    run, error, why = gate(case)
    if why:
        return Timing(case.op, case.label, 0.0, case.moved, 0.0, 0.0, 0.0, round(error, 3), why)

    def once() -> None:
        for args in case.args:
            run(*args)

    seconds = machine.best(once, 50, 1.5) / len(case.args)
    gbs, gflops = case.moved / seconds / 1e9, case.flops / seconds / 1e9
    share = gbs / ceiling.read_gbs if case.moved else gflops / ceiling.sgemm_gflops
    return Timing(
        case.op, case.label, round(seconds * 1e6, 1), case.moved, round(gbs, 1), round(gflops, 1), round(share, 2), round(error, 3)
    )


def line(t: Timing) -> list[str]:
    if t.note:
        return [f"`{t.op}` {t.label}", "", "", "", t.note]
    rate = f"{t.gbs:.1f} GB/s" if t.moved else f"{t.gflops:.0f} GFLOP/s"
    limit = "read bandwidth" if t.moved else "sgemm"
    return [f"`{t.op}` {t.label}", f"{t.us:,.0f}", f"{t.moved / 1e6:.2f}" if t.moved else "", rate, f"{t.share:.0%} of {limit}"]


def table() -> str:
    """The kept timings as Markdown, or "" if there are none."""
    import json

    if not RESULT.exists():
        return ""
    raw = json.loads(RESULT.read_text())
    rows = ["| " + " | ".join(line(Timing(**t))) + " |" for t in raw["timings"]]
    head = "| kernel | µs | MB | rate | share |\n| --- | ---: | ---: | ---: | ---: |"
    c = raw["ceiling"]
    ceilings = f"{c['read_gbs']} GB/s read, {c['sgemm_gflops']} GFLOP/s sgemm"
    return f"{head}\n" + "\n".join(rows) + f"\n\nCeilings of the same run: {ceilings}; {raw['date'][:10]}, commit {raw['source']}."


def main(argv: list[str] | None = None) -> None:
    import torch

    p = argparse.ArgumentParser(prog="benchmarks/kernels.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--lengths", default=",".join(LENGTHS))
    p.add_argument("--ops", default=",".join(OPS))
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--quick", action="store_true", help="4k only, nothing kept")
    args = p.parse_args(argv)
    names = ["4k"] if args.quick else args.lengths.split(",")
    if wrong := [x for x in names if x not in LENGTHS] + [x for x in args.ops.split(",") if x not in OPS]:
        p.error(f"{', '.join(wrong)} is none of {', '.join((*LENGTHS, *OPS))}")
    ceiling, others = machine.ceiling(args.threads), machine.Others()
    torch.set_num_threads(args.threads)
    timings = []
    for op in args.ops.split(","):
        for case in MAKERS[op]([LENGTHS[name] for name in names]):
            timings.append(measure(case, ceiling))
            print("  ".join(f"{cell:34}" if i == 0 else f"{cell:>14}" for i, cell in enumerate(line(timings[-1]))), flush=True)
    if not args.quick:
        content = {
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "command": f"python benchmarks/kernels.py --lengths {','.join(names)} --ops {args.ops}",
            "source": machine.commit(),
            "machine": machine.describe(),
            "versions": machine.versions(("torch", "numba")),
            "ceiling": asdict(ceiling),
            "others_cores": others.cores(),
            "timings": [asdict(t) for t in timings],
        }
        RESULT.write_text(store.dump(content) + "\n")
    if failed := [t for t in timings if t.error > 1]:
        raise SystemExit(f"{len(failed)} kernels differ from their reference: {', '.join(t.label for t in failed)}.")


if __name__ == "__main__":
    main()
