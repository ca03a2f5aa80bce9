"""What a person sees beside the answer, on stderr: progress bars and the facts of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from ..report import Report

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def console() -> Console:
    """stderr as it is now; made anew, since a test may have put another one in its place."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


class Bar:
    """A progress bar that leaves no trace; nothing at all where stderr is no terminal. It ends when left, or earlier by `stop`."""

    def __init__(self, text: str) -> None:
        out = console()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=out, transient=True, disable=not out.is_terminal)
        self._task: TaskID = self._progress.add_task(text, total=1.0)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._progress.stop()

    def fraction(self, done: float, text: str) -> None:
        """How loading tells its progress."""
        self._progress.update(self._task, completed=done, description=text)

    def tokens(self, done: int, total: int) -> None:
        """How reading a prompt tells its progress."""
        self._progress.update(self._task, completed=min(done / total, 1.0))


def size(count: float) -> str:
    """Bytes as people read them."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def summary(report: Report) -> None:
    """The facts of an answer: time, bytes, what each method did, and what did not go as asked."""
    table = Table.grid(padding=(0, 2))
    for name, text in _facts(report):
        table.add_row(f"[dim]{name}[/dim]", text)
    out = console()
    out.print(table, soft_wrap=False)
    for note in report.notes:
        out.print(f"[yellow]Note:[/yellow] {note}", markup=True)


def line(report: Report) -> str:
    """The same in one line."""
    memory = report.memory
    return (
        f"{report.prompt_tokens:,} tokens read, first token after {report.ttft_s:.2f} s, {report.completion_tokens} tokens at "
        f"{report.decode_tok_s:.1f} a second, KV memory {size(memory.kv_bytes)} of {size(memory.kv_dense_bytes)} dense"
    )


def _facts(report: Report) -> list[tuple[str, str]]:
    memory = report.memory
    tiers = "".join(f", {size(count)} on the {tier}" for tier, count in (("host", memory.host_bytes), ("disk", memory.disk_bytes)) if count)
    facts = [
        ("recipe", report.recipe),
        ("prompt", f"{report.prompt_tokens:,} tokens, first token after {report.ttft_s:.2f} s ({report.prefill_tok_s:,.0f} tokens/s)"),
        ("answer", f"{report.completion_tokens} tokens ({report.decode_tok_s:.1f} tokens/s), {report.finish_reason}, seed {report.seed}"),
        (
            "KV memory",
            f"{size(memory.kv_bytes)} now, {size(memory.kv_peak_bytes)} at the peak, {size(memory.kv_dense_bytes)} dense{tiers}; "
            f"the process's peak is {size(memory.rss_peak_bytes)}",
        ),
    ]
    if memory.fitted_bytes:
        facts.append(("fitted", f"{size(memory.fitted_bytes)} that all requests share"))
    facts += [(name, _counted(did)) for name, did in report.actions.items()]
    return facts + [("kernels", text) for text in _fallen(report)]


def _counted(counters: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count:,.{0 if count == int(count) else 2}f}" for name, count in counters.items())


def _fallen(report: Report) -> list[str]:
    """The ops that did not run on their fast kernel, gathered by the reason."""
    reasons: dict[str, list[str]] = {}
    for op, ran in report.kernels.items():
        if "ref" in ran:
            reasons.setdefault(ran.replace(op, "it"), []).append(op)
    return [f"{', '.join(ops)}: {why}" for why, ops in reasons.items()]
