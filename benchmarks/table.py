"""The results as Markdown, put into the README between its markers. `python benchmarks/table.py --print` only shows them."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
if __package__ in (None, ""):
    sys.path[0] = str(HERE.parent)

from benchmarks import kernels, peers, prompts, shape_1b, store  # noqa: E402

START, END = "<!-- bench:start -->", "<!-- bench:end -->"
OURS, REFERENCE = "longspool", ("transformers", "fp32")
NAMES = {"transformers": "Transformers", "llama_cpp": "llama.cpp", "openvino": "OpenVINO GenAI", "longspool": "**Longspool**"}
QUIET = 0.1  # cores that other processes may use before a row is marked

Cells = list[str]
Format = Callable[[float], str]


class Results:
    """All rows of all peers, found by (peer, variant, task, length)."""

    def __init__(self) -> None:
        self.runs: dict[str, store.Run] = {}
        self.rows: dict[tuple[str, str, str, str], store.Row] = {}
        for peer in peers.PEERS:
            runs, rows = store.load(peer)
            self.runs |= runs
            self.rows |= {(peer, *row.key): row for row in rows}
        self.main = max((r.run for r in self.rows.values() if r.peer == OURS), default=max(self.runs, default=""))

    def get(self, peer: str, variant: str, task: str, length: str) -> store.Row | None:
        return self.rows.get((peer, variant, task, length))

    def variants(self) -> list[tuple[str, str]]:
        """Those that have a usable row, in the drivers' order."""
        have = {(r.peer, r.variant) for r in self.rows.values() if not r.missing and not r.failed}
        known = [(p, v) for p in peers.PEERS for v in peers.driver(p).VARIANTS]
        return [pair for pair in known if pair in have]

    def lengths(self, *tasks: str) -> list[str]:
        have = {length for (_, _, task, length) in self.rows if task in tasks}
        return [name for name in prompts.LENGTHS if name in have]


def spread(values: Sequence[float], form: Format) -> str:
    """The median, and from three repeats on the least and the most."""
    if not values:
        return ""
    middle = form(statistics.median(values))
    return middle if len(values) < 3 else f"{middle} ({form(min(values))}–{form(max(values))})"


def grid(head: Cells, body: list[Cells]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *body))


def name(peer: str, variant: str) -> str:
    return f"{NAMES[peer]} `{variant}`"


def mark(row: store.Row, main: str) -> str:
    """† for a row of another run, ‡ for one that others disturbed."""
    disturbed = max(row.values("others"), default=0.0) > QUIET
    return ("†" if row.run != main else "") + ("‡" if disturbed else "")


def speed(results: Results, fact: str, form: Format) -> str:
    """One fact of the speed task: variants down, lengths across."""
    lengths, body = results.lengths("speed"), []
    for peer, variant in results.variants():
        found = [results.get(peer, variant, "speed", length) for length in lengths]
        body.append([name(peer, variant)] + [spread(r.values(fact), form) + mark(r, results.main) if r else "" for r in found])
    return grid(["", *lengths], body)


def fidelity(results: Results) -> tuple[str, str]:
    """How near each variant is to fp32, and how many needles it finds: a caption that says what was measured, and the table."""
    pairs, lengths = results.variants(), results.lengths("speed", "forced")
    forced = {x: any(teacher_forced(results, *pair, x) for pair in pairs) for x in lengths}
    near = {pair: [agreement(results, *pair, x) for x in lengths] for pair in pairs}
    found = {pair: needles(results, *pair) for pair in pairs}
    ways = ["teacher-forced on real text"] if any(forced.values()) else []
    ways += ["greedy answers"] if any(cell.startswith("greedy") for cells in near.values() for cell in cells) else []
    said = [f"nearness to fp32 ({', '.join(ways)})"] if ways else []
    said += ["needles found"] if any(found.values()) else []
    caption = " and ".join(said)
    head = [*(f"{'top-1' if forced[x] else 'greedy'}, {x}" for x in lengths), "needles, 4k"]
    return caption[:1].upper() + caption[1:], filled(head, [[name(*pair), *near[pair], found[pair]] for pair in pairs])


def filled(head: Cells, body: list[Cells]) -> str:
    """A grid of the columns and rows in which anything stands below a head and beside a name; "" if there are none."""
    body = [row for row in body if any(row[1:])]
    kept = [i for i in range(len(head)) if any(row[i + 1] for row in body)]
    return grid(["", *(head[i] for i in kept)], [[row[0], *(row[i + 1] for i in kept)] for row in body]) if body else ""


def needles(results: Results, peer: str, variant: str) -> str:
    row = results.get(peer, variant, "needle", "4k")
    score = row.values("score") if row else []
    return f"{score[0]:.0f} of {len(prompts.KEYS)}" if score else ""


def agreement(results: Results, peer: str, variant: str, length: str) -> str:
    """How often it agrees with the reference on real text; where a peer can't show that, the first token at which its answer differs."""
    return teacher_forced(results, peer, variant, length) or greedy(results, peer, variant, length)


def teacher_forced(results: Results, peer: str, variant: str, length: str) -> str:
    """Top-1 agreement with the reference, and mean KL."""
    mine, truth = (results.get(p, v, "forced", length) for p, v in ((peer, variant), REFERENCE))
    if not mine or not truth or not mine.repeats[0].get("tops") or not truth.repeats[0].get("tops"):
        return ""
    a, b = mine.repeats[0]["tops"], truth.repeats[0]["tops"]
    share = sum(x == y for x, y in zip(a, b, strict=True)) / len(b)
    kl = mine.repeats[0].get("kl")
    return f"{share:.1%}" + (f", KL {statistics.mean(kl):.2g}" if kl else "")


def greedy(results: Results, peer: str, variant: str, length: str) -> str:
    """How far the answer is the reference's."""
    mine, truth = (results.get(p, v, "speed", length) for p, v in ((peer, variant), REFERENCE))
    if not mine or not truth or not mine.repeats[0].get("tokens") or not truth.repeats[0].get("tokens"):
        return ""
    a, b = mine.repeats[0]["tokens"], truth.repeats[0]["tokens"]
    same = [x == y for x, y in zip(a, b, strict=False)]
    first = "greedy equal" if all(same) else f"greedy equal up to token {same.index(False)}"
    return f"{first}, {sum(same)} of {len(same)}"


def ratios(results: Results) -> str:
    """How many times faster or smaller than each peer's best exact variant, from rows of one run only."""
    facts, lengths, body = {"ttft_s": "first token", "decode_ms": "decode", "peak_mb": "peak memory"}, results.lengths("speed"), []
    for variant in [v for p, v in results.variants() if p == OURS]:
        for other in [p for p in peers.PEERS if p != OURS]:
            cells = [ratio(results, variant, other, fact, length) for fact in facts for length in lengths]
            body.append([f"`{variant}` against {NAMES[other]}", *cells])
    return filled([f"{what}, {length}" for what in facts.values() for length in lengths], body)


def ratio(results: Results, variant: str, other: str, fact: str, length: str) -> str:
    """One cell: blank where no two rows are of one run, and in words where they are but one of them lacks the number."""
    mine = results.get(OURS, variant, "speed", length)
    if not mine or mine.missing:
        return ""
    rows = [results.get(other, v, "speed", length) for v in peers.driver(other).EXACT]
    same = [r for r in rows if r and r.run == mine.run and not r.missing]
    theirs = [statistics.median(r.values(fact)) for r in same if r.values(fact)]
    if theirs and mine.values(fact):
        return f"{min(theirs) / statistics.median(mine.values(fact)):.2f}×"
    return ("failed" if any(r.failed for r in (mine, *same)) else "not measured") if same else ""


def notes(results: Results) -> list[str]:
    """What the reader must know: machine, runs, marks, what is missing and what failed."""
    said = []
    run = results.runs.get(results.main)
    if run:
        m, c = run.machine, run.ceiling
        said.append(
            f"SmolLM2-135M-Instruct (Q4_1 GGUF), {c['threads']} threads of {m['processor']} "
            f"({m['cores']} cores, {m['instructions']}, {m['memory_gib']} GiB; "
            f"reads {c['read_gbs']} GB/s, sgemm {c['sgemm_gflops']} GFLOP/s), {m['system']}, Python {m['python']}, {run.name[:10]}, "
            f"commit {run.source}, `{run.command}`. Medians, in brackets the least and the most of the repeats. The same token ids for all."
        )
    shown = [row for row in results.rows.values() if row.task == "speed"]
    if any("†" in mark(r, results.main) for r in shown):
        said.append("† measured in another run: not to be compared to the digit.")
    if any("‡" in mark(r, results.main) for r in shown):
        said.append(f"‡ other processes used more than {QUIET} cores meanwhile.")
    used = {v for r in shown for x in r.repeats for v in (x.get("versions") or {}).items()}
    said.append("Versions: " + ", ".join(f"{package} {version}" for package, version in sorted(used)) + ".")
    for peer in peers.PEERS:
        gone = not any(p == peer for p, _ in results.variants())
        if gone:
            said.append(f"{NAMES[peer]} is not measured here; install it with `{peers.driver(peer).INSTALL}`.")
    said += [f"{name(r.peer, r.variant)} failed at {r.task} {r.length}: {r.failed}." for r in results.rows.values() if r.failed]
    return said


def text() -> str:
    results = Results()
    parts = [
        ("Time to the first token (s)", speed(results, "ttft_s", "{:.2f}".format)),
        ("Decode (ms a token, greedy)", speed(results, "decode_ms", "{:.1f}".format)),
        ("Peak memory of the process (MB)", speed(results, "peak_mb", "{:.0f}".format)),
        fidelity(results),
        ("How many times better than the peer's best exact setting (above 1 is better)", ratios(results)),
        ("A 1B model's decode (ms a token)", shape_1b.table()),
        ("Kernels", kernels.table()),
    ]
    body = "\n\n".join(f"**{title}**\n\n{content}" for title, content in parts if content)
    return body + "\n\n" + "\n".join(f"- {note}" for note in notes(results))


def insert(readme: Path, content: str) -> None:
    page = readme.read_text() if readme.exists() else ""
    if page.count(START) != 1 or page.count(END) != 1 or page.index(START) > page.index(END):
        raise SystemExit(f"{readme.name} has no place for the table: write {START} and {END} on lines of their own.")
    before, rest = page.split(START)
    readme.write_text(f"{before}{START}\n{content}\n{END}{rest.split(END)[1]}")


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="benchmarks/table.py", description=__doc__)
    p.add_argument("--print", action="store_true", help="show the tables and leave the README alone")
    p.add_argument("--readme", type=Path, default=HERE.parent / "README.md")
    args = p.parse_args(argv)
    if args.print:
        print(text())
    else:
        insert(args.readme, text())


if __name__ == "__main__":
    main()
