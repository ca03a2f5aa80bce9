"""Measure Longspool and its peers on one machine in one run, each job in a process of its own.

python benchmarks/run.py                                          all peers, three repeats
python benchmarks/run.py --everything                             and then the kernels and the 1B shape
python benchmarks/run.py --quick                                  one length, one repeat
python benchmarks/run.py --peers transformers,llama_cpp/flash --lengths 1k,7.5k --repeats 3
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

HERE = Path(__file__).resolve().parent
if __package__ in (None, ""):  # run as a script: this folder's names must not hide installed packages
    sys.path[0] = str(HERE.parent)

from benchmarks import machine, peers, prompts, store  # noqa: E402
from benchmarks.worker import TASKS, Job  # noqa: E402

WORK = HERE / ".work"
LIMIT_S = 1800


def arguments(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="benchmarks/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--peers", default=",".join(peers.PEERS), help="peers or peer/variant, separated by commas (all)")
    p.add_argument("--lengths", default="1k,4k,7.5k", help=f"prompt lengths, of {', '.join(prompts.LENGTHS)}")
    p.add_argument("--tasks", default=",".join(TASKS), help="speed, forced (top-1 on real text), needle (all)")
    p.add_argument("--repeats", type=int, default=3, help="repeats of each speed job; the other tasks are deterministic")
    p.add_argument("--tokens", type=int, default=48, help="tokens to decode in a speed job, at least 33")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--model", type=Path, default=None, help="a SmolLM2 GGUF file; without it the one that `longspool pull smollm2` fetched")
    p.add_argument("--python", action="append", default=[], metavar="PEER=PATH", help="the interpreter of a peer that lives elsewhere")
    p.add_argument("--quick", action="store_true", help="one length (1k), one repeat, the speed and forced tasks")
    p.add_argument("--everything", action="store_true", help="kernels.py and shape_1b.py as well, after the peers")
    p.add_argument("--no-table", action="store_true", help="leave the README's table as it is")
    args = p.parse_args(argv)
    if args.quick:
        args.lengths, args.repeats, args.tasks = "1k", 1, "speed,forced"
    for name, known in (("lengths", prompts.LENGTHS), ("tasks", TASKS)):
        wrong = [x for x in getattr(args, name).split(",") if x not in known]
        if wrong:
            p.error(f"--{name}: {', '.join(wrong)} is none of {', '.join(known)}")
    if args.tokens < 33 or args.repeats < 1:
        p.error("--tokens must be at least 33 and --repeats at least 1")
    return args


def find_model(given: Path | None) -> Path:
    if given is None:
        from platformdirs import user_cache_dir

        given = Path(user_cache_dir("longspool")) / "models" / "smollm2.gguf"
    if not given.exists():
        raise SystemExit(f"There is no {given.name}: run `longspool pull smollm2` first, or give --model PATH.")
    return given.resolve()


def prepare(model: Path) -> Path:
    """The prompts' file, made in another process because a child takes over its parent's peak memory."""
    WORK.mkdir(exist_ok=True)
    target = WORK / f"prompts-{model.stat().st_size}-{sys.version_info.major}.{sys.version_info.minor}.json"
    source = HERE / "prompts.py"
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        subprocess.run([sys.executable, "-m", "benchmarks.prompts", str(model), str(target)], cwd=HERE.parent, check=True)
    return target


def ceilings(threads: int) -> dict[str, float]:
    """Measured in another process, so that this one stays small and holds no threads."""
    code = f"import json, dataclasses, benchmarks.machine as m; print(json.dumps(dataclasses.asdict(m.ceiling({threads}))))"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE.parent, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def work(job: Job, python: str) -> dict:
    """One job's facts, or why there are none."""
    source, target = WORK / "job.json", WORK / "facts.json"
    source.write_text(json.dumps(asdict(job)))
    target.unlink(missing_ok=True)
    quiet = {"OMP_NUM_THREADS": str(job.threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    others = machine.Others()
    command = [python, "-m", "benchmarks.worker", str(source), str(target)]
    try:
        done = subprocess.run(command, cwd=HERE.parent, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {LIMIT_S} s"}
    if done.returncode or not target.exists():
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        return {"failed": lines[-1].strip()[:300]}
    return {**json.loads(target.read_text()), "others": others.cores()}


def line(row: store.Row, facts: dict, seconds: float) -> str:
    head = f"{row.peer + '/' + row.variant:24} {row.task:7} {row.length:5}"
    if "missing" in facts:
        return f"{head} not installed: {facts['missing']}"
    if "failed" in facts:
        return f"{head} FAILED: {facts['failed']}"
    if row.task == "speed":
        ms = row.values("decode_ms")[-1]
        told = f"ttft {facts['ttft_s']:7.2f} s   decode {ms:7.2f} ms   peak {facts['peak_mb']:6.0f} MB"
    elif row.task == "forced":
        told = "no logits" if facts["tops"] is None else f"{len(facts['tops'])} tokens"
    else:
        told = f"{facts['score']} of {len(facts['right'])} needles"
    return f"{head} {told}   ({seconds:.0f} s, others {facts['others']} cores)"


def rows_of(args: argparse.Namespace, name: str) -> list[store.Row]:
    """Peers inside lengths inside tasks: what is compared is measured close together."""
    pairs = peers.variants(args.peers.split(","))
    rows = []
    for task in args.tasks.split(","):
        lengths = ["4k"] if task == "needle" else args.lengths.split(",")
        rows += [store.Row(name, peer, variant, task, length) for length in lengths for peer, variant in pairs]
    return rows


def main(argv: list[str] | None = None) -> None:
    args = arguments(sys.argv[1:] if argv is None else argv)
    model, start = find_model(args.model), time.monotonic()
    rows = rows_of(args, datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"))
    path = prepare(model)
    shown = shlex.join(a for i, a in enumerate(sys.argv[1:]) if not {"--model", "--python"} & {a, sys.argv[i]} and "=" not in a)
    command, sha = f"python benchmarks/run.py {shown}".strip(), prompts.read(path).sha
    run = store.Run(rows[0].run, command, machine.commit(), machine.describe(), ceilings(args.threads), sha)
    print(f"{model.name} on {run.machine['processor']}, {args.threads} threads, {run.ceiling}", flush=True)
    pythons = dict(pair.split("=", 1) for pair in args.python)
    gone: set[str] = set()
    for repeat in range(args.repeats):
        for row in rows:
            if row.peer in gone or (repeat and row.task != "speed"):
                continue
            job = Job(row.peer, row.variant, row.task, row.length, str(model), str(path), args.threads, args.tokens)
            began = time.monotonic()
            row.repeats.append(facts := work(job, pythons.get(row.peer, sys.executable)))
            print(line(row, facts, time.monotonic() - began), flush=True)
            if "missing" in facts:
                gone.add(row.peer)
            store.save(run, row)
    for script in ("kernels.py", "shape_1b.py") if args.everything else ():
        subprocess.run([sys.executable, str(HERE / script), "--threads", str(args.threads)], cwd=HERE.parent, check=False)
    print(f"done in {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
    if not args.no_table:
        from benchmarks import table

        table.main([])


if __name__ == "__main__":
    main()
