"""The command line as a process: exit codes, signals, closed pipes, and how soon it is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LONGSPOOL = (sys.executable, "-m", "longspool.cli.main")
NOISE = ("-t", "5", "--ignore-eos", "--max-tokens", "1900")
LONG = ("-p", "go", *NOISE)
PATIENCE = 60  # seconds in which everything here happens, however busy the machine


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [*LONGSPOOL, *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def gone(pid: int) -> bool:
    """Whether a process ends within a moment; one that nobody has asked about yet has ended too."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, longspool.cli.main as cli\n"
        "sys.argv = ['longspool', '--help']\n"
        "try: cli.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'numba', 'numpy', 'transformers', 'triton'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "methods" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("run", "-m", "nowhere.gguf", "-p", "hi"), 2, "Error: There is no model 'nowhere.gguf'"),
        (("run", "-f", "nowhere.txt"), 2, "Error: There is no file nowhere.txt."),
        (("run",), 2, "Error: The prompt is empty"),
        (("run", "--no-such-flag"), 2, "No such option: --no-such-flag"),
        (("--version",), 0, ""),
    ],
)
def test_exit_codes(arguments: tuple[str, ...], code: int, sentence: str) -> None:
    done = subprocess.run([*LONGSPOOL, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == code and sentence in done.stderr and "Traceback" not in done.stderr


def test_ctrl_c(tiny_dir: Path) -> None:
    process = start("run", "-m", str(tiny_dir), *LONG)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    assert process.stderr.read().splitlines() == ["Interrupted."]


def test_a_closed_pipe_is_no_error(tiny_dir: Path) -> None:
    process = start("run", "-m", str(tiny_dir), *LONG)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(PATIENCE) == 141
    assert process.stderr.read() == ""


def test_leaving_a_chat_with_ctrl_c(tiny_dir: Path) -> None:
    """The second Ctrl-C leaves, whether the first has already been heard or not."""
    process = subprocess.Popen(
        [*LONGSPOOL, "chat", "-m", str(tiny_dir), *NOISE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(b"go\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    while process.poll() is None and b"Stopped." not in process.stderr.readline():
        time.sleep(0.01)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    assert process.stderr.read().decode().split() == ["Interrupted."]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are looked up in /proc")
def test_an_interrupted_pull_leaves_nothing(tmp_path: Path) -> None:
    """A pip that takes for ever is interrupted: no process, no file."""
    slow = tmp_path / "pip"
    slow.mkdir()
    (slow / "__main__.py").write_text("import time\ntime.sleep(600)\n")
    (slow / "__init__.py").touch()
    (tmp_path / "tmp").mkdir()
    places = {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")}
    process = subprocess.Popen([*LONGSPOOL, "pull", "smollm2"], env={**os.environ, **places}, text=True, stderr=subprocess.PIPE)
    assert process.stderr is not None
    deadline = time.monotonic() + PATIENCE
    while not children(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    (child,) = children(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    assert process.stderr.read().splitlines() == ["Interrupted."]
    assert gone(int(child))
    assert not list((tmp_path / "tmp").iterdir()) and not (tmp_path / "cache").exists()
