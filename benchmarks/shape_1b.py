"""Decode of a model with the shape of Llama-3.2-1B, random Q8_0 weights and a memory that is filled directly: what length costs.

python benchmarks/shape_1b.py [--depths 8k,32k,128k] [--engines longspool/dense,llama_cpp/flash]
python benchmarks/shape_1b.py --depths 32k --engines longspool/dense --recipe "topk(budget=1024)" --recipe "int4"

Both engines read the same GGUF file, and must agree on a short prompt before any speed is printed. Longspool's memory is filled
with random keys and values; llama.cpp's by restoring the saved state of a short prompt over and over at later positions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

HERE = Path(__file__).resolve().parent
if __package__ in (None, ""):
    sys.path[0] = str(HERE.parent)

from benchmarks import machine, peers, store  # noqa: E402
from benchmarks.shape_engines import RECIPES, Job, llama_cpp, longspool  # noqa: E402
from benchmarks.shape_model import write_model  # noqa: E402

RESULT = store.RESULTS / "shape-1b.json"
DEPTHS = {"1k": 1024, "8k": 8192, "32k": 32768, "128k": 131072}
LLAMA = ("plain", "flash", "flash-q8_0")
ENGINES = [*(f"longspool/{v}" for v in RECIPES), *(f"llama_cpp/{v}" for v in LLAMA)]


def work(job: Job) -> dict:
    """One job in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "facts.json"
        command = [sys.executable, "-m", "benchmarks.shape_1b", "--job", json.dumps(asdict(job)), "--out", str(target)]
        others = machine.Others()
        done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
        if not target.exists():
            lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
            return {"failed": lines[-1][:300]}
        return {**json.loads(target.read_text()), "others": others.cores()}


def job_main(job: Job, out: Path) -> None:
    import numpy as np

    name = job.engine.split("/")[0]
    start = time.perf_counter()
    try:
        times, probe = (longspool if name == "longspool" else llama_cpp)(job)
    except ModuleNotFoundError as error:
        if "." in (error.name or "."):  # the package is there and broken
            raise
        out.write_text(json.dumps({"missing": peers.driver(name).INSTALL, "why": str(error)}))
        return
    kept = Path(job.probe)
    if not kept.exists():
        np.save(kept, probe)
    truth = np.load(kept)
    likeness = float(np.corrcoef(truth, probe)[0, 1])
    ms = [round(t * 1e3, 3) for t in times[1:]]  # the first step finishes what the filling left to do
    facts = {"decode_ms": ms, "likeness": round(likeness, 5), "spread": round(float(truth.std()), 3)}
    out.write_text(json.dumps(facts | {"peak_mb": machine.peak_mb(), "seconds": round(time.perf_counter() - start, 1)}))


def median(facts: dict) -> float:
    return statistics.median(facts["decode_ms"])


def line(facts: dict) -> str:
    if "missing" in facts:
        return f"not installed: {facts['missing']}"
    if "failed" in facts:
        return f"FAILED: {facts['failed']}"
    if facts["likeness"] < 0.99:
        return f"no speed shown: its logits differ from the first engine's (correlation {facts['likeness']})"
    return f"{median(facts):.1f} ms a token, peak {facts['peak_mb']:.0f} MB ({facts['seconds']:.0f} s, others {facts['others']} cores)"


def table() -> str:
    """The kept results as Markdown, or "" if there are none."""
    if not RESULT.exists():
        return ""
    raw = json.loads(RESULT.read_text())
    depths = [d for d in DEPTHS if any(d in by for by in raw["engines"].values())]
    rows = []
    for engine in [*(e for e in ENGINES if e in raw["engines"]), *(e for e in raw["engines"] if e not in ENGINES)]:
        cells = [raw["engines"][engine].get(d, {}) for d in depths]
        shown = [f"{median(c):.1f}{'‡' if c['others'] > 0.1 else ''}" if c.get("likeness", 0) >= 0.99 else "" for c in cells]
        rows.append(f"| `{engine}` | " + " | ".join(shown) + " |")
    head = "| | " + " | ".join(depths) + " |\n| --- |" + " ---: |" * len(depths)
    note = f"Llama-3.2-1B's shape, random Q8_0 weights; {raw['date'][:10]}, commit {raw['source']}, `{raw['command']}`."
    return f"{head}\n" + "\n".join(rows) + f"\n\n{note}"


def save(args: argparse.Namespace, engine: str, depth: str, facts: dict) -> None:
    """Results of other engines and depths stay."""
    old = json.loads(RESULT.read_text()) if RESULT.exists() else {"engines": {}}
    engines = old["engines"]
    engines.setdefault(engine, {})[depth] = facts | {"date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")}
    content = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": f"python benchmarks/shape_1b.py --engines {args.engines} --depths {args.depths}",
        "source": machine.commit(),
        "machine": machine.describe(),
        "versions": machine.versions(("torch", "numba", "longspool", "llama-cpp-python")),
        "threads": args.threads,
        "engines": engines,
    }
    RESULT.write_text(store.dump(content) + "\n")


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="benchmarks/shape_1b.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--depths", default="8k,32k,128k", help=f"of {', '.join(DEPTHS)}")
    p.add_argument("--engines", default=",".join(ENGINES))
    p.add_argument("--recipe", action="append", default=[], help="one more recipe of Longspool's; may be repeated")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--model", type=Path, default=Path(tempfile.gettempdir()) / "longspool-shape-1b.gguf", help="where the 1.3 GB file is")
    p.add_argument("--job", default="", help=argparse.SUPPRESS)
    p.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.job:
        return job_main(Job(**json.loads(args.job)), args.out)
    if wrong := [x for x in args.depths.split(",") if x not in DEPTHS] + [x for x in args.engines.split(",") if x not in ENGINES]:
        p.error(f"{', '.join(wrong)} is none of {', '.join((*DEPTHS, *ENGINES))}")
    if not args.model.exists():
        print(f"writing {args.model.name}", flush=True)
        write_model(args.model)
    with tempfile.TemporaryDirectory() as folder:
        for depth in args.depths.split(","):
            for engine in [*args.engines.split(","), *(f"longspool/{recipe}" for recipe in args.recipe)]:
                job = Job(engine, DEPTHS[depth], str(args.model), args.threads, str(Path(folder) / "probe.npy"))
                facts = work(job)
                print(f"{engine:22} {depth:5} {line(facts)}", flush=True)
                if "decode_ms" in facts:
                    save(args, engine, depth, facts)
    return None


if __name__ == "__main__":
    main()
